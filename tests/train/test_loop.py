"""The training loop: what a step divides by, what a run leaves behind, and what it learns."""

import hashlib
import json
import signal
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
from models import GREEDY, make_head, run, some_vocab
from safetensors.torch import load_file, save_file
from torch import nn
from training import Line, chat_target, numbers_batch, random_rows, token_row

from headstart.data.batching import Dealing, steps_forever
from headstart.data.features import OnlineFeatures, make_features
from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.template import ChatTemplate, TokenRow
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.tree import TreeShape
from headstart.eval.settings import TreeConfig
from headstart.heads.base import DraftHead, FeatureBatch, LossSums, families
from headstart.heads.checkpoint import load_head
from headstart.heads.load import TargetConfig
from headstart.heads.target import Target
from headstart.train.backends import make_parallel
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.heldout import heldout_figures
from headstart.train.loop import Hooks, train_head
from headstart.train.parallel import Parallel
from headstart.train.progress import Progress
from headstart.train.run import TrainRun, train
from headstart.train.starting import draft_vocab
from headstart.train.step import train_step
from headstart.train.tracking import JsonLines

FAMILIES = {
    "medusa": {},
    "eagle": {"feature_noise": 0.0},
    "eagle3": {"aux": [1]},
    "hydra_heads": {},
}
NO_HOOKS = Hooks(lambda weights: {}, lambda weights, progress: None)


def single(precision: str = "fp32") -> Parallel:
    return make_parallel(ParallelConfig(), TrainConfig(precision=precision), torch.device("cpu"))


