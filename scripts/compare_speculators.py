"""Seconds per EAGLE-3 training step: headstart's beside that of the package speculators.

Run it by compare_speculators.sh. Both sides get the same shapes (SmolLM2-135M's), tokens, features
and starting weights: three steps of training-time test over a draft vocabulary of all tokens, all
but a short prompt supervised, autocast to bf16 over fp32 weights or fp32 throughout, gradients
clipped, AdamW, as many threads. Each side takes a step as its own trainer does. speculators' batch
is made by its own shift and collate functions, and its forward counts accuracies, as it does in
every step of training; headstart's step is `train_step`. The architecture is speculators' default
for EAGLE-3, and so is the loss, KL without decay: both must come to the same one, or the run stops.
Attention and losses of speculators are those it offers where its compiled kernels do not run: sdpa
or eager, and eager losses.

The two sides take turns, every turn a process of its own: one step to warm up, then those timed.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

HEADS, KV_HEADS, INNER, LAYERS, EPS = 9, 3, 1536, 30, 1e-5
TAPS, STEPS = (2, 15, 27), 3
ROPE = {"rope_type": "default", "rope_theta": 100_000.0}
LR, CLIP = 1e-4, 1.0
PROMPT = 4
"""Tokens a row that are no label: longer than the steps, so that no teacher lies past a row's end
where speculators packs rows."""
SAME_LOSS = {"fp32": 1e-4, "bf16": 1e-2}


def main() -> None:
    """Take turns and print the ratios, or, with --side, take one turn."""
    options = _parse()
    if options.side:
        return _turn(options)
    ratios = []
    for repeat in range(1, options.repeats + 1):
        ours = _run(sys.executable, "headstart", options)
        theirs = _run(options.theirs, "speculators", options)
        if not math.isclose(ours["loss"], theirs["loss"], rel_tol=SAME_LOSS[options.precision]):
            raise SystemExit(f"the losses differ: {ours['loss']} and {theirs['loss']}")
        if repeat == 1:
            tokens = options.rows * options.length
            print(
                f"{options.rows} x {options.length} tokens, {options.precision}, read-out "
                f"{options.readout}, {options.threads} threads; speculators {theirs['version']}: "
                f"{options.layout}, {options.attention}; torch {ours['torch']} and "
                f"{theirs['torch']}; losses {ours['loss']:.5f} and {theirs['loss']:.5f}"
            )
        seconds = [statistics.median(side["seconds"]) for side in (ours, theirs)]
        ratios.append(seconds[1] / seconds[0])
        speeds = ", ".join(f"{tokens / s:.0f}" for s in seconds)
        print(
            f"{repeat}: headstart {seconds[0]:.3f} s, speculators {seconds[1]:.3f} s, ratio "
            f"{ratios[-1]:.2f} ({speeds} tokens/s; peak memory {ours['peak_gb']:.2f}, "
            f"{theirs['peak_gb']:.2f} GB)",
            flush=True,
        )
    print(
        f"speculators / headstart: median {statistics.median(ratios):.2f}, "
        f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)}"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--theirs", help="the interpreter that has speculators")
    parser.add_argument("--side", choices=["headstart", "speculators"], help="take one turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns a side")
    parser.add_argument("--timed", type=int, default=3, help="steps timed a turn")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument(
        "--readout",
        choices=["frozen", "trained"],
        default="frozen",
        help="frozen, as speculators trains it, or trained on both sides",
    )
    parser.add_argument(
        "--attention", choices=["sdpa", "eager", "simple_flex_attention"], default="sdpa"
    )
    parser.add_argument(
        "--layout",
        choices=["packed", "rows"],
        default="packed",
        help="speculators only: all rows packed in one, or one call a row and one step",
    )
    for name, default in (("rows", 8), ("length", 256), ("width", 576), ("vocab", 49_152)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    if options.length <= PROMPT:
        parser.error(f"--length {options.length}: need more than {PROMPT} tokens")
    if not options.side and not options.theirs:
        parser.error("--theirs: name the interpreter that has speculators")
    return options


def _run(python: str, side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Take one side's turn in a process of its own."""
    passed = [f"--{k}={v}" for k, v in vars(options).items() if k not in ("side", "theirs")]
    command = [python, __file__, "--side", side, *passed]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _turn(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    step, version = (_ours if options.side == "headstart" else _theirs)(options)
    loss, seconds = step(), []
    for _ in range(options.timed):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(
        json.dumps(
            {
                "loss": loss,
                "seconds": seconds,
                "peak_gb": peak_gb,
                "version": version,
                "torch": torch.__version__,
            }
        )
    )


def _ours(options: argparse.Namespace) -> tuple[Callable[[], float], str]:
    """Return headstart's step and its version."""
    from importlib.metadata import version

    from headstart.heads.base import FeatureBatch
    from headstart.heads.eagle3 import Eagle3Config, Eagle3Head
    from headstart.heads.parts import ReadOut, TargetParts
    from headstart.heads.target import TargetShape
    from headstart.train.backends import make_parallel
    from headstart.train.config import ParallelConfig, TrainConfig
    from headstart.train.step import train_step

    B, T, D, V = options.rows, options.length, options.width, options.vocab
    config = Eagle3Config(
        ttt_steps=STEPS,
        step_decay=1.0,
        loss="kl",
        readout=options.readout,
        aux=list(TAPS),
        norm_before_residual=True,
        norm_before_fc=True,
        feedback="post_norm",
    )
    shape = TargetShape(D, V, LAYERS, HEADS, KV_HEADS, D // HEADS, INNER, EPS, 8192, ROPE)
    head = Eagle3Head(config, shape, None).train()
    _fill(head.named_parameters(), V)
    dtype = _dtype(options)
    data = _data(options)
    rows_VD = _readout(D, V).to(dtype)
    parts = TargetParts(rows_VD, 1.0, ReadOut(rows_VD))
    last_BTD = data["last"].float()
    last_BTD = last_BTD * torch.rsqrt(last_BTD.square().mean(-1, keepdim=True) + EPS)
    zero_BT = torch.zeros(B, T, dtype=torch.int64)
    place_BT = torch.arange(T).expand(B, T)
    batch = FeatureBatch(
        data["tokens"],
        (place_BT >= PROMPT).long(),
        place_BT,
        zero_BT,
        torch.arange(B),
        last_BTD.to(dtype),
        zero_BT.float(),
        zero_BT,
        dict(zip(TAPS, data["aux"].to(dtype).chunk(len(TAPS), dim=-1), strict=True)),
    )
    settings = TrainConfig(precision=options.precision)
    parallel = make_parallel(ParallelConfig(), settings, torch.device("cpu"))
    prepared, optimizer = parallel.prepare(
        head, lambda bare: torch.optim.AdamW(bare.parameters(), lr=LR, fused=True)
    )

    def step() -> float:
        return train_step(prepared, [batch], parts, optimizer, parallel, lr=LR, clip=CLIP)[0]

    return step, version("headstart")


def _theirs(options: argparse.Namespace) -> tuple[Callable[[], float], str]:
    """Return speculators' step, as its Trainer takes it, and its version."""
    from importlib.metadata import version

    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import LlamaConfig

    D, V = options.width, options.vocab
    layer = LlamaConfig(
        hidden_size=D,
        vocab_size=V,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=D // HEADS,
        intermediate_size=INNER,
        rms_norm_eps=EPS,
        max_position_embeddings=8192,
        rope_parameters=ROPE,
        pad_token_id=None,
    )
    layer._attn_implementation = options.attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=V,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=list(TAPS),
    )
    model = Eagle3DraftModel(config).train()
    for frozen in (model.embed_tokens, model.verifier_lm_head):
        frozen.weight.data.copy_(_readout(D, V))
    _fill(model.named_parameters(), V)
    model.lm_head.weight.requires_grad_(options.readout == "trained")
    batches = _their_batches(options)
    losses = {"kl_div": resolve_loss_config("kl_div", "eager")["kl_div"]}
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=LR)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
                _, loss, _ = model(**batch, ttt_steps=STEPS, loss_config=losses)
            (loss / len(batches)).backward()
            total += loss.item() / len(batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return total

    return step, version("speculators")


def _their_batches(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the batches of a step, shifted and packed by speculators' own functions."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    data, T = _data(options), options.length
    # Its mask is that of the teacher's own token, the one before the label.
    place_T = torch.arange(T)
    mask_T = (place_T >= PROMPT - 1) & (place_T < T - 1)
    samples = [
        {
            "input_ids": data["tokens"][row],
            "hidden_states": data["aux"][row],
            "verifier_last_hidden_states": data["last"][row],
            "loss_mask": mask_T,
            "lengths": torch.tensor([T]),
            "position_ids": place_T,
        }
        for row in range(options.rows)
    ]
    packed = options.layout == "packed"
    length = options.rows * T if packed else T - 1
    collate = CollateFn(length, options.width, len(TAPS), _dtype(options), shift_batch)
    groups = [samples] if packed else [[sample] for sample in samples]
    return [collate(group) for group in groups]


def _dtype(options: argparse.Namespace) -> torch.dtype:
    """Return what the target's states come in."""
    return torch.bfloat16 if options.precision == "bf16" else torch.float32


def _data(options: argparse.Namespace) -> dict[str, Tensor]:
    """Draw tokens, tapped states and last states before the target's norm."""
    generator = torch.Generator().manual_seed(0)
    B, T, D = options.rows, options.length, options.width
    return {
        "tokens": torch.randint(options.vocab, (B, T), generator=generator),
        "aux": torch.randn(B, T, len(TAPS) * D, generator=generator),
        "last": torch.randn(B, T, D, generator=generator),
    }


def _readout(D: int, V: int) -> Tensor:
    """Draw the target's rows, of its embedding and its read-out alike."""
    return torch.randn(V, D, generator=torch.Generator().manual_seed(1)) * D**-0.5


@torch.no_grad()
def _fill(named: Iterable[tuple[str, Tensor]], V: int) -> None:
    """Give weights of one name the same values on both sides."""
    for name, weight in named:
        if name.startswith(("embed_tokens", "verifier_")):
            continue
        if "norm" in name:
            weight.fill_(1.0)
        elif name == "lm_head.weight":
            weight.copy_(_readout(weight.shape[1], V))
        else:
            seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight.copy_(torch.randn(weight.shape, generator=seeded) * weight.shape[1] ** -0.5)


if __name__ == "__main__":
    main()
