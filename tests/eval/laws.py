"""Laws of MARKOV targets, and the test that sampled answers keep the joint law of the chain."""

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
    (length,) = {len(answer) for answer in counts}
    law_VV, V = law_VV.double(), len(law_VV)
    share, last = law_VV[prompt], torch.arange(V)  # of every answer, in the order of its digits
    for _ in range(length - 1):
        share = (share[:, None] * law_VV[last]).flatten()
        last = torch.arange(len(share)) % V
    seen = torch.zeros(V**length, dtype=torch.float64)
    for answer, count in counts.items():
        assert max(answer) < V
        seen[sum(token * V**place for place, token in enumerate(reversed(answer)))] = count
    assert ((share > 0) | (seen == 0)).all()
    expected = share * seen.sum()
    often = expected >= 5
    statistic = float(((seen - expected) ** 2 / expected)[often].sum())
    cells, rare = int(often.sum()), float(expected[~often].sum())
    if rare > 0:
        statistic += (float(seen[~often].sum()) - rare) ** 2 / max(rare, 1.0)
        cells += 1
    assert cells > 20
    assert chi2.sf(statistic, cells - 1) > 1e-6