def gradient(
    head: nn.Module, batches: list[FeatureBatch], *, clip: float = 1e9
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Take one step of SGD at rate 1; return loss, norm, and the gradients it applied."""
    before = {name: p.detach().clone() for name, p in head.named_parameters()}
    parallel, parts = single(), chat_target().parts
    model, sgd = parallel.prepare(head, lambda bare: torch.optim.SGD(bare.parameters(), lr=1.0))
    loss, norm = train_step(model, batches, parts, sgd, parallel, lr=1.0, clip=clip)
    return loss, norm, {n: before[n] - p.detach() for n, p in head.named_parameters()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    # Sums taken in another order: fp32 rounding of the larger entries.
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-4, atol=1e-6)


def trainable(family: str, draft_tokens: int | None = 64) -> DraftHead:
    """Make a head with random weights and a draft vocabulary, in training mode."""
    V = chat_target().shape.vocab_size
    vocab = None if draft_tokens is None else some_vocab(draft_tokens, of=V)
    return make_head(family, chat_target(), vocab=vocab, **FAMILIES[family]).train()


def features(rows: Sequence[TokenRow]) -> FeatureBatch:
    return make_features(chat_target(), rows, range(len(rows)), taps=[1])


class Numbers:
    """A source of rows of which Line's losses can be read off."""

    parts = chat_target().parts

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows, self.lengths = rows, [len(row) for row in rows]
        self.asked: list[list[int]] = []

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return the rows and remember that they were asked for."""
        self.asked.append(list(indices))
        return numbers_batch(*(self.rows[i] for i in indices), row_id=indices[0])


def train_line(source: Numbers, path: Path, hooks: Hooks = NO_HOOKS, **options: object) -> Progress:
    options = {"precision": "fp32", "batch_rows": 1, "log_every": 1, "warmup": 0.0} | options
    return train_head(
        Line(),
        source,
        TrainConfig(**options),
        parallel=single(),
        hooks=hooks,
        tracker=JsonLines(path / "metrics.jsonl"),
    )


def metrics(path: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


# What a step divides by


def test_p26_losses_4_and_1_1_1_make_seven_quarters_and_its_gradient():
    loss, _, change = gradient(Line(), [numbers_batch([4]), numbers_batch([1, 1, 1])])
    assert loss == 7 / 4
    assert change["w"].item() == 7 / 4


class Listener(Line):
    """Remembers the counts it was told of."""

    def forward(self, *args: object) -> LossSums:
        """Take note of the denominators."""
        self.heard = [*getattr(self, "heard", []), args[3]["line"].item()]
        return super().forward(*args)


def test_p26_every_micro_batch_hears_the_counts_of_the_whole_step():
    head = Listener()
    gradient(head, [numbers_batch([4]), numbers_batch([1, 1, 1])])
    assert head.heard == [4, 4]


def test_p26_ten_micro_batches_by_fours_are_three_steps_with_their_own_counts(tmp_path):
    source = Numbers([[1 + i] * (1 + i % 3) for i in range(10)])
    progress = train_line(source, tmp_path, max_steps=3, accumulation=4, lr=1e-12)
    assert progress.step == 3
    assert progress.epoch == 0
    windows = [window for _, window in islice(steps_forever(source.lengths, Dealing(1, 4)), 3)]
    counted = [[m.rows for m in window if not m.filler] for window in windows]
    assert sorted(i for window in counted for (i,) in window) == list(range(10))
    assert sorted(map(len, counted)) == [2, 4, 4]
    for window, loss in zip(counted, metrics(tmp_path, "train/loss"), strict=True):
        tokens = [token for (row,) in window for token in source.rows[row]]
        assert loss == pytest.approx(sum(tokens) / len(tokens), rel=1e-6)
    # The two micro-batches that fill up the short window are nowhere in the sums.
    assert progress.rows == 10
    assert progress.tokens == sum(source.lengths)


def test_p26_the_schedule_moves_once_a_step(tmp_path):
    train_line(Numbers([[1]] * 10), tmp_path, max_steps=3, accumulation=4, lr=0.3, decay=1.0)
    assert metrics(tmp_path, "train/lr") == pytest.approx([0.25, 0.15, 0.05])


@pytest.mark.parametrize("family", FAMILIES)
def test_four_micro_batches_give_the_gradient_of_the_joined_batch(family):
    rows = [token_row(str(n), list(range(5 + n, 20 + 3 * n)), 14 - 4 * n) for n in range(4)]
    assert [row.supervised for row in rows] == [1, 7, 13, 19]
    loss, _, apart = gradient(trainable(family), [features([row]) for row in rows])
    assert loss > 0.1
    joined_loss, _, joined = gradient(trainable(family), [features(rows)])
    assert loss == pytest.approx(joined_loss, rel=1e-5)
    assert_same(apart, joined)


@pytest.mark.parametrize("family", FAMILIES)
def test_p25_more_padding_changes_neither_loss_nor_gradient(family):
    row, long = token_row("a", [9, 10, 11, 12], 2), token_row("b", list(range(5, 69)), 64)
    assert row.supervised == 2
    assert long.supervised == 0  # there to widen the batch to 64, nothing else
    # The whole vocabulary: else both positions may be left out, and 0 equals 0.
    loss, _, change = gradient(trainable(family, None), [features([row])])
    padded_loss, _, padded = gradient(trainable(family, None), [features([row, long])])
    assert loss > 0.1
    assert loss == pytest.approx(padded_loss, rel=1e-6)
    assert_same(change, padded)


@pytest.mark.parametrize("family", FAMILIES)
def test_p07_a_batch_with_nothing_to_learn_from_has_loss_0_and_gradient_0(family):
    user_turns_only = token_row("a", [9, 10, 11, 12, 13], 5)
    loss, norm, change = gradient(trainable(family), [features([user_turns_only])])
    assert loss == 0.0
    assert norm == 0.0
    assert not any(value.any() for value in change.values())


def test_p07_an_unsupervised_row_counts_as_a_step_and_adds_no_token(tmp_path):
    source = Numbers([[3], [0, 0]])
    progress = train_line(source, tmp_path, max_steps=2)
    assert progress.step == 2
    assert progress.supervised_tokens == 1
    assert sorted(metrics(tmp_path, "train/loss"))[0] == 0.0


def test_p07_rows_without_any_supervised_token_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="rows: no supervised token in any of them"):
        train_line(Numbers([[0, 0], [0]]), tmp_path, max_steps=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_clipped_by_their_global_norm(family):
    batch = features(random_rows(3))
    _, whole, full = gradient(trainable(family), [batch])
    _, told, clipped = gradient(trainable(family), [batch], clip=whole / 4)
    assert told == pytest.approx(whole, rel=1e-6)
    assert whole == pytest.approx(float(nn.utils.get_total_norm(full.values())), rel=1e-4)
    for name, value in full.items():
        torch.testing.assert_close(clipped[name], value / 4, rtol=1e-3, atol=1e-6)


# Precision


def hundred_steps(line: Line) -> None:
    """Train under bf16 autocast on a constant gradient of 1."""
    ours = single("bf16")
    model, optimizer = ours.prepare(
        line,
        lambda bare: torch.optim.AdamW(
            bare.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0
        ),
    )
    for _ in range(100):
        parts = chat_target().parts
        train_step(model, [numbers_batch([1])], parts, optimizer, ours, lr=1e-3, clip=1.0)


def test_p28_a_weight_at_1_moves_to_0_9_and_on_to_0_8_after_saving(tmp_path):
    first = Line()
    hundred_steps(first)
    assert first.w.dtype == torch.float32
    assert first.w.item() == pytest.approx(0.900, abs=1e-5)
    save_file(first.state_dict(), tmp_path / "line.safetensors")
    second = Line()
    second.load_state_dict(load_file(tmp_path / "line.safetensors"))
    hundred_steps(second)
    assert second.w.item() == pytest.approx(0.800, abs=1e-5)


def test_p28_a_weight_kept_in_bf16_would_not_move():
    line = Line().to(torch.bfloat16)
    hundred_steps(line)
    assert line.w.item() == 1.0


# Whole runs


def write_rows(directory: Path, rows: Sequence[TokenRow]) -> None:
    template = ChatTemplate(chat_target().tokenizer).hash
    writer = RowsWriter(directory, RowsMeta(chat_target().fingerprint, template, {}))
    for row in rows:
        writer.add(row)
    writer.finish("made for a test", {})


@pytest.fixture
def job(tmp_path) -> TrainRun:
    """A run of two steps on five rows, three of them held out."""
    write_rows(tmp_path / "rows", random_rows(5))
    write_rows(tmp_path / "heldout", random_rows(3, seed=1))
    return TrainRun(
        target=TargetConfig(path="in memory"),
        head=families()["eagle"][0](draft_vocab_size=64),
        train=TrainConfig(max_steps=2, batch_rows=2, eval_prompts=2, eval_new_tokens=6),
        tree=TreeConfig(name="chain2", depth=2),
        rows=str(tmp_path / "rows"),
        heldout_rows=str(tmp_path / "heldout"),
        out=str(tmp_path / "out"),
    )


def target_hash(target: Target) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(target.model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("family", FAMILIES)
def test_p32_the_optimizer_holds_the_heads_tensors_and_the_target_is_left_alone(
    job, family, monkeypatch
):
    made: list[torch.optim.Optimizer] = []

    class Noted(torch.optim.AdamW):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(torch.optim, "AdamW", Noted)
    job.head = families()[family][0](draft_vocab_size=64, **FAMILIES[family])
    before = target_hash(chat_target())
    assert train(chat_target(), job).step == 2
    head, _ = load_head(Path(job.out) / "head")
    held = [p for group in made[0].param_groups for p in group["params"]]
    assert sorted(p.shape for p in held) == sorted(p.shape for p in head.parameters())
    assert not {p.data_ptr() for p in held} & {
        p.data_ptr() for p in chat_target().model.parameters()
    }
    assert target_hash(chat_target()) == before
    assert not any(p.requires_grad or p.grad is not None for p in chat_target().model.parameters())


def test_p32_a_checkpoint_holds_the_heads_tensors_only(job):
    train(chat_target(), job)
    stored = set(load_file(Path(job.out) / "head" / "model.safetensors"))
    head, _ = load_head(Path(job.out) / "head")
    assert stored == set(head.state_dict()) | {"d2t", "t2d"}


def test_a_run_leaves_what_it_was_trained_on_in_its_checkpoint(job):
    progress = train(chat_target(), job)
    _, info = load_head(Path(job.out) / "head")
    assert info.step == 2
    assert info.tokens_seen == progress.tokens
    assert info.target_fingerprint == chat_target().fingerprint
    assert info.trained_on["rows"] == 5


def test_the_same_seed_trains_the_same_head(job):
    digests = set()
    for _ in range(2):
        job.out += "-next"
        train(chat_target(), job)
        digests.add((Path(job.out) / "head" / "model.safetensors").read_bytes())
    assert len(digests) == 1


def test_one_process_may_train_in_both_precisions_in_turn(job):
    for precision in ("bf16", "fp32", "bf16"):
        job.train.precision = precision
        job.out += "-next"
        assert train(chat_target(), job).step == 2


def test_online_and_captured_features_train_the_same_head(job):
    job.train.precision = "fp32"
    train(chat_target(), job)
    captured, _ = load_head(Path(job.out) / "head")
    job.train.features, job.out = "online", f"{job.out}-online"
    train(chat_target(), job)
    online, _ = load_head(Path(job.out) / "head")
    assert_same(dict(captured.named_parameters()), dict(online.named_parameters()))


@pytest.mark.parametrize("features", ["online", "captured"])
def test_a_run_on_packed_rows_sees_every_row_once_an_epoch(job, features):
    job.train.features, job.train.pack_tokens, job.train.batch_rows = features, 32, 1
    progress = train(chat_target(), job)  # 5 rows of 4 to 24 tokens are more than two packed rows
    assert progress.epoch == 0
    assert 2 <= progress.rows <= 5
    assert progress.tokens <= 2 * 32


def test_a_row_longer_than_pack_tokens_is_refused_before_training(job):
    job.train.pack_tokens = 8
    with pytest.raises(ValueError, match=r"train.pack_tokens=8: row row-00\d has \d+ tokens"):
        train(chat_target(), job)
    assert not Path(job.out).exists()


def test_a_features_directory_that_online_training_ignores_is_told(job):
    job.train.features, job.features = "online", "somewhere"
    with pytest.warns(UserWarning, match="features=somewhere has no effect with"):
        train(chat_target(), job)


def test_p18_features_of_other_rows_are_refused(job):
    train(chat_target(), job)
    job.features, job.rows = f"{job.rows}-features", job.heldout_rows
    job.out += "-next"
    with pytest.raises(ValueError, match="feature store: made with rows_hash="):
        train(chat_target(), job)


def test_rows_of_another_chat_template_are_refused(job):
    meta = Path(job.rows) / "meta.json"
    fields = json.loads(meta.read_text()) | {"template_hash": "other"}
    meta.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="rendered with chat template other, the target has"):
        train(chat_target(), job)


def test_rows_of_another_target_are_told(job):
    meta = Path(job.rows) / "meta.json"
    fields = json.loads(meta.read_text()) | {"target_fingerprint": "other"}
    meta.write_text(json.dumps(fields))
    with pytest.warns(UserWarning, match="the answers are not this target's own"):
        train(chat_target(), job)


def test_p10_a_draft_vocabulary_holds_both_stop_tokens_though_no_answer_does():
    row = token_row("a", list(range(100, 140)), 8)
    vocab = draft_vocab([row], 32, chat_target())
    assert row.supervised == 32
    assert vocab.ids_W.tolist() == [2, 4, *range(108, 138)]


def test_p12_a_warm_start_keeps_vocabulary_and_weights(job, tmp_path):
    train(chat_target(), job)
    first, _ = load_head(Path(job.out) / "head")
    job.rows, job.heldout_rows = job.heldout_rows, None
    job.head.init_from, job.out = str(Path(job.out) / "head"), str(tmp_path / "warm")
    job.train.max_steps, job.train.lr = 1, 1e-12
    train(chat_target(), job)
    warm, _ = load_head(Path(job.out) / "head")
    assert torch.equal(warm.vocab.ids_W, first.vocab.ids_W)
    assert_same(dict(warm.named_parameters()), dict(first.named_parameters()))


def test_a_warm_start_with_other_head_options_is_refused_by_name(job):
    train(chat_target(), job)
    start, job.out = str(Path(job.out) / "head"), f"{job.out}-next"
    job.head = families()["eagle"][0](draft_vocab_size=64, num_layers=2, init_from=start)
    with pytest.raises(ValueError, match="its head differs in num_layers"):
        train(chat_target(), job)


def test_a_tree_deeper_than_the_head_is_refused_before_training(job):
    job.head = families()["medusa"][0](draft_vocab_size=64, num_heads=2)
    job.tree = TreeConfig(name="chain5", depth=5)
    with pytest.raises(ValueError, match="tree.depth=5 but head.num_heads=2"):
        train(chat_target(), job)
    assert not Path(f"{job.rows}-features").exists()  # nor has anything been captured
    assert not (Path(job.out) / "head").exists()


def test_a_directory_that_holds_a_head_is_refused(job):
    train(chat_target(), job)
    with pytest.raises(ValueError, match="holds training checkpoints already; go on with"):
        train(chat_target(), job)


# Ends that are not the planned one


def test_a_loss_that_is_not_finite_names_step_and_rows(tmp_path):
    class Broken(Numbers):
        def batch(self, indices: Sequence[int]) -> FeatureBatch:
            batch = super().batch(indices)
            if 1 in indices:
                batch.tokens_BT = batch.tokens_BT * float("nan")
            return batch

    with pytest.raises(ValueError, match=r"step \d: loss nan, .* \(rows \[1\]\); lower train\.lr"):
        train_line(Broken([[1], [1], [1]]), tmp_path, max_steps=3)


def test_a_loss_that_is_no_number_stops_the_step_though_its_gradient_is_one():
    class Odd(Line):
        def forward(self, *arguments: object) -> LossSums:
            sums = super().forward(*arguments)
            sums.numerators["line"] = sums.numerators["line"] + float("nan")
            return sums

    head = Odd()
    with pytest.raises(ValueError, match="loss nan"):
        gradient(head, [numbers_batch([3])])
    assert head.w.item() == 1.0


def test_ctrl_c_leaves_a_checkpoint_that_loads(job, monkeypatch):
    ours = OnlineFeatures.batch
    calls = 0

    def interrupted(self: OnlineFeatures, indices: Sequence[int]) -> FeatureBatch:
        nonlocal calls
        calls += 1
        if calls == 4:
            signal.raise_signal(signal.SIGINT)
        return ours(self, indices)

    monkeypatch.setattr(OnlineFeatures, "batch", interrupted)
    job.train.features, job.train.max_steps = "online", 100
    with pytest.raises(KeyboardInterrupt):
        train(chat_target(), job)
    _, info = load_head(Path(job.out) / "head")
    assert info.step == 4


def test_p54_an_evaluation_that_fails_is_seen_and_does_not_take_the_head_with_it(job, monkeypatch):
    def failing(*_: object, **__: object) -> float:
        raise RuntimeError("the evaluator failed")

    monkeypatch.setattr("headstart.train.evaluation.quick_tau", failing)
    with pytest.raises(RuntimeError, match="the evaluator failed"):
        train(chat_target(), job)
    assert load_head(Path(job.out) / "head")[1].step == 2


@pytest.mark.parametrize("every", [1, 2])
def test_evaluation_and_saving_keep_their_intervals(tmp_path, every):
    evaluated, saved = [], []
    hooks = Hooks(
        lambda weights: evaluated.append(1) or {"heldout/loss": 1.0},
        lambda weights, progress: saved.append(progress.step),
    )
    options = {"max_steps": 4, "eval_every": every, "save_every": every}
    train_line(Numbers([[1]] * 3), tmp_path, hooks, **options)
    assert saved == [*range(every, 5, every), 4]
    assert len(evaluated) == 4 // every + 1


def test_seconds_of_training_end_a_run_and_evaluation_is_not_counted(tmp_path):
    hooks = Hooks(lambda weights: time.sleep(0.2) or {}, lambda weights, progress: None)
    start = time.perf_counter()
    progress = train_line(
        Numbers([[1]] * 3), tmp_path, hooks, max_steps=None, max_seconds=0.3, eval_every=100
    )
    wall = time.perf_counter() - start
    longest_step = 0.2
    assert 0.3 <= progress.seconds < 0.3 + longest_step
    assert wall >= progress.seconds + 0.2
    assert sum(progress.by_stage.values()) == pytest.approx(progress.seconds, rel=0.01)


def test_steps_and_seconds_both_bound_a_run(tmp_path):
    assert train_line(Numbers([[1]]), tmp_path, max_steps=3, max_seconds=60.0).step == 3


# Figures


@pytest.mark.parametrize("family", FAMILIES)
def test_held_out_figures_are_sums_over_rows_whatever_the_batches(family):
    head = trainable(family)
    source = OnlineFeatures(chat_target(), random_rows(5, seed=2), head.aux_features)
    one, two, five = (heldout_figures(head, source, rows, single()) for rows in (1, 2, 5))
    assert one.keys() == two.keys()
    assert one == pytest.approx(five, rel=1e-5)
    assert two == pytest.approx(five, rel=1e-5)
    assert head.training


def test_the_held_out_loss_of_uneven_batches_is_seven_quarters():
    figures = heldout_figures(Line(), Numbers([[4], [1, 1, 1]]), 1, single())
    assert figures == {"heldout/loss": 1.75}


@pytest.fixture(scope="module")
def chat() -> TokenRow:
    """One conversation: a question and 64 tokens of the target's own answer."""
    template = ChatTemplate(chat_target().tokenizer)
    prompt = template.prompt_ids([{"role": "user", "content": "tell me"}])
    answer = run(chat_target(), None, [Request("chat", tuple(prompt), 64)])["chat"].token_ids
    return token_row("chat", [*prompt, *answer], len(prompt))


@pytest.mark.parametrize(
    ("family", "depth", "options", "lr"),
    [
        # The tied rows of so narrow a target cannot express 64 answers three tokens ahead.
        ("medusa", 3, {"num_heads": 3, "readout": "own", "loss": "ce_hard"}, 1e-2),
        ("eagle", 1, {"feature_noise": 0.0}, 3e-3),
    ],
)
def test_p54_a_head_overfitted_on_one_chat_is_accepted_there(
    tmp_path, chat, family, depth, options, lr
):
    head = make_head(family, chat_target(), seed=None, **options)
    train_head(
        head,
        OnlineFeatures(chat_target(), [chat]),
        TrainConfig(lr=lr, max_steps=200, batch_rows=1, precision="fp32"),
        parallel=single(),
        hooks=NO_HOOKS,
        tracker=JsonLines(tmp_path / "metrics.jsonl"),
    )
    shape = TreeShape.chain(depth)
    drafter = HeadDrafter(head.eval(), chat_target().parts, shape, sampling=GREEDY)
    first = chat.loss_mask.index(1)
    request = Request("chat", tuple(chat.token_ids[:first]), 64)
    rounds = run(chat_target(), drafter, [request])["chat"].rounds
    whole = [r for r in rounds if r.stop != "cut" and r.drafted == depth]
    assert len(whole) >= 64 // (depth + 1) - 1
    assert sum(r.accepted for r in whole) >= 0.98 * sum(r.drafted for r in whole)


def test_p54_tau_along_the_way_is_the_real_verifiers_on_the_trained_head(job, chat, tmp_path):
    """One drafted token of an overfitted head is accepted in every round: tau comes near 2."""
    write_rows(tmp_path / "chat", [chat])
    job.rows = job.heldout_rows = str(tmp_path / "chat")
    job.head = families()["eagle"][0](feature_noise=0.0)
    job.tree = TreeConfig(name="chain1", depth=1)
    job.train = TrainConfig(
        lr=3e-3, max_steps=200, batch_rows=1, precision="fp32", eval_prompts=1, eval_new_tokens=41
    )
    train(chat_target(), job)
    (tau,) = metrics(Path(job.out), "heldout/tau_with_bonus_micro")
    assert tau == 2.0
