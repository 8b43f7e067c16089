"""AdamW for every weight, or Muon for the matrices inside a head and AdamW for the rest.

Muon orthogonalises the momentum of a matrix before it is applied. Scaled as in arXiv 2502.16982,
section 2.2, an update has the root mean square of one of AdamW's, whose rate and weight decay it
therefore shares.
"""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headstart.train.config import TrainConfig

READOUT = "lm_head"
"""What the names of a head's own read-out begin with, in every family."""


def make_optimizer(head: nn.Module, config: TrainConfig) -> Optimizer:
    """Return the optimizer of a head's trainable parameters; its rate is set in every step."""
    trained = [p for p in head.parameters() if p.requires_grad]
    if config.optimizer == "adamw":
        return _adamw(trained, config)
    matrices = inner_matrices(head)
    chosen = set(matrices)
    return MuonAndAdamW(matrices, [p for p in trained if p not in chosen], config)


def inner_matrices(head: nn.Module) -> list[Tensor]:
    """Return the matrices that map states to states: no read-outs, biases or norms.

    A read-out's rows are tokens, of which most have no gradient in a step.
    """
    return [
        weight
        for name, weight in head.named_parameters()
        if weight.requires_grad and weight.ndim == 2 and not name.startswith(READOUT)
    ]


class MuonAndAdamW(Optimizer):
    """One optimizer of two rules: groups of matrices follow Muon, the others AdamW."""

    def __init__(self, matrices: list[Tensor], others: list[Tensor], config: TrainConfig) -> None:
        muon = torch.optim.Muon(
            matrices,
            lr=config.lr,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self._rules = [muon, *([_adamw(others, config)] if others else [])]
        super().__init__([group for rule in self._rules for group in rule.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter by the rule of its group."""
        assert closure is None
        for rule, group in zip(self._rules, self.param_groups, strict=True):
            # Set anew: loading a state dict replaces the groups and the state of this one.
            rule.param_groups, rule.state = [group], self.state
            rule.step()


def _adamw(parameters: list[Tensor], config: TrainConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=tuple(config.betas),
        weight_decay=config.weight_decay,
        fused=True,  # one pass, no temporaries as large as a weight
    )
