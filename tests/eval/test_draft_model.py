"""A separate draft model: its cache after any rounds, its law, and models that do not fit.

Shapes: B rows, K drafted tokens, V vocabulary.
"""

from collections.abc import Callable

import pytest
import torch
from fixtures_chat import chat_tokenizer
from models import (
    ScriptedDrafter,
    markov,
    recurrent_model,
    requests,
    run,
    scripted,
    target_of,
    tau,
    tiny_model,
    tokens_of,
    variant_model,
)
from torch import Tensor

from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.config import ModelConfig
from headstart.eval.engine.drafters.draft_model import ModelDrafter
from headstart.eval.engine.sampling import SamplingConfig, processed_probs, prompt_key
from headstart.eval.engine.tree import DraftTree, TreeShape
from headstart.eval.metrics import figures, prompt_sums
from headstart.heads.target import Target

GREEDY = SamplingConfig()
K = 4


def small_model(**config: object) -> Target:
    return target_of(tiny_model(seed=7, layers=2, **config), name="small")


class Overruled:
    """Lets a drafter draft, keeps what it drafted by root position, and sends a script instead."""

    def __init__(self, inner: ModelDrafter, script: ScriptedDrafter, depths: list[int]) -> None:
        self.inner, self.script, self.turn = inner, script, 0
        self.drafts: dict[tuple[int, int], list[int]] = {}
        script.right = lambda path: len(path) <= depths[self.turn % len(depths)]

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Record the model's draft and return the script's."""
        drafted = self.inner.propose(root_B, positions_B, keys_B).tokens_BN[:, 1:].tolist()
        places = zip(keys_B.tolist(), positions_B.tolist(), strict=True)
        self.drafts |= dict(zip(places, drafted, strict=True))
        self.turn += 1
        return self.script.propose(root_B, positions_B, keys_B)


def drafts_after_rounds(
    target: Target, model: Target, prompts: list[Request], depths: list[int], **options: int
) -> dict[tuple[str, int], tuple[list[int], list[int]]]:
    """Return (text, draft) of every round in which a script accepts `depths` tokens in turn."""
    drafter = ModelDrafter(model, target, tokens=K, sampling=GREEDY)
    script = scripted(target, prompts, TreeShape.chain(K), lambda path: True)
    worn = Overruled(drafter, script, depths)
    run(target, worn, prompts, **options)
    names = {prompt_key(r.prompt_id): r.prompt_id for r in prompts}
    return {
        (names[key], position): (script.texts[key][: position + 1], draft)
        for (key, position), draft in worn.drafts.items()
    }


def test_a_draft_model_that_cannot_be_rolled_back_is_refused_as_one(tiny):
    model = target_of(recurrent_model(), name="tiny-jamba")
    with pytest.raises(ValueError, match="tiny-jamba: .* can neither decode nor draft here"):
        ModelDrafter(model, tiny, tokens=2, sampling=GREEDY)


def continued(model: Target, text: list[int], count: int) -> list[int]:
    """Continue a text greedily by the model alone."""
    return run(model, None, [Request("p", tuple(text), count)], batch_size=1)["p"].token_ids


@pytest.mark.parametrize("depths", [[0], [K], [1, K, 0, 2, K, K, 3]], ids=str)
def test_p49_drafts_after_any_rounds_are_the_models_own_continuation(tiny, depths):
    """Rounds that accept nothing, all, and anything between; rows that join and move."""
    model, prompts = small_model(), requests(5, 30)
    found = drafts_after_rounds(tiny, model, prompts, depths, batch_size=3)
    assert len(found) > 20
    for text, draft in list(found.values())[:: len(found) // 20]:
        assert draft == continued(model, text, K)


def test_p51_a_draft_model_with_a_sliding_window_rolls_back(tiny):
    model, prompts = target_of(variant_model("mistral", num_hidden_layers=2)), requests(3, 24)
    found = drafts_after_rounds(tiny, model, prompts, [2, 0, K, 1])
    for text, draft in list(found.values())[::2]:
        assert draft == continued(model, text, K)


def counting_passes(model: Target, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record (rows, tokens) of every pass of a model."""
    passes, pass_over = [], model.pass_over

    def counted(tokens_RN: Tensor, *args: object, **kwargs: object) -> object:
        passes.append(tuple(tokens_RN.shape))
        return pass_over(tokens_RN, *args, **kwargs)

    monkeypatch.setattr(model, "pass_over", counted)
    return passes


