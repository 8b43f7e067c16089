"""The draft vocabulary in training: picked once, kept on a warm start, never past the tokenizer.

Shapes: B rows, T tokens, V vocabulary.
"""

import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_chat import chat_tokenizer
from models import requests, run, target_of, tiny_model
from torch import Tensor
from training import chat_target, random_rows, token_row

from headstart.data.features import make_features
from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.template import ChatTemplate, TokenRow
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import DraftTree, TreeShape
from headstart.eval.settings import TreeConfig
from headstart.heads.base import DraftHead, build_head, families
from headstart.heads.checkpoint import load_head
from headstart.heads.load import TargetConfig
from headstart.heads.target import Target
from headstart.train.config import TrainConfig
from headstart.train.run import TrainRun, train
from headstart.train.starting import draft_vocab, new_head

OPTIONS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 2},
    "eagle": {},
    "eagle3": {"aux": [1, 2]},
    "hydra_heads": {"num_heads": 2},
}
MODEL_ROWS, ENTRIES = 128, 120


@cache
def padded_target() -> Target:
    """Wrap TINY with a CHAT tokenizer of 120 entries; the eight rows without one are loud."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[ENTRIES:] *= 4
    return target_of(model, chat_tokenizer(entries=ENTRIES), name="padded")


def padded_rows() -> list[TokenRow]:
    """Make answers in which id 125 is the most frequent by far."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, ENTRIES, (12,), generator=generator).tolist() for _ in range(4)]
    return [token_row(f"row-{n}", [*row, *[125] * 8], 4) for n, row in enumerate(rows)]


def job_on(directory: Path, target: Target, rows: Sequence[TokenRow], head: Any) -> TrainRun:
    """Write rows and make a run of two steps on them, the same rows held out."""
    template = ChatTemplate(target.tokenizer).hash
    writer = RowsWriter(directory / "rows", RowsMeta(target.fingerprint, template, {}))
    for row in rows:
        writer.add(row)
    writer.finish("made for a test", {})
    return TrainRun(
        target=TargetConfig(path="in memory"),
        head=head,
        train=TrainConfig(max_steps=2, batch_rows=2, eval_prompts=0, precision="fp32"),
        tree=TreeConfig(name="chain2", depth=2),
        rows=str(directory / "rows"),
        heldout_rows=str(directory / "rows"),
        out=str(directory / "out"),
    )


def drafted(head: DraftHead, target: Target) -> Tensor:
    """Return every token that the head drafts on a few prompts."""
    seen: list[Tensor] = []

    class Noted(HeadDrafter):
        def propose(self, *args: Tensor) -> DraftTree:
            tree = super().propose(*args)
            seen.append(tree.tokens_BN[:, 1:].flatten())
            return tree

    target.adopt(head)
    shape = TreeShape.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]])
    run(target, Noted(head, target.parts, shape, sampling=SamplingConfig()), requests(4, 12))
    tokens = torch.cat(seen)
    return tokens[tokens >= 0]


@torch.no_grad()
def padding_mass(target: Target, rows: Sequence[TokenRow]) -> float:
    """Return the target's mean probability of ids without a token, where a first draft is due."""
    masses = []
    for row in rows:
        law_TV = target.model(torch.tensor([row.token_ids])).logits[0].softmax(-1)
        mass_T = law_TV[:, ENTRIES:].sum(-1)
        masses += [mass_T[t - 1] for t in range(2, len(row.token_ids)) if row.loss_mask[t]]
    return torch.stack(masses).mean().item()


# P10


def test_p10_five_tokens_in_a_vocabulary_of_32_are_filled_up_and_told(caplog):
    """V 100, D 32, supervised ids 5..9 only, EOS 2 and end of turn 4."""
    target = target_of(tiny_model(vocab=100), chat_tokenizer())
    row = token_row("a", [50, 60, 70, 5, 6, 7, 8, 9], 3)
    with caplog.at_level(logging.INFO):
        vocab = draft_vocab([row], 32, target)
    assert vocab.ids_W.tolist() == list(range(32))  # 2, 4, 5..9 and the lowest unused ids
    assert vocab.t2d.sum() == 32
    assert vocab.t2d[torch.arange(32) + vocab.d2t].all()
    assert f"{vocab.hash}: 32 of 100 tokens cover 100.00 % of the answers" in caplog.text
    assert "(25 fillers)" in caplog.text  # neither an answer's token nor a stop token


# P12


def test_p12_another_corpus_or_size_is_another_vocabulary_by_ids_and_by_name():
    A, B = random_rows(6), random_rows(6, seed=1)
    made = [draft_vocab(rows, size, chat_target()) for rows, size in ((A, 32), (A, 48), (B, 32))]
    assert len({vocab.hash for vocab in made}) == 3
    assert len({tuple(vocab.ids_W.tolist()) for vocab in made}) == 3
    assert draft_vocab(A, 32, chat_target()).hash == made[0].hash


