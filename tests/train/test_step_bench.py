"""The references of the step bench agree with the head, and the bench runs."""

import pytest
import torch

from headstart.train import step_bench
from headstart.train.step_bench import Figures, Sizes, attention_of, check_losses, make, measure

TINY = Sizes(tokens=24, vocab=96, width=128, row_length=12, precision="fp32", repeats=1)


def step(arm: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    head, batch, parts = make(arm, TINY)
    with attention_of(arm):
        loss = head(batch, parts).total(head.denominators(batch))
        loss.backward()
    return loss, {name: weight.grad for name, weight in head.named_parameters()}


@pytest.mark.parametrize("arm", ["whole logits", "dense attention", "both"])
def test_a_reference_has_the_loss_and_the_gradients_of_the_head(arm: str) -> None:
    (loss, gradients), (want, wanted) = step(arm), step("ours")
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7)


def test_dense_attention_is_what_runs_in_its_arm() -> None:
    with attention_of("both"):
        assert step_bench.Unroll.attend is step_bench.dense_attend
    assert step_bench.Unroll.attend is not step_bench.dense_attend


def test_an_arm_is_measured() -> None:
    figures = measure("ours", TINY)
    assert figures.rise_bytes >= 0
    assert figures.seconds > 0
    assert figures.loss == pytest.approx(step("ours")[0].item(), rel=1e-5)


def test_arms_of_different_losses_are_refused() -> None:
    figures = {"ours": Figures(0, 1.0, 4.0), "head only": Figures(0, 1.0, 0.0)}
    check_losses(figures | {"both": Figures(0, 1.0, 4.001)})
    with pytest.raises(AssertionError, match=r"both: loss 4\.01, ours: 4\.0"):
        check_losses(figures | {"both": Figures(0, 1.0, 4.01)})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": 100, "row_length": 64}, "--tokens 100: expected a multiple of --row-length 64"),
        ({"width": 100}, "--width 100: expected a multiple of 128"),
    ],
)
def test_sizes_that_do_not_fit_are_named(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sizes(**values)


@pytest.mark.slow
def test_the_bench_prints_what_the_loss_adds(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--tokens 24 --vocab 96 --width 128 --row-length 12 --repeats 1".split()
    step_bench.main([*options, "--arms", "ours", "head only"])
    assert "the loss adds" in capsys.readouterr().out
