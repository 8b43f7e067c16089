"""The compiled runtime: the same texts as eager, every graph made before the clock, nothing silent.

Compiling a graph takes seconds, so one compiled target serves all tests that only read it.
"""

from collections.abc import Callable, Sequence

import models
import pytest
import torch
from models import make_head, requests, target_of, tiny_model, tokens_of, variant_model
from torch import Tensor

from headstart.eval.batch_sweep import batch_sweep
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.base import Drafter
from headstart.eval.engine.drafters.draft_model import ModelDrafter
from headstart.eval.engine.drafters.dynamic import DynamicHeadDrafter
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import DraftTree, TreeShape
from headstart.eval.settings import EvalConfig
from headstart.eval.suites import Suite
from headstart.heads.base import DraftHead
from headstart.heads.cache import KVCache
from headstart.heads.compiled import Compiler
from headstart.heads.compiled_target import CompiledTarget
from headstart.heads.replay import Storage
from headstart.heads.runtime import Compilation, RuntimeConfig, late_warning
from headstart.heads.target import Target

FAMILIES = (
    "medusa",
    "eagle3",
    pytest.param("eagle", marks=pytest.mark.slow),
    pytest.param("hydra_heads", marks=pytest.mark.slow),
)
TREE = TreeShape.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]])
BOTH = ["target", "drafter"]


def _target(*, compiled: bool, pack: bool = True) -> Target:
    target = target_of(tiny_model())
    if pack:
        target.pack()
    if compiled:
        RuntimeConfig(compile=BOTH).attach(target)
    return target


def _head(family: str, target: Target) -> DraftHead:
    """Make a random head as evaluation has it: the same weights for every target of one shape."""
    options = {"aux": [1, 2, 3]} if family == "eagle3" else {}
    head = make_head(family, target, **options)
    target.adopt(head)
    return head


def _drafter(target: Target, head: DraftHead, shape: TreeShape) -> HeadDrafter:
    return HeadDrafter(head, target.parts, shape, sampling=SamplingConfig())


def _model_drafter(target: Target) -> ModelDrafter:
    """Make a drafter of a draft model as evaluation has it."""
    model = target_of(tiny_model(seed=7, layers=2).to(target.device), name="small")
    drafter = ModelDrafter(model, target, tokens=3, sampling=SamplingConfig())
    target.adopt_model(model)
    return drafter


def _any_drafter(target: Target, family: str) -> Drafter:
    if family == "draft model":
        return _model_drafter(target)
    return _drafter(target, _head(family, target), TREE)


@pytest.fixture(scope="module")
def eager() -> Target:
    return _target(compiled=False)


@pytest.fixture(scope="module")
def compiled() -> Target:
    return _target(compiled=True)


def run(
    target: Target, drafter: Drafter | None, prompts: list[Request], batch_size: int = 1
) -> dict[str, Completion]:
    """Decode one prompt after the other: a batch needs twice the graphs."""
    return models.run(target, drafter, prompts, batch_size=batch_size)


def _info(target: Target) -> Compilation:
    return target.compiled.info


def test_all_layers_share_one_graph_a_class_of_sizes(compiled: Target) -> None:
    compiled.new_cache(1, 64, 4)
    compiled.new_cache(1, 640, 9)
    graphs = {id(graph) for layer in compiled.layers for graph in layer.forward.graphs}
    assert compiled.shape.num_layers == 4
    assert len(graphs) == 2  # one token, and more, of one row each


