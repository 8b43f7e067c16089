"""What a device can do: a vendor's peaks from the `hardware` group, or this machine, measured.

Measured are the three things the roofline knows: reading weights (a product over one token, as
decoding makes it), multiplying (a large product), and starting an operation.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from headstart.eval.roofline import Machine
from headstart.heads.load import DTYPES, pick_device
from headstart.heads.packing import can_pack, pack_weight, packed_linear

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
"""Types that weights and caches are planned in, and the bytes of a number."""
REPEATS = 5


@dataclass
class HardwareConfig:
    """A device: peaks of dense products, memory bandwidth and size; `measured` is this machine."""

    name: str = ""
    """What tables call the device; empty takes the measured device's own name."""
    measured: bool = False
    """Measure this machine for what is null below."""
    tflops: dict[str, float] = field(default_factory=dict)
    """Dense peak (no sparsity) by dtype, 10^12 FLOPs a second."""
    bandwidth_gb_s: float | None = None
    """Memory bandwidth, 10^9 bytes a second."""
    memory_gb: float | None = None
    """Memory, 10^9 bytes."""
    launch_us: float | None = 0.0
    """Microseconds an operation takes to start: 0 for CUDA graphs, about 5 for eager torch."""
    compute_efficiency: float = 1.0
    """Fraction of the peak that products reach; under 1 brings the knee nearer."""
    bandwidth_efficiency: float = 1.0
    """Fraction of the bandwidth that reading weights and caches reaches; under 1 slows decoding."""
    device: str = "auto"
    """What is measured: auto (a GPU when there is one), cpu, cuda, cuda:1, ..."""

    def __post_init__(self) -> None:
        for name in ("compute_efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"hardware.{name}={getattr(self, name)}: expected a fraction in (0, 1]"
                )
        numbers = {"bandwidth_gb_s": self.bandwidth_gb_s, "memory_gb": self.memory_gb}
        numbers |= {f"tflops.{dtype}": value for dtype, value in self.tflops.items()}
        for name, value in numbers.items():
            if value is None and not self.measured:
                raise ValueError(
                    f"hardware.{name}=null: give a number, or hardware=measured for this machine"
                )
            if value is not None and value <= 0:
                raise ValueError(f"hardware.{name}={value}: need more than 0")
        if self.launch_us is None and not self.measured:
            raise ValueError("hardware.launch_us=null: give microseconds, 0 for none")
        if self.launch_us is not None and self.launch_us < 0:
            raise ValueError(f"hardware.launch_us={self.launch_us}: need 0 or more")
        unknown = sorted(set(self.tflops) - set(BYTES))
        if unknown:
            raise ValueError(f"hardware.tflops.{unknown[0]}: expected one of {', '.join(BYTES)}")

    def filled(self, *dtypes: str) -> "HardwareConfig":
        """Return the config with what is null measured, its peaks in these dtypes among that.

        Raises ValueError for a dtype without a peak.
        """
        missing = [dtype for dtype in dict.fromkeys(dtypes) if dtype not in self.tflops]
        if missing and (not self.measured or missing[0] not in DTYPES):
            known = ", ".join(self.tflops if not self.measured else DTYPES)
            raise ValueError(
                f"dtype={missing[0]}: {self.name or 'this machine'} has no peak for it; use one of "
                f"{known}, or give hardware.tflops.{missing[0]}=..."
            )
        return _measure(self, missing) if self.measured else self

    def machine(self, dtype: str) -> Machine:
        """Return the rates of products in a dtype, efficiencies applied; nothing may be null."""
        return Machine(
            flops=self.tflops[dtype] * 1e12 * self.compute_efficiency,
            bandwidth=self.bandwidth_gb_s * 1e9 * self.bandwidth_efficiency,
            launch=self.launch_us * 1e-6,
        )


def _measure(config: HardwareConfig, dtypes: list[str]) -> HardwareConfig:
    device = pick_device(config.device)
    peaks = {dtype: round(measure_tflops(device, DTYPES[dtype]), 4) for dtype in dtypes}
    known = next(iter(peaks or config.tflops), "float32")
    given = {
        "bandwidth_gb_s": lambda: round(measure_bandwidth(device, DTYPES[known]), 2),
        "memory_gb": lambda: round(memory_bytes(device) / 1e9, 1),
        "launch_us": lambda: round(measure_launch(device), 3),
    }
    values = {name: getattr(config, name) for name in given}
    values = {name: given[name]() if value is None else value for name, value in values.items()}
    return HardwareConfig(
        name=config.name or f"this machine ({_describe(device)})",
        measured=True,
        tflops=dict(config.tflops) | peaks,
        compute_efficiency=config.compute_efficiency,
        bandwidth_efficiency=config.bandwidth_efficiency,
        device=config.device,
        **values,
    )


def measure_bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    """Return 10^9 bytes a second of a product over one token, of a weight no cache can hold.

    On a CPU the weight is packed where the target's would be.
    """
    size = (1 << 30 if device.type == "cuda" else 1 << 28) // dtype.itemsize
    weight_WD = torch.zeros(size // 4096, 4096, dtype=dtype, device=device)
    hidden_1D = torch.zeros(1, 4096, dtype=dtype, device=device)
    seconds = _fastest(device, _product(hidden_1D, weight_WD))
    return weight_WD.numel() * dtype.itemsize / seconds / 1e9


def measure_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return 10^12 FLOPs a second of a large square product."""
    width = 8192 if device.type == "cuda" else 1024
    weight_WD = torch.zeros(width, width, dtype=dtype, device=device)
    hidden_TD = torch.zeros(width, width, dtype=dtype, device=device)
    return 2 * width**3 / _fastest(device, _product(hidden_TD, weight_WD)) / 1e12


def measure_launch(device: torch.device, count: int = 500) -> float:
    """Return microseconds to start one small operation, many in a row."""
    x = torch.zeros(64, device=device)

    def many() -> None:
        for _ in range(count):
            x.add_(1.0)

    return _fastest(device, many) / count * 1e6


def _product(hidden: torch.Tensor, weight_WD: torch.Tensor) -> Callable[[], object]:
    if can_pack(weight_WD.device, weight_WD.dtype):
        packed_WD = pack_weight(weight_WD)
        return lambda: packed_linear(hidden, packed_WD)
    return lambda: F.linear(hidden, weight_WD)


def _fastest(device: torch.device, call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few calls, after one that warms up.

    The fastest: a roofline is what the machine can do, and others only ever slow it down.
    """
    times = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