def test_after_a_whole_draft_was_accepted_the_next_round_reads_two_tokens(tiny, monkeypatch):
    """The target drafts for itself: each draft is accepted whole, and its last token unread."""
    model = target_of(tiny_model())
    drafter = ModelDrafter(model, tiny, tokens=K, sampling=GREEDY)
    passes = counting_passes(model, monkeypatch)
    done = run(tiny, drafter, [Request("p", (5, 6, 7), 1 + 3 * (K + 1))])
    assert tau(done) == K + 1
    reading_prompt = [(1, 3)]
    first, later = [(1, 1)] * K, [(1, 2), *[(1, 1)] * (K - 1)]
    assert passes == [*reading_prompt, *first, *later, *later]


def test_k_drafted_tokens_cost_k_passes(tiny, monkeypatch):
    model = small_model()
    drafter = ModelDrafter(model, tiny, tokens=3, sampling=GREEDY)
    passes = counting_passes(model, monkeypatch)
    done = run(tiny, drafter, [Request("p", (1, 2, 3), 12)])
    assert drafter.draft_calls == 3
    assert len(passes) == 1 + 3 * len(done["p"].rounds)
    sums = [prompt_sums(c, None, draft_calls_per_round=3) for c in done.values()]
    assert sums[0].draft_calls == len(passes) - 1
    assert figures(sums)["alpha_cond"] is not None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_p54_a_target_that_drafts_for_itself_is_always_accepted(tiny, temperature):
    sampling = SamplingConfig(temperature=temperature, seed=4)
    drafter = ModelDrafter(target_of(tiny_model()), tiny, tokens=K, sampling=sampling)
    done = run(tiny, drafter, requests(6, 1 + 4 * (K + 1)), sampling=sampling, batch_size=1)
    assert drafter.scheme == ("a" if temperature > 0 else "a1")
    assert tau(done) == K + 1


def test_drafts_are_drawn_from_the_law_that_is_recorded():
    """20,000 drafts of MARKOV rows: processed as the target's, recorded exactly as drawn from."""
    rows = torch.rand(8, 8, generator=torch.Generator().manual_seed(3)) + 0.05
    law_VV = rows / rows.sum(-1, keepdim=True)
    model = target_of(markov(law_VV.tolist()))
    sampling = SamplingConfig(temperature=0.6, top_k=5, top_p=0.95, seed=9)
    drafter = ModelDrafter(model, model, tokens=2, sampling=sampling)
    B = 20_000
    drafter.start(B, 8)
    for row in range(B):
        drafter.begin(row, 3)
    drafter.observe(torch.full((B, 1), 5), torch.zeros(B, 1, 8), [1] * B)
    tree = drafter.propose(torch.full((B,), 5), torch.ones(B).long(), torch.arange(B))
    tree.check()
    want_VV = processed_probs(law_VV.log(), sampling)
    torch.testing.assert_close(tree.draft_probs_BNV[:, 0], want_VV[5].expand(B, -1))
    torch.testing.assert_close(tree.draft_probs_BNV[:, 1], want_VV[tree.tokens_BN[:, 1]])
    assert (tree.draft_probs_BNV[:, 2] == 0).all()
    share = tree.tokens_BN[:, 1].bincount(minlength=8) / B
    torch.testing.assert_close(share, want_VV[5], atol=0.02, rtol=0)
    after = tree.tokens_BN[tree.tokens_BN[:, 1] == int(want_VV[5].argmax()), 2]
    share = after.bincount(minlength=8) / len(after)
    torch.testing.assert_close(share, want_VV[int(want_VV[5].argmax())], atol=0.03, rtol=0)


def test_read_outs_padded_to_other_sizes_fit_one_another(tiny):
    """A tokenizer of fewer tokens than rows: both models pad, the draft more or less."""
    for vocab in (120, 160):
        model = target_of(tiny_model(seed=7, layers=2, vocab=vocab))
        drafter = ModelDrafter.__new__(ModelDrafter)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("headstart.eval.engine.drafters.draft_model._difference", _same)
            drafter.__init__(model, tiny, tokens=2, sampling=SamplingConfig(temperature=1.0))
        drafter.start(1, 16)
        drafter.begin(0, 5)
        drafter.observe(torch.tensor([[6]]), torch.zeros(1, 1, 32), [1])
        tree = drafter.propose(torch.tensor([6]), torch.tensor([1]), torch.tensor([0]))
        assert tree.draft_probs_BNV.shape == (1, 3, 128)
        assert tree.draft_probs_BNV[0, 0].sum() == pytest.approx(1.0)
        assert (tree.draft_probs_BNV[0, 0, vocab:] == 0).all()