def test_compiled_passes_give_the_eager_states(eager: Target, compiled: Target) -> None:
    def states(target: Target) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        cache, found = target.new_cache(1, 300, 8), []
        for tokens in (40, 1, 3, 8, 100, 1, 5):
            ids = torch.randint(0, 128, (1, tokens), generator=generator)
            depth = torch.arange(tokens)[None]
            causal = torch.ones(1, tokens, tokens, dtype=torch.bool).tril()
            output = target.pass_over(
                ids, depth, causal, cache, rows=[0] if tokens in (40, 100) else None, taps=(1, 3)
            )
            cache.advance([tokens])
            found += [output.hidden_BTD, output.aux[1], output.aux[3]]
        return found

    for have, want in zip(states(compiled), states(eager), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def test_p47_compiled_plain_decoding_gives_the_eager_texts(eager: Target, compiled: Target) -> None:
    prompts = requests(3, 24)
    assert tokens_of(run(compiled, None, prompts)) == tokens_of(run(eager, None, prompts))
    assert _info(compiled).late == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_p47_compiled_heads_draft_what_eager_ones_draft_and_leave_the_text_alone(
    eager: Target, compiled: Target, family: str
) -> None:
    prompts = requests(2, 20)
    plain, head = tokens_of(run(eager, None, prompts)), _head(family, compiled)
    for shape in (TreeShape.chain(3), TREE):
        want = run(eager, _drafter(eager, _head(family, eager), shape), prompts)
        drafter = _drafter(compiled, head, shape)
        drafter.start(1, 64)  # compiles
        with compiled.compiled.clock():
            have = run(compiled, drafter, prompts)
        assert tokens_of(have) == plain
        rounds = {name: [r.accepted for r in done.rounds] for name, done in have.items()}
        assert rounds == {name: [r.accepted for r in done.rounds] for name, done in want.items()}
    assert _info(compiled).late == 0


def _refused(*_: object, **__: object) -> None:
    raise AssertionError("a layer ran eagerly")


def test_p47_a_compiled_draft_model_drafts_what_an_eager_one_drafts_and_leaves_the_text_alone(
    eager: Target, compiled: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = requests(3, 24)
    want, drafter = run(eager, _model_drafter(eager), prompts), _model_drafter(compiled)
    drafter.start(1, 64)  # compiles
    propose = drafter.propose

    def proposed(*args: Tensor) -> DraftTree:
        with monkeypatch.context() as patched:
            for layer in drafter.model.layers:
                patched.setattr(layer.forward.source, "forward", _refused)
            return propose(*args)

    monkeypatch.setattr(drafter, "propose", proposed)
    with compiled.compiled.clock():
        have = run(compiled, drafter, prompts)
    assert tokens_of(have) == tokens_of(want) == tokens_of(run(eager, None, prompts))
    rounds = {name: [r.accepted for r in done.rounds] for name, done in have.items()}
    assert rounds == {name: [r.accepted for r in done.rounds] for name, done in want.items()}
    assert _info(compiled).late == 0


def test_what_is_compiled_is_told_by_name(compiled: Target) -> None:
    _model_drafter(compiled)
    _head("medusa", compiled)
    told = _info(compiled).networks
    assert told[0] == "target"
    assert {"draft model small", "medusa head"} <= set(told)
    assert _info(compiled).parts == BOTH


def test_a_draft_model_stays_eager_where_drafters_are_to_and_is_not_told_as_compiled() -> None:
    target = _target(compiled=False)
    target.compiled = CompiledTarget(Compiler(Compilation(["target"])), target, "target")
    drafter = _model_drafter(target)
    assert drafter.model.compiled is None
    assert "forward" not in vars(drafter.model.layers[0])
    assert (_info(target).parts, _info(target).networks) == (["target"], ["target"])


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "draft model"])
def test_a_compiled_batch_gives_the_eager_texts_down_to_its_last_row(
    eager: Target, family: str
) -> None:
    target, prompts = _target(compiled=True), requests(5, 16)
    drafter = _any_drafter(target, family)
    drafter.start(4, 64)  # makes what a batch needs, the rows left at its end among it
    target.new_cache(4, 64, 8)
    with target.compiled.clock():
        have = run(target, drafter, prompts, batch_size=4)
    assert tokens_of(have) == tokens_of(run(eager, None, prompts))
    assert _info(target).late == 0


@pytest.mark.slow
def test_a_dynamic_tree_is_compiled_too(eager: Target, compiled: Target) -> None:
    prompts = requests(2, 20)
    drafter = DynamicHeadDrafter(
        _head("eagle", compiled), compiled.parts, DynamicShape(top_k=3, levels=3, total=8)
    )
    assert tokens_of(run(compiled, drafter, prompts)) == tokens_of(run(eager, None, prompts))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral", "granite", "phi"])
