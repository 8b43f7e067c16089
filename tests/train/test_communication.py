"""What a step sends over the wires, on paper, and the page that tells of it."""

from pathlib import Path

import pytest

from headstart.train.communication import (
    BYTES,
    KINDS,
    Step,
    collectives,
    example,
    seconds_on,
    sent_bytes,
    state_bytes,
    tables,
)

PAGE = Path(__file__).parents[2] / "docs" / "communication.md"


def test_an_all_reduce_over_eight_ranks_sends_seven_quarters_of_the_gradients():
    assert sent_bytes("ddp", 1000, Step(ranks=8)) == pytest.approx(1.75 * BYTES * 1000)


def test_one_rank_sends_nothing():
    assert {sent_bytes(kind, 1000, Step(ranks=1, accumulation=3)) for kind in KINDS} == {0}


def test_zero3_sends_half_as_much_again_as_ddp():
    """ZeRO, arXiv 1910.02054, section 7.2.2."""
    ddp, zero3 = (sent_bytes(kind, 1000, Step()) for kind in ("ddp", "zero3"))
    assert zero3 == pytest.approx(1.5 * ddp)


def test_only_ddp_and_zero1_send_as_much_whatever_the_accumulation():
    same = [kind for kind in KINDS if collectives(kind, 4) == collectives(kind, 1)]
    assert same == ["ddp", "zero1"]
    assert collectives("fsdp2", 4) == (4, 1)
    assert collectives("zero2", 4) == (1, 4)
    assert collectives("zero3", 4) == (8, 4)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="parallel.kind=single: expected one of ddp, fsdp2"):
        collectives("single", 1)


def test_what_a_rank_keeps_falls_with_each_stage_to_an_eighth_of_it_all():
    kept = [state_bytes(kind, 1000, 8) for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp2")]
    assert kept == [16_000, 9_000, 5_500, 2_000, 2_000]


def test_a_link_carries_its_figure_times_what_is_reached():
    assert seconds_on("InfiniBand NDR, 400 Gb/s a GPU", 37.5e9) == pytest.approx(1.0)


def test_the_example_head_has_the_weights_of_eagle3_for_an_8b_model():
    head, size = example()
    D, inner, kv, W = 4096, 14336, 1024, 32_000
    fusing = 3 * D * D
    attention = 2 * D * (D + 2 * kv) + D * D
    want = fusing + attention + 3 * D * inner + W * D + 4 * D
    assert sum(weight.numel() for weight in head.parameters()) == want
    assert round(size.num_parameters / 1e9, 2) == 8.03


def test_the_page_holds_the_tables_as_they_are_computed():
    page = PAGE.read_text(encoding="utf-8").splitlines()
    missing = [line for line in tables() if line not in page]
    assert not missing, "run python -m headstart.train.communication"