def _same(*_: Target) -> str:
    return ""


def test_p63_past_the_draft_models_own_context_nothing_is_drafted(tiny):
    """A model that knows 64 positions; prompts of 32, 64, 128 and 256 on a target of 512."""
    model = small_model(max_position_embeddings=64)
    drafter = ModelDrafter(model, tiny, tokens=K, sampling=GREEDY)
    prompts = [
        Request(f"p{n}", tuple(i * 7 % 128 for i in range(n)), 40) for n in (32, 64, 128, 256)
    ]
    done = run(tiny, drafter, prompts)
    assert tokens_of(done) == tokens_of(run(tiny, None, prompts))
    assert all(r.drafted == 0 for n in (64, 128, 256) for r in done[f"p{n}"].rounds)
    position = 32
    for r in done["p32"].rounds:
        room = 32 + 40 - position - 1
        assert r.drafted == max(0, min(K, 64 - position, room))
        position += r.emitted


def test_p50_drafts_get_shorter_near_the_end_of_the_context():
    target = target_of(tiny_model(max_position_embeddings=64))
    model = small_model(max_position_embeddings=64)
    prompts = [
        Request("long", tuple(range(1, 61)), 100),
        Request("short", tuple(range(1, 31)), 20),
    ]
    want = tokens_of(run(target, None, prompts))
    for subset in (prompts[:1], prompts):
        drafter = ModelDrafter(model, target, tokens=6, sampling=GREEDY)
        done = run(target, drafter, subset, batch_size=2)
        assert all(c.token_ids == want[k] for k, c in done.items())
        assert max(r.depth_max for r in done["long"].rounds) <= 2


def test_prompts_longer_than_a_chunk_are_read_whole(tiny, monkeypatch):
    model = small_model()
    prompts = [Request(f"p{n}", tuple(range(1, n + 1)), 12) for n in (3, 8, 11, 16, 25)]

    def rounds() -> dict[str, list[int]]:
        drafter = ModelDrafter(model, tiny, tokens=K, sampling=GREEDY)
        done = run(tiny, drafter, prompts, batch_size=5)
        return {k: [r.accepted for r in c.rounds] for k, c in done.items()}

    want = rounds()
    monkeypatch.setattr("headstart.eval.engine.drafters.draft_model.CHUNK", 4)
    monkeypatch.setattr("headstart.eval.engine.prefill.PREFILL_CHUNK", 8)
    assert rounds() == want


# Models that do not fit


def with_tokenizer(change: Callable[[object], None] | None = None) -> Target:
    tokenizer = chat_tokenizer()
    if change is not None:
        change(tokenizer)
    return target_of(tiny_model(vocab=300, layers=2), tokenizer, name="model")


def test_p40_a_draft_model_of_another_vocabulary_is_refused(tiny):
    with pytest.raises(ValueError, match="has other tokens than tiny .*: 130 against 128 ids; cho"):
        ModelDrafter(small_model(vocab=130), tiny, tokens=2, sampling=GREEDY)


def test_p40_a_draft_model_with_one_token_more_is_refused_by_that_token():
    target = with_tokenizer()
    size = len(target.tokenizer.get_vocab())
    model = with_tokenizer(lambda tokenizer: tokenizer.add_tokens(["extra"]))
    message = rf"{size + 1} against {size} tokens, and 'extra' is {size} against missing"
    with pytest.raises(ValueError, match=message) as refused:
        ModelDrafter(model, target, tokens=2, sampling=GREEDY)
    assert model.fingerprint in str(refused.value)
    assert target.fingerprint in str(refused.value)


def test_p40_two_tokens_that_changed_places_are_noticed():
    target, model = with_tokenizer(), with_tokenizer()
    vocab = dict(model.tokenizer.get_vocab())
    first, second = (next(t for t, i in vocab.items() if i == n) for n in (50, 51))
    vocab[first], vocab[second] = 51, 50
    model.tokenizer = type("Swapped", (), {"get_vocab": lambda self: vocab})()
    with pytest.raises(ValueError, match="tokens, and .* is 51 against 50; choose a draft model"):
        ModelDrafter(model, target, tokens=2, sampling=GREEDY)


def test_the_same_tokenizer_is_accepted():
    ModelDrafter(with_tokenizer(), with_tokenizer(), tokens=2, sampling=GREEDY)


def test_no_token_a_round_is_refused():
    with pytest.raises(ValueError, match="model.tokens=0: need at least 1"):
        ModelConfig(path="x", tokens=0)