def test_other_architectures_compile_and_give_the_eager_texts(name: str) -> None:
    eager, target = (target_of(variant_model(name)) for _ in range(2))
    RuntimeConfig(compile=["target"]).attach(target)
    prompts = requests(2, 20)
    assert tokens_of(run(target, None, prompts)) == tokens_of(run(eager, None, prompts))


@pytest.mark.slow
def test_an_unpacked_target_is_compiled_as_well(eager: Target) -> None:
    target, prompts = _target(compiled=True, pack=False), requests(2, 16)
    assert tokens_of(run(target, None, prompts)) == tokens_of(run(eager, None, prompts))


def test_capture_and_prefill_run_eagerly(compiled: Target) -> None:
    graphs = _info(compiled).graphs
    ids = torch.zeros(2, 33, dtype=torch.int64)
    compiled.forward(ids)
    assert _info(compiled).graphs == graphs


def test_a_size_that_no_graph_is_right_for_is_compiled_and_counted_as_late() -> None:
    target = _target(compiled=True)
    cache = target.new_cache(1, 64, 4)
    made = _info(target).graphs
    layer = target.layers[0].forward
    layer.graphs.clear()
    ids, depth = torch.zeros(1, 3, dtype=torch.int64), torch.arange(3)[None]
    causal = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    with target.compiled.clock():
        target.pass_over(ids, depth, causal, cache)  # allocates the cache, eagerly
        target.pass_over(ids, depth, causal, cache)
    assert (_info(target).graphs, _info(target).late) == (made + 1, 1)
    assert late_warning(_info(target)) == [
        "runtime: 1 graphs were compiled while the clock ran; times include that"
    ]
    assert late_warning(None) == []


def test_a_layer_that_cannot_be_traced_is_an_error_that_names_it() -> None:
    target = target_of(tiny_model())
    mlp, forward = target.layers[0].mlp, target.layers[0].mlp.forward
    mlp.forward = lambda x: forward(x) * (2.0 if float(x.sum()) > 1e9 else 1.0)  # asks the data
    with pytest.raises(RuntimeError, match=r"LlamaDecoderLayer cannot be compiled .*runtime=eager"):
        RuntimeConfig(compile=["target"]).attach(target)


def test_no_c_compiler_is_an_error_with_its_cure() -> None:
    none = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with none, pytest.raises(RuntimeError, match=r"no C\+\+ compiler found; install g\+\+"):
        RuntimeConfig(compile=["target"]).attach(target_of(tiny_model()))


@pytest.mark.slow
def test_layers_with_equal_weights_shapes_but_other_sums_do_not_share_a_graph() -> None:
    target = target_of(tiny_model())
    target.layers[2].self_attn.scaling *= 2  # nothing but the trace can tell
    RuntimeConfig(compile=["target"]).attach(target)
    assert _info(target).graphs == 4


def test_eager_leaves_the_target_as_it_is() -> None:
    target = target_of(tiny_model())
    RuntimeConfig().attach(target)
    assert target.compiled is None
    assert "forward" not in vars(target.layers[0])


def test_a_part_that_is_not_known_and_a_drafter_alone_are_refused() -> None:
    with pytest.raises(ValueError, match=r"runtime\.compile=\['head'\]: unknown head"):
        RuntimeConfig(compile=["head"])
    with pytest.raises(ValueError, match="unequal comparison; add target"):
        RuntimeConfig(compile=["drafter"])


