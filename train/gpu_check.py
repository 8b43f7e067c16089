"""`scripts/gpu_check.sh`: does training and decoding work on this machine's GPU, and how fast?

Runs the parts of gpu_parts.py one after the other, each in a process of its own with a time limit,
prints PASS or FAIL for each and exits with 1 when one failed. Needs torch, transformers and
accelerate, and what these bring.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

LIMITS = {"train": 150, "attention": 60, "decode": 140}
"""Part -> seconds it may take; under six minutes together."""
HELP = """\
train      50 steps of EAGLE-3 on a random Llama shaped like Llama-3.2-1B, in bf16, the target in
           the loop: tokens/s, MFU (where the device's peak is known), peak memory
attention  flex attention against dense attention, forth and back
decode     greedy decoding with compiled layers and CUDA graphs: the texts of eager decoding?

Everything is made here: nothing is downloaded, and the weights are random. What this prints on a
GPU has not been seen yet: only `--device cpu --tiny` has run, which checks the script and says what
it cannot check."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts; `scripts/gpu_check.sh --help`."""
    options = _parse(arguments)
    started = time.monotonic()
    verdicts = [run(part, options) for part in options.parts]
    seconds = time.monotonic() - started
    print(f"\nafter {seconds:.0f} s:", *verdicts, sep="\n", flush=True)
    sys.exit(int(any(verdict.startswith("FAIL") for verdict in verdicts)))


def run(part: str, options: argparse.Namespace) -> str:
    """Run one part, let its output through, and return its verdict."""
    command = [sys.executable, "-m", "headstart.train.gpu_parts", part, options.device]
    command += ["--tiny"] if options.tiny else []
    limit = LIMITS[part] if options.limit is None else options.limit
    print(f"\n== {part} (at most {limit:g} s)", flush=True)
    started = time.monotonic()
    # A session of its own: compiling starts processes that must not outlive their part.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(timeout=limit)
        why = f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        why = f"ran past {limit:g} s"
    finally:
        _end(process)
    seconds = time.monotonic() - started
    verdict = f"FAIL {part}: {why}" if why else f"PASS {part} in {seconds:.0f} s"
    print(verdict, flush=True)
    return verdict


def _end(process: subprocess.Popen) -> None:
    """Kill what is left of a part."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left
    process.wait()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description="Check training and decoding on a GPU.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, for a CPU")
    parser.add_argument("--parts", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument("--limit", type=float, help="seconds of each part, in place of its own")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
