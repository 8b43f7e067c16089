"""Results with everything that a report can show, made from seeded rounds: nothing is measured."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from traces import make_result

from headstart.eval.branches import branches
from headstart.eval.checks import figures_without
from headstart.eval.engine.records import Completion, Round
from headstart.eval.metrics import figures, figures_by_category, prompt_sums
from headstart.eval.result import (
    BatchPoint,
    Category,
    Counts,
    Divergence,
    DrafterInfo,
    Equality,
    Result,
    Run,
    Sample,
    SamplingInfo,
)

PLAIN_STEP = 0.04
CATEGORIES = ("arithmetic", "code", "writing")
WORDS = "the quick brown fox jumps over a lazy dog and then it goes home to sleep".split()


@dataclass(frozen=True)
class Made:
    """One drafter of a made-up comparison; seconds a round."""

    name: str
    family: str
    tree: str
    rate: float
    """Share of tries that some child is accepted."""
    draft: float
    verify: float = 1.2 * PLAIN_STEP
    depth: int = 4
    width: int = 1
    scheme: str = "b"


DRAFTERS = (
    Made("eagle3-dynamic16", "eagle3", "dynamic:dynamic16", 0.78, 0.014, 0.056, width=3, depth=5),
    Made("eagle3-chain4", "eagle3", "chain:4", 0.7, 0.009, scheme="a1"),
    Made("hydra_heads-static15", "hydra_heads", "static:static15", 0.6, 0.006, 0.054, width=3),
    Made("medusa-chain4", "medusa", "chain:4", 0.38, 0.003, scheme="a1"),
    Made("lookup", "lookup", "chain:8", 0.45, 0.0004, 0.05, depth=8, scheme="a1"),
    Made("suffix", "suffix", "chain:8", 0.5, 0.0009, 0.05, depth=8, scheme="a1"),
    Made("medusa-typical", "medusa", "static:static15", 0.75, 0.004, 0.052, scheme="typical"),
)


def made_round(made: Made, rng: random.Random) -> Round:
    """One round: each depth accepted with the drafter's rate, mostly by the first child."""
    accepted = next((d for d in range(made.depth) if rng.random() > made.rate), made.depth)
    weights = (6, 2, 1)[: made.width]
    places = [rng.choices(range(made.width), weights)[0] for _ in range(accepted)]
    offered = [made.width] * min(accepted + 1, made.depth) + [0] * (accepted == made.depth)
    drafted = made.depth * made.width
    return Round(
        accepted,
        accepted + 1,
        drafted,
        made.depth,
        drafted + 1,
        "leaf" if accepted == made.depth else "rejected",
        *(made.draft, made.verify, 0.003),
        places,
        offered,
    )


def made_result(
    made: Made,
    *,
    suite: str = "mt_bench",
    seed: int = 0,
    prompts: int = 24,
    temperature: float = 0.0,
) -> Result:
    """One drafter's whole result on a suite."""
    rng = random.Random(f"{made.name} {suite} {seed}")
    done, sums, categories, lengths = [], [], {}, {}
    for i in range(prompts):
        rounds = [made_round(made, rng) for _ in range(rng.randint(8, 14))]
        tokens = 1 + sum(r.emitted for r in rounds)
        spent = sum(r.t_draft + r.t_verify + r.t_commit for r in rounds) * rng.uniform(0.99, 1.01)
        ids = [rng.randrange(1000) for _ in range(tokens)]
        arm = Completion(f"q{i}", ids, "length", 1, 0.1, 0.1 + spent, rounds=rounds)
        plain_seconds = 0.1 + PLAIN_STEP * (tokens - 1)
        done.append(arm)
        sums.append(
            prompt_sums(
                arm,
                Completion(f"q{i}", ids, "length", 1, 0.1, plain_seconds),
                draft_calls_per_round=made.depth - 1,
            )
        )
        categories[f"q{i}"] = CATEGORIES[i % len(CATEGORIES)]
        lengths[f"q{i}"] = ("33-64", "65-128", "129-256")[i % 3]
    lossless = made.scheme != "typical"
    loops = {"q1": 0.62} if made.family == "suffix" else {}
    divergences = [Divergence("q3", 17, 0.0), Divergence("q8", 40, 0.125)]
    result = make_result(
        made.name,
        sums,
        done,
        drafter=DrafterInfo(
            made.name, made.family, made.tree, made.scheme, lossless, f"runs/{made.family}/head"
        ),
        sampling=SamplingInfo(temperature, 1.0, 0, 64),
        equality=None if temperature else Equality(1 - 2 / prompts, divergences),
        tau_predicted=figures(sums)["tau_full_rounds"] * 1.04 if "chain4" in made.name else None,
        categories=_groups(sums, categories),
        context_lengths=_groups(sums, lengths),
        loops=loops,
        figures_without_loops=figures_without(sums, loops) if loops else None,
        warnings=["eval.suite holds 3 prompts of the training data: tau on them is inflated"],
        branches=branches(done),
        samples=[_sample(c, categories[c.prompt_id]) for c in done[:2]],
        batch_points=_batch(made) if made.family == "eagle3" else [],
    )
    result.provenance = replace(result.provenance, prompt_suite=suite, dtype="bfloat16")
    return result


def comparison(suites: Sequence[str] = ("mt_bench",)) -> list[Result]:
    """Every made-up drafter on every suite."""
    return [made_result(made, suite=suite) for suite in suites for made in DRAFTERS]


def _groups(sums: list, of: dict[str, str]) -> dict[str, Category]:
    found = figures_by_category(sums, of)
    return {
        name: Category(Counts(len(sums) // 3, int(sum(values["accept_histogram"])), 0), values)
        for name, values in sorted(found.items(), key=lambda item: (len(item[0]), item[0]))
    }


def _batch(made: Made) -> list[BatchPoint]:
    return [batch_point(b, (1.6 + made.rate) / (1 + 0.09 * b)) for b in (1, 2, 4, 8, 16)]


def batch_point(batch: int, speedup: float) -> BatchPoint:
    """A point whose interval is a twentieth to either side."""
    plain, interval = 25.0 * batch**0.8, [0.95 * speedup, 1.05 * speedup]
    return BatchPoint(batch, 24, plain, plain * speedup, speedup, interval, 2.4, 4.0, 2.5, 1.4)


def _sample(completion: Completion, category: str) -> Sample:
    rng = random.Random(completion.prompt_id)
    words = [f" {rng.choice(WORDS)}" for _ in completion.token_ids]
    runs, at = [Run("prefill", words[0], 1)], 1
    for r in completion.rounds:
        if r.accepted:
            runs.append(Run("drafted", "".join(words[at : at + r.accepted]), r.accepted))
        runs.append(Run("added", words[at + r.accepted], 1))
        at += r.emitted
    return Sample(completion.prompt_id, category, "Write about <b>a fox</b>, 3 < 4.", runs)
