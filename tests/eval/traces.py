"""Hand-made rounds, completions and results for the tests of figures, result files and reports."""

from headstart.eval.checks import looping_prompts
from headstart.eval.engine.records import Completion, Round
from headstart.eval.intervals import bootstrap
from headstart.eval.metrics import FIGURES, PromptSums, figures, prompt_sums
from headstart.eval.result import (
    Counts,
    Divergence,
    DrafterInfo,
    Equality,
    Provenance,
    Result,
    SamplingInfo,
)


def chain_round(accepted: int, k: int, *, cut: bool = False, seconds: float = 0.0) -> Round:
    """One round of a chain of k; `seconds` is split 1:3:1 over draft, verify and commit."""
    stop = "cut" if cut else "leaf" if accepted == k else "rejected"
    fifth = seconds / 5
    times = {"t_draft": fifth, "t_verify": 3 * fifth, "t_commit": fifth}
    return Round(accepted, accepted + (not cut), k, k, k + 1, stop, **times)


def completion(prompt_id: str, rounds: list[Round], **fields: object) -> Completion:
    """A one-turn completion whose ids count up, so that nothing repeats."""
    tokens = 1 + sum(r.emitted for r in rounds)
    return Completion(prompt_id, list(range(tokens)), "stop", rounds=rounds, **fields)


def timed(prompt_id: str, tokens: int, seconds: float, prefill: float = 0.0) -> Completion:
    """A completion of which only the clock and the number of tokens matter."""
    return Completion(
        prompt_id, list(range(tokens)), "stop", prefill_seconds=prefill, seconds=seconds
    )


def t1() -> Completion:
    return completion("t1", [chain_round(a, 4) for a in (2, 0, 3)])


def t2() -> list[Completion]:
    return [t1(), completion("t2", [chain_round(1, 4)])]


def bench(
    accepted: int, k: int, *, seconds: float, prompts: int = 20, rounds: int = 5
) -> tuple[list[PromptSums], list[Completion]]:
    """Prompts whose rounds all accept `accepted` of k; the plain arm takes 0.1 s a token."""
    sums, done = [], []
    for i in range(prompts):
        made = [chain_round(accepted, k, seconds=seconds) for _ in range(rounds)]
        arm = completion(f"p{i}", made, prefill_seconds=0.2, seconds=0.2 + rounds * seconds)
        tokens = len(arm.token_ids)
        plain = timed(f"p{i}", tokens, 0.2 + 0.1 * (tokens - 1), prefill=0.2)
        sums.append(prompt_sums(arm, plain, draft_calls_per_round=k))
        done.append(arm)
    return sums, done


def make_result(
    name: str, sums: list[PromptSums], done: list[Completion], **changes: object
) -> Result:
    """A whole result around the given sums; keyword arguments replace its parts."""
    parts: dict[str, object] = {
        "provenance": Provenance(
            headstart_version="0.1.0",
            torch_version="2.13.0",
            transformers_version="5.24.0",
            device="test CPU",
            threads=1,
            dtype="bfloat16",
            date="2026-01-02T03:04:05+00:00",
            target="tiny",
            target_revision=None,
            target_fingerprint="f" * 64,
            template_hash="a" * 64,
            prompt_suite="hand",
            prompt_suite_hash="b" * 64,
            seeds=[0],
            config={"tree": {"depth": 4}},
        ),
        "drafter": DrafterInfo(name, "eagle3", "chain:4", "a1", True, checkpoint="runs/head"),
        "sampling": SamplingInfo(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=128),
        "counts": Counts(
            len(sums), sum(s.rounds for s in sums), sum(len(c.token_ids) for c in done)
        ),
        "figures": figures(sums),
        "intervals": bootstrap(sums, list(FIGURES), resamples=2_000),
        "resamples": 2_000,
        "repeats": 1,
        "equality": Equality(0.95, [Divergence("p3", 7, 0.002)]),
        "loops": looping_prompts(done),
        "warnings": ["a made-up run"],
    }
    return Result(**(parts | changes))
