"""Devices from presets, and this machine measured."""

import pytest
import torch

from headstart import cli
from headstart.eval.hardware import BYTES, HardwareConfig, memory_bytes
from headstart.heads.load import DTYPES

cli.register()
PRESETS = ["a100", "b200", "h100", "h200", "l40s", "mi300x", "rtx4090"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_dense_peaks_twice_as_high_at_half_the_bytes(name):
    tflops = cli.load_config("plan", [f"hardware={name}"]).hardware.tflops
    assert tflops["float16"] == tflops["bfloat16"]
    assert tflops.get("float8", 2 * tflops["bfloat16"]) == pytest.approx(
        2 * tflops["bfloat16"], rel=0.02
    )


def test_what_is_null_is_measured_and_what_is_given_is_kept():
    config = HardwareConfig(
        measured=True, launch_us=None, memory_gb=7.0, tflops={"float16": 3.0}, device="cpu"
    )
    filled = config.filled("float32", "float16")
    assert (filled.memory_gb, filled.tflops["float16"]) == (7.0, 3.0)
    assert 0 < filled.tflops["float32"] < 100
    assert 0.01 < filled.bandwidth_gb_s < 10_000
    assert 0.01 < filled.launch_us < 1000
    assert filled.name.startswith("this machine (cpu, ")
    assert filled.filled("float32") == filled  # nothing is left to measure


def test_a_type_that_is_not_measured_needs_a_number():
    config = HardwareConfig(measured=True, launch_us=None, device="cpu")
    with pytest.raises(ValueError, match="dtype=float8: this machine has no peak .* float32"):
        config.filled("float8")


def test_the_rates_of_a_machine_are_the_peaks_times_the_efficiencies():
    config = HardwareConfig(
        name="x",
        tflops={"bfloat16": 100.0},
        bandwidth_gb_s=1000.0,
        memory_gb=10.0,
        launch_us=5.0,
        compute_efficiency=0.5,
        bandwidth_efficiency=0.8,
    )
    machine = config.machine("bfloat16")
    assert (machine.flops, machine.bandwidth) == pytest.approx((50e12, 0.8e12))
    assert machine.launch == pytest.approx(5e-6)


def test_the_memory_of_a_cpu_is_this_machines():
    assert memory_bytes(torch.device("cpu")) > 1 << 28


def test_every_type_a_target_loads_in_is_planned():
    assert set(DTYPES) < set(BYTES)
    assert all(BYTES[name] == dtype.itemsize for name, dtype in DTYPES.items())
