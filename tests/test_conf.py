"""Every configuration composes, every mistake is one sentence, and imports point one way."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from training import command, save_target, saved

from headstart import cli
from headstart.data.source import DataConfig
from headstart.eval.settings import EvalConfig
from headstart.heads.checkpoint import load_head
from headstart.heads.load import TargetConfig
from headstart.heads.runtime import RuntimeConfig
from headstart.train.config import TrainConfig

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
cli.register()

GIVEN = {
    "prepare": ["data.path=chats.jsonl"],
    "generate": [],
    "capture": ["rows=rows"],
    "verify": ["store=features"],
    "train": ["rows=rows"],
    "eval": ["checkpoints=[head]"],
    "tree": ["checkpoint=head"],
    "report": ["results=[result]"],
    "plan": [],
    "pipeline": [],
}
"""What each command must be given."""
NEEDED = {
    "target=hf": ["target.path=somewhere"],
    "data=jsonl": ["data.path=chats.jsonl"],
    "model=hf": ["model.path=somewhere"],
    "model@draft_model=hf": ["draft_model.path=somewhere"],
    "drafter=model": ["drafters.model.path=somewhere"],
}
"""What an option needs beside it."""
LISTED = {"eval": ["drafter"]}
"""Groups of which a command takes any number of options, none by default."""
EXPERIMENTS = {"train": ["compare"], "pipeline": ["demo", "smoke"]}
"""An experiment sets options of one command."""


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def choices(command_name: str) -> dict[str, str]:
    """Return the groups that a command composes, with the option each has by default."""
    GlobalHydra.instance().clear()
    with initialize_config_module(cli.CONF, version_base="1.3"):
        cfg = compose(command_name, overrides=GIVEN[command_name], return_hydra_config=True)
    found = cfg.hydra.runtime.choices
    found = {group: found[group] for group in found if not group.startswith("hydra/")}
    return found | dict.fromkeys(LISTED.get(command_name, []))


def every_option() -> Iterator[tuple[str, str]]:
    for name in cli.COMMANDS:
        # One place stands for all that take options of the same group.
        for group in {group.split("@")[0]: group for group in choices(name)}.values():
            known = options(group.split("@")[0])
            for option in EXPERIMENTS[name] if group == "experiment" else known:
                yield name, f"{group}={option}"


def test_every_experiment_belongs_to_a_command():
    assert sorted(sum(EXPERIMENTS.values(), [])) == options("experiment")


# What is there composes


@pytest.mark.parametrize(("name", "override"), list(every_option()))
def test_every_option_of_every_group_composes(name, override):
    given = [*GIVEN[name], *NEEDED.get(override, []), override]
    given += ["data.split=train"] if (name, override) == ("pipeline", "data=jsonl") else []
    assert type(cli.load_config(name, given)).__name__ == cli.COMMANDS[name].schema


def test_every_yaml_file_is_a_command_or_an_option_of_one():
    groups = {group.split("@")[0] for name in cli.COMMANDS for group in choices(name)}
    files = {path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.rglob("*.yaml")}
    groups.add("hydra/launcher")
    known = {f"{group}/{option}" for group in groups for option in options(group)}
    assert files == known | set(cli.COMMANDS)


def test_defaults_in_yaml_and_in_the_schema_do_not_contradict_each_other():
    config = cli.load_config("train", GIVEN["train"])
    assert config.train == TrainConfig()
    assert cli.load_config("eval", GIVEN["eval"]).eval == EvalConfig()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_and_the_composed_config_can_be_shown(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command(name, "--help")
    assert ended.value.code in (None, 0)
    assert f"headstart {name}" in capsys.readouterr().out
    command(name, *GIVEN[name], "--cfg", "job")
    assert "out: " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_the_dispatcher_lists_every_command(argument, capsys):
    with pytest.raises(SystemExit) as ended:
        command(argument)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli.COMMANDS)


def test_an_unknown_command_is_named_and_ends_with_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        command("trian")
    assert ended.value.code == 2
    assert "no command 'trian'" in capsys.readouterr().err


# What is wrong is told in one sentence


MISTAKES = [
    (["train", "hed=eagle"], r"hed: no such option \(did you mean head\?\); expected one of feat"),
    (["train", "head=eagel"], r"head=eagel: .* mean eagle\?\); expected one of eagle, eagle3"),
    (
        ["train", "head=medusa", "head.num_head=3"],
        r"head\.num_head: .* mean num_heads\?\); expected one of depth_decay",
    ),
    (["train", "train.lr=fast"], r"train\.lr=fast: Value 'fast' .* converted to Float"),
    (["train", "head=medusa", "head.fc_bias=false"], r"head\.fc_bias: .*one of depth_decay"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_p59_a_mistyped_option_is_named_with_what_is_allowed_and_leaves_nothing(
    arguments, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message) as ended:
        command(*arguments, "rows=rows")
    assert "\n" not in ended.value.code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "rows=rows", "+x=1"], "x: no such option; expected one of features"),
        (["train", "rows=rows", "+train.x=1"], "train.x: no such option; expected one of accum"),
        (["train"], r"rows is not set: give rows=\.\.\."),
        (["capture"], r"rows is not set: give rows=\.\.\."),
        (["eval"], r"checkpoints=\[\] and no drafters: nothing to measure; give checkpoints="),
        (["eval", "drafter=[lokup]"], r"drafter=lokup: .* mean lookup\?\); expected one of lookup"),
        (["eval", "drafter=lokup"], r"drafter=lokup: .* mean lookup\?\); expected one of lookup"),
        (
            ["eval", "drafter=[lookup]", "drafters.lookup.max_m=5"],
            r"max_m: .* mean max_n\?\); expec",
        ),
        (
            ["eval", "drafter=[lookup]", "drafters.lookup.tree=true"],
            r"lookup\.tree: no such option",
        ),
        (
            ["eval", "drafter=[lookup]", "drafters.lookup.min_n=4"],
            r"max_n=3 is below lookup\.min_n",
        ),
        (
            ["eval", "drafter=[model]"],
            r"drafters\.model\.path is not set: give drafters\.model\.pa",
        ),
        (
            ["eval", "drafter=[suffix_or_head]"],
            r"members: head: there is no head; give checkpoints",
        ),
        (["report"], r"results is not set: give results=\.\.\."),
        (["prepare"], "data.path is not set: give data=jsonl data.path=FILE"),
        (["generate", "target=hf"], r"target\.path is not set: give target\.path=\.\.\."),
        (["train", "rows"], "Error parsing override 'rows'"),
        (["pipeline", "parallel=ddp"], "parallel: this command has no such option; its --help"),
        (["pipeline", "experiment=dmo"], r"experiment=dmo: .* mean demo\?\); expected one"),
        (["train", "rows=rows", "train.max_steps=1.5"], "could not be converted to Integer"),
        (["pipeline", "experiment=compare"], "compare: made for another command: it sets"),
        (["train", "rows=a", "experiment=demo"], "demo: made for another command: it sets"),
        (["pipeline", "data=jsonl", "data.path=a"], "data.split=all: the held-out prompts would"),
        (["pipeline", "heads.medusa.num_heads=0"], "num_heads=0: need at least one"),
        (["generate", "data.split=test"], "data.split=test: expected train, heldout or all"),
        (["generate", "sampling.top_p=2"], r"sampling\.top_p=2\.0: need a mass in \(0, 1\]"),
        (["eval", "checkpoints=[a]", "runtime.threads=0"], "runtime.threads=0: need at least 1"),
        (["eval", "checkpoints=[a]", "tree.depth=0"], "depth"),
    ],
)
def test_other_mistakes_are_one_sentence_too(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message) as ended:
        command(*arguments)
    assert ended.value.code.startswith(f"headstart {arguments[0]}: ")
    assert "\n" not in ended.value.code
    assert list(tmp_path.iterdir()) == []


def test_an_out_directory_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        command("generate", f"out={tmp_path}/file/rows")
    told = ended.value.code
    assert told.startswith(f"headstart generate: out={tmp_path}/file/rows: cannot be made (")
    assert told.endswith("; choose another directory")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "data=jsonl", "data.path=none.jsonl"], "data.path=none.jsonl: no such"),
        (["train", "rows=none"], "none: no rows there"),
        (["eval", "checkpoints=[none]"], "no head checkpoint at none"),
        (["eval", "checkpoints=[a]", "eval.suite=none.jsonl"], "eval.suite=none.jsonl: no "),
    ],
)
def test_files_are_missed_before_the_target_is_loaded(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").touch()
    with pytest.raises(SystemExit, match=message):
        command(*arguments, "target=hf", "target.path=/no/such/target")


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (DataConfig, {"num_prompts": 0}, r"data\.num_prompts=0: need at least one, or null"),
        (DataConfig, {"max_length": 1}, r"data\.max_length=1: need at least 2 tokens"),
        (DataConfig, {"split": "all"}, r"data\.path is not set: give data=jsonl"),
        (TargetConfig, {"dtype": "int8"}, r"target\.dtype=int8: expected one of float32"),
        (TargetConfig, {"attention": "flash"}, r"target\.attention=flash: tree masks need sdpa"),
        (RuntimeConfig, {"threads": 0}, r"runtime\.threads=0: need at least 1, or null"),
        (RuntimeConfig, {"compile": ["head"]}, r"runtime\.compile=\['head'\]: unknown head"),
    ],
)
def test_a_bad_value_names_its_field(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_the_cause_of_a_failed_run_is_one_sentence(tmp_path):
    target = saved(save_target(tmp_path / "target"))
    with pytest.raises(SystemExit, match="^error: .*nowhere: no rows there .*run headstart"):
        command("capture", *target, f"rows={tmp_path}/nowhere", f"out={tmp_path}/out")


# A sweep


@pytest.mark.slow
def test_the_jobs_of_a_sweep_do_not_write_over_one_another(tmp_path):
    target = saved(save_target(tmp_path / "target"))
    tiny = ["data.num_prompts=7", "data.max_length=300", "generate.max_new_tokens=4"]
    command("generate", *target, *tiny, f"out={tmp_path}/rows")
    fast = ["train.max_steps=1", "head.draft_vocab_size=64", "train.precision=bf16,fp32"]
    command("train", "-m", *target, *fast, f"rows={tmp_path}/rows", f"out={tmp_path}/sweep")
    for job in ("0", "1"):
        assert load_head(tmp_path / "sweep" / job / "head")[1].step == 1
    assert not (tmp_path / "sweep" / "head").exists()


def test_a_sweeping_experiment_runs_as_a_sweep_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="experiment=compare: is a sweep over head; run headstart"):
        command("train", "experiment=compare")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_comparison_trains_every_family_on_the_same_tokens(tmp_path):
    directory = save_target(tmp_path / "target", layers=8)  # EAGLE-3 taps states 2, 4 and 5
    tiny = ["data.num_prompts=7", "data.max_length=300", "generate.max_new_tokens=4"]
    for name, split in (("rows", "train"), ("heldout", "heldout")):
        command(
            "generate", *saved(directory), *tiny, f"data.split={split}", f"out={tmp_path}/{name}"
        )
    command("capture", *saved(directory), f"rows={tmp_path}/rows", "aux=[2,4,5]")
    places = [f"rows={tmp_path}/rows", f"heldout_rows={tmp_path}/heldout", f"out={tmp_path}/heads"]
    fast = [f"features={tmp_path}/rows-features", "train.max_steps=2", "train.eval_prompts=2"]
    small = ["head.draft_vocab_size=64", "train.eval_new_tokens=8"]
    command("train", "-m", "experiment=compare", *saved(directory), *places, *fast, *small)
    seen = {p.name: load_head(p / "head")[1] for p in (tmp_path / "heads").iterdir() if p.is_dir()}
    assert sorted(seen) == ["eagle", "eagle3", "eagle31", "hydra_heads", "medusa"]
    assert {info.step for info in seen.values()} == {2}
    assert len({info.tokens_seen for info in seen.values()}) == 1
    assert len({info.trained_on["rows_hash"] for info in seen.values()}) == 1


# Imports


LAYERS = (
    ("files", "launch", "launch_config", "ranks", "signals", "sweep"),
    ("heads",),
    ("eval.engine",),
    ("data",),
    ("eval",),
    ("train",),
    ("pipeline", "jobs", "cli", "__main__"),
)


def layer(module: str) -> int:
    """Return how high a module stands; `headstart` itself holds the version and stands lowest."""
    name = module.removeprefix("headstart").removeprefix(".")
    fits = [
        (len(prefix), level)
        for level, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if name == prefix or name.startswith(f"{prefix}.")
    ]
    return max(fits)[1] if fits else 0


def imported(path: Path) -> set[str]:
    """Return every module of ours that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name for name in found if name.split(".")[0] == "headstart"}


def sources() -> dict[str, Path]:
    folders = [p for p in ROOT.iterdir() if p.name in ("heads", "eval", "data", "train", "conf")]
    files = [*ROOT.glob("*.py"), *(f for folder in folders for f in folder.rglob("*.py"))]
    return {".".join(("headstart", *f.relative_to(ROOT).with_suffix("").parts)): f for f in files}


@pytest.mark.parametrize("module", sorted(sources()))
def test_imports_point_one_way(module):
    own = layer(module.removesuffix(".__init__"))
    above = {name for name in imported(sources()[module]) if layer(name) > own}
    assert not above, f"{module} imports what stands above it"


def test_layers_are_told_apart():
    names = ["headstart.__version__", "headstart.heads.base", "headstart.eval.engine.tree"]
    names += ["headstart.data.rows", "headstart.eval.bench", "headstart.train.run", "headstart.cli"]
    assert [layer(name) for name in names] == list(range(7))
