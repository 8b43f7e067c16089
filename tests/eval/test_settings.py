import pytest
from omegaconf import OmegaConf

from headstart.eval.settings import EvalConfig, TreeConfig


def test_a_depth_is_a_chain():
    tree = TreeConfig(name="chain3", depth=3)
    assert tree.label() == "chain:3"
    assert tree.shape().choices == ((0,), (0, 0), (0, 0, 0))


def test_choices_are_a_static_tree():
    tree = TreeConfig(name="fork", choices=[[1], [0], [0, 0]])
    assert tree.label() == "static:fork"
    assert tree.shape().choices == ((0,), (1,), (0, 0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": 0}, "tree.depth=0: a chain needs at least one"),
        ({}, "tree.depth=None, tree.choices=None, .*tree.total=None: give a depth"),
        ({"depth": 1, "choices": [[0]]}, r"tree.depth=1, tree.choices=\[\[0\]\], "),
        ({"choices": []}, r"tree.choices=\[\]: give at least one path"),
        ({"choices": [[0, 0]]}, r"path \[0, 0\] has no parent"),
        ({"depth": 2, "children": "best"}, "tree.children=best: expected top_k or sampled"),
    ],
)
def test_a_bad_tree_is_refused_by_field(fields, message):
    with pytest.raises(ValueError, match=message):
        TreeConfig(name="tree", **fields)


@pytest.mark.parametrize("name", ["a/b", "", "???"])
def test_a_tree_name_that_is_no_directory_name_is_refused(name):
    with pytest.raises(ValueError, match="tree.name="):
        TreeConfig(name=name, depth=1)


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("num_prompts", 0, 1),
        ("seed", -1, 0),
        ("max_new_tokens", 0, 1),
        ("repeats", 0, 1),
        ("warmup_prompts", 0, 1),
        ("batch_size", 0, 1),
        ("resamples", 1999, 2000),
    ],
)
def test_a_number_below_its_least_is_refused_before_anything_is_decoded(name, value, least):
    with pytest.raises(ValueError, match=f"eval.{name}={value}: need at least {least}"):
        EvalConfig(**{name: value})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TreeConfig, {"name": "fork", "choices": [[0], [0, 1], [0, 0]]}),
        (TreeConfig, {"name": "chain3", "depth": 3}),
        (EvalConfig, {"suite": "questions.jsonl", "repeats": 3}),
    ],
)
def test_settings_compose_as_structured_configs(kind, values):
    composed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), values))
    assert composed == kind(**values)
