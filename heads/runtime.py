"""How the target and drafters are run: eagerly, or with their layers compiled, in every arm alike.

`RuntimeConfig.attach` compiles a target and whatever it adopts.
"""

from dataclasses import dataclass, field

import torch

from headstart.heads.target import Target

PARTS = ("target", "drafter")


@dataclass
class Compilation:
    """What a compiled runtime made, for the record of a measurement."""

    parts: list[str]
    """What was to be compiled: target, drafter."""
    networks: list[str] = field(default_factory=list)
    """What was: the target, then heads and draft models of all arms; a drafter of text has none."""
    graphs: int = 0
    seconds: float = 0.0
    """Seconds spent tracing and compiling, none of them on a measurement's clock."""
    recordings: int = 0
    """CUDA graphs recorded, where there is a GPU: one a layer for each exact size."""
    late: int = 0
    """Graphs or recordings made while the clock ran: they spoil the times of the prompts they met.
    """


@dataclass
class RuntimeConfig:
    """How the target and the drafters are run, in both arms of a measurement."""

    threads: int | None = None
    """CPU threads of one process; null leaves torch's own choice."""
    compile: list[str] = field(default_factory=list)
    """Parts whose layers are compiled: target, drafter; none: everything is run eagerly."""
    cuda_graphs: bool | None = None
    """Replay compiled layers as CUDA graphs; null: where there is a GPU."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"runtime.threads={self.threads}: need at least 1, or null")
        unknown = [part for part in self.compile if part not in PARTS]
        if unknown:
            raise ValueError(
                f"runtime.compile={self.compile}: unknown {', '.join(unknown)}; expected any of "
                f"{', '.join(PARTS)}"
            )
        if "drafter" in self.compile and "target" not in self.compile:
            raise ValueError(
                f"runtime.compile={self.compile}: a compiled drafter beside an eager target makes "
                "an unequal comparison; add target"
            )
        if self.cuda_graphs and not self.compile:
            raise ValueError("runtime.cuda_graphs=true needs compiled layers: set runtime.compile")

    def apply(self) -> None:
        """Set the number of threads of this process."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def attach(self, target: Target) -> None:
        """Compile a target's layers, and have it compile what it adopts; nothing if eager.

        Raises RuntimeError where there is no compiler, or a layer that cannot be compiled.
        """
        if not self.compile or target.compiled is not None:
            return
        # Here, because torch's compiler takes a sixth of the time that a command takes to start.
        from headstart.heads.compiled import Compiler
        from headstart.heads.compiled_target import CompiledTarget, require_compiler
        from headstart.heads.replay import CudaRecorder

        require_compiler(target.device)
        recorder = CudaRecorder() if self._wants_cuda_graphs(target.device) else None
        compiler = Compiler(Compilation(list(self.compile)), recorder)
        target.compiled = CompiledTarget(compiler, target, "target")
        target.compiled.prepare(batch=1)

    def _wants_cuda_graphs(self, device: torch.device) -> bool:
        if self.cuda_graphs and device.type != "cuda":
            raise ValueError(
                f"runtime.cuda_graphs=true but the target is on {device}: use null or false there"
            )
        return device.type == "cuda" and self.cuda_graphs is not False


def late_warning(info: Compilation | None) -> list[str]:
    """Return the warning that a result carries when something was compiled while the clock ran."""
    if info is None or not info.late:
        return []
    return [f"runtime: {info.late} graphs were compiled while the clock ran; times include that"]