def _rerun(
    call: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> tuple[list[Tensor], Callable[[], None]]:
    """Stand in for a CUDA graph: the same function of the same addresses, run again."""
    outputs = [output.clone() for output in call(*inputs)]

    def again() -> None:
        for output, fresh in zip(outputs, call(*inputs), strict=True):
            output.copy_(fresh)

    return outputs, again


@pytest.fixture(scope="module")
def recorded() -> Target:
    """A target whose layers are recorded as on a GPU, by the stand-in."""
    target = _target(compiled=False)
    target.compiled = CompiledTarget(Compiler(Compilation(list(BOTH)), _rerun), target, "target")
    return target


@pytest.mark.parametrize("family", ["eagle3", "medusa", "draft model"])
def test_recorded_layers_read_what_they_are_given_and_not_what_was_recorded(
    eager: Target, recorded: Target, family: str
) -> None:
    prompts, before = requests(3, 16), _info(recorded).recordings
    drafter = _any_drafter(recorded, family)
    assert tokens_of(run(recorded, drafter, prompts)) == tokens_of(run(eager, None, prompts))
    assert _info(recorded).recordings > before


def test_a_recording_made_while_the_clock_runs_is_late() -> None:
    def times(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x * y]

    compiler = Compiler(Compilation(list(BOTH)), _rerun)
    replays, found = compiler.replays(), []
    with compiler.clock():
        for value in (1.0, 3.0):
            found += replays(times, [torch.full((2,), value)], [], [torch.tensor(2.0)])
    assert [each.tolist() for each in found] == [[2.0, 2.0], [6.0, 6.0]]
    assert (compiler.info.recordings, compiler.info.late) == (1, 1)


@pytest.mark.parametrize("family", ["eagle3", "draft model"])
def test_another_prompt_of_the_same_passes_is_not_recorded_again(
    recorded: Target, family: str
) -> None:
    """Each has caches of its own, of its length, that lie where those of the one before lay."""
    drafter = _any_drafter(recorded, family)
    first, other = ([Request("p", (7, 8, 9, 7), new)] for new in (17, 15))
    run(recorded, drafter, first)
    before = _info(recorded).recordings
    run(recorded, drafter, other)
    assert _info(recorded).recordings == before


def test_two_caches_at_once_do_not_share_their_storage() -> None:
    storage, caches = Storage(), []
    for value in (1.0, 2.0):
        cache = KVCache(1, 16, 2, dtype=torch.float32)
        cache.reuse(storage)
        cache.open_next(1, 3)
        cache.update(torch.full((1, 2, 3, 4), value), torch.full((1, 2, 3, 4), value), 0)
        cache.advance([3])
        caches.append(cache)
    assert [c.committed(0)[0][0].unique().tolist() for c in caches] == [[1.0], [2.0]]
    places = {c.stacks[0].data_ptr() for c in caches}
    del cache, caches
    for _ in range(2):
        again = storage.take((2, 1, 2, 512, 4), torch.zeros(0))
        assert again.data_ptr() in places
        assert not again.any()  # masked slots are multiplied by weight 0, and may hold no NaN
        places.remove(again.data_ptr())


def test_what_the_batch_sweep_compiles_or_records_on_the_clock_is_late(recorded: Target) -> None:
    """The second prompt reads a part of its cache that no prompt of the warm-up came to."""
    requests = [Request(f"p{n}", (7,) * n, 9) for n in (5, 150)]
    suite = Suite("two", "0" * 16, requests, {r.prompt_id: "x" for r in requests})
    config = EvalConfig(batch_sizes=[1], num_prompts=2, warmup_prompts=1, resamples=2_000)
    before = _info(recorded).late
    batch_sweep(recorded, [], suite, sampling=SamplingConfig(), config=config, stop_ids=())
    assert _info(recorded).late > before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["eagle3", "draft model"])
def test_cuda_graphs_give_the_eager_texts(family: str) -> None:
    target, prompts = target_of(tiny_model().to("cuda")), requests(3, 16)
    RuntimeConfig(compile=BOTH).attach(target)
    drafter = _any_drafter(target, family)
    assert tokens_of(run(target, drafter, prompts)) == tokens_of(run(target, None, prompts))
    assert _info(target).recordings > 0


def test_cuda_graphs_are_refused_where_they_cannot_be() -> None:
    with pytest.raises(ValueError, match="cuda_graphs=true needs compiled layers"):
        RuntimeConfig(cuda_graphs=True)
    with pytest.raises(ValueError, match="cuda_graphs=true but the target is on cpu"):
        RuntimeConfig(compile=["target"], cuda_graphs=True).attach(target_of(tiny_model()))
