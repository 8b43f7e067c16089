"""Laws of MARKOV targets, and the test that sampled answers keep the joint law of the chain."""

import itertools
from collections import Counter

import torch
from scipy.stats import chi2
from torch import Tensor

from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig

LAWS = torch.rand(8, 8, generator=torch.Generator().manual_seed(1)) ** 3 + 0.02
LAWS = LAWS / LAWS.sum(-1, keepdim=True)
PROCESSORS = SamplingConfig(temperature=0.7, top_k=4, top_p=0.9, seed=2)


def chi_square_of_answers(done: dict[str, Completion], law_VV: Tensor, prompt: int) -> None:
    """Hold the joint law of all answers, token after token, to the chain's own."""
    counts = Counter(tuple(c.token_ids) for c in done.values())
    total, statistic, cells = sum(counts.values()), 0.0, 0
    rare_expected = rare_seen = 0.0
    length = len(next(iter(counts)))
    for answer in itertools.product(range(8), repeat=length):
        path = (prompt, *answer)
        p = float(torch.stack([law_VV[a, b] for a, b in itertools.pairwise(path)]).prod())
        seen = counts.pop(answer, 0)
        assert p > 0 or seen == 0
        if p * total < 5:
            rare_expected, rare_seen = rare_expected + p * total, rare_seen + seen
        else:
            statistic, cells = statistic + (seen - p * total) ** 2 / (p * total), cells + 1
    if rare_expected > 0:
        statistic += (rare_seen - rare_expected) ** 2 / max(rare_expected, 1.0)
        cells += 1
    assert not counts
    assert cells > 20
    assert chi2.sf(statistic, cells - 1) > 1e-6