def alpha(head: DraftHead, rows: Sequence[TokenRow]) -> Tensor:
    batch = make_features(chat_target(), rows, range(len(rows)))
    value, count = head.eval()(batch, chat_target().parts).metrics["alpha_overlap"]
    return value / count


@pytest.mark.parametrize("family", ["eagle", "medusa"])
def test_p12_a_warm_start_on_another_corpus_keeps_the_vocabulary_and_alpha(family, tmp_path):
    A, B = random_rows(6), random_rows(6, seed=1)
    head_config = families()[family][0](draft_vocab_size=32)
    job = job_on(tmp_path / "a", chat_target(), A, head_config)
    train(chat_target(), job)
    path = Path(job.out) / "head"
    first, info = load_head(path)
    assert info.trained_on["init_from"] is None
    assert draft_vocab(B, 32, chat_target()).hash != first.vocab.hash

    warm = families()[family][0](draft_vocab_size=32, init_from=str(path))
    head, start = new_head(warm, chat_target(), B)
    assert head.vocab.hash == first.vocab.hash
    assert torch.equal(alpha(head, A), alpha(first, A))
    assert start == {"path": str(path), "step": 2, "tokens_seen": info.tokens_seen}

    job = job_on(tmp_path / "b", chat_target(), B, warm)
    train(chat_target(), job)
    trained, info = load_head(Path(job.out) / "head")
    assert torch.equal(trained.vocab.ids_W, first.vocab.ids_W)
    assert info.trained_on["init_from"] == start
    stored = json.loads((Path(job.out) / "head" / "config.json").read_text())
    assert stored["draft_vocab"] == first.vocab.hash
    assert stored["head"]["init_from"] is None


def test_p12_a_warm_start_with_another_size_is_refused(tmp_path):
    job = job_on(tmp_path, chat_target(), random_rows(6), families()["eagle"][0]())
    job.head.draft_vocab_size = 32
    train(chat_target(), job)
    wider = families()["eagle"][0](draft_vocab_size=48, init_from=f"{job.out}/head")
    with pytest.raises(ValueError, match="head.init_from=.* its head differs in draft_vocab_size"):
        new_head(wider, chat_target(), random_rows(6))


# P13


@pytest.mark.parametrize("size", [None, 32])
@pytest.mark.parametrize("family", OPTIONS)
def test_p13_ids_past_the_tokenizer_are_never_drafted_and_their_mass_is_reported(
    family, size, tmp_path
):
    """128 model rows, 120 tokenizer entries, answers full of 125, a target that prefers those."""
    target, config = padded_target(), families()[family][0](**OPTIONS[family])
    config.draft_vocab_size = size
    unrestricted = build_head(families()[family][0](**OPTIONS[family]), target.shape, None)
    unrestricted.initialise(target.parts)
    assert (drafted(unrestricted, target) >= ENTRIES).any()  # what the test is about

    job = job_on(tmp_path, target, padded_rows(), config)
    train(target, job)
    head, _ = load_head(Path(job.out) / "head")
    assert len(head.vocab) == head.config.draft_vocab_size == (size or ENTRIES)
    assert (drafted(head, target) < ENTRIES).all()
    lines = [json.loads(x) for x in (Path(job.out) / "metrics.jsonl").read_text().splitlines()]
    (told,) = (x["heldout/oov_mass[0]"] for x in lines if "heldout/oov_mass[0]" in x)
    mass = padding_mass(target, padded_rows())
    assert mass > 0.1
    assert told == pytest.approx(mass, abs=1e-4) if size is None else told > mass


def test_p13_a_warm_start_over_the_tokenizers_vocabulary_takes_the_same_options(tmp_path):
    job = job_on(tmp_path, padded_target(), padded_rows(), families()["eagle"][0]())
    train(padded_target(), job)
    again = families()["eagle"][0](init_from=f"{job.out}/head")
    head, _ = new_head(again, padded_target(), padded_rows())
    assert head.vocab.ids_W.tolist() == list(range(ENTRIES))


def test_p13_a_draft_vocabulary_larger_than_the_tokenizers_is_refused():
    with pytest.raises(ValueError, match="head.draft_vocab_size=124: .* the target's 120 tokens"):
        draft_vocab(padded_rows(), 124, padded_target())


def test_p13_an_id_past_the_model_is_an_error_that_names_the_row(tmp_path):
    rows = [*padded_rows(), token_row("row-x", [5, 6, 130], 1)]
    job = job_on(tmp_path, padded_target(), rows, families()["eagle"][0]())
    with pytest.raises(ValueError, match="row row-x: token id 130 outside .* vocabulary of 128"):
        train(padded_target(), job)


def test_a_tokenizer_as_large_as_the_model_leaves_the_whole_vocabulary(tmp_path):
    assert chat_target().tokenizer_size == chat_target().shape.vocab_size
    head, start = new_head(families()["eagle"][0](), chat_target(), random_rows(3))
    assert head.vocab is None
    assert head.config.draft_vocab_size is None
    assert start is None
