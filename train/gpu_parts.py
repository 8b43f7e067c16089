"""The parts of gpu_check.py, each for a process of its own: `python -m headstart.train.gpu_parts`.

Imports of headstart only what torch, transformers and accelerate are enough for.
Shapes: B rows, T tokens, H query heads, G key/value heads, d head width, M places of a later step.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.data.features import OnlineFeatures
from headstart.data.token_row import TokenRow
from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import Drafter, NoDrafter
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import TreeShape
from headstart.heads import attention
from headstart.heads.eagle3 import Eagle3Config, Eagle3Head
from headstart.heads.layers import document_mask
from headstart.heads.runtime import RuntimeConfig
from headstart.heads.target import Target
from headstart.heads.ttt import document_blocks, ttt_attention
from headstart.heads.vocab import DraftVocab
from headstart.train.backends import make_parallel
from headstart.train.clock import StageClock
from headstart.train.config import ParallelConfig, TrainConfig, rate
from headstart.train.flops import StepFlops, head_flops, known_peak
from headstart.train.optimizer import make_optimizer
from headstart.train.step import train_step

TREE = TreeShape.from_choices([[0], [1], [0, 0], [0, 1], [0, 0, 0]])


@dataclass(frozen=True)
class Size:
    """A random target, its head, and what is done with them."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    spread: float
    """Standard deviation of random weights."""
    rows: int
    """Rows a training step."""
    tokens: int
    """Tokens a row."""
    new_tokens: int
    """Tokens that are decoded a prompt."""
    steps: int = 50


ONE_BILLION = Size(16, 2048, 8192, 32, 8, 64, 128_256, 32_000, 0.02, 8, 1024, 64)
"""The shape of Llama-3.2-1B."""
TINY = Size(8, 64, 128, 4, 2, 16, 256, 128, 0.2, 2, 64, 12)


def random_target(size: Size, device: torch.device, dtype: torch.dtype) -> Target:
    """Make a Llama of random weights."""
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=8192,
        initializer_range=size.spread,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, attn_implementation=attention.NAME)
    return Target(model.to(dtype), name="a random Llama")


def random_head(target: Target, size: Size) -> Eagle3Head:
    """Make an EAGLE-3 head of three steps, on the target's device, in fp32."""
    vocab = DraftVocab(torch.arange(size.draft_vocab), size.vocab)
    # By mass, not dropped: a random target's best token is seldom one of the first.
    config = Eagle3Config(draft_vocab_size=len(vocab), out_of_vocab="mass")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = Eagle3Head(config, target.shape, vocab)
    head = head.to(target.device)
    head.initialise(target.parts)
    return head


def random_rows(size: Size, count: int) -> list[TokenRow]:
    """Make rows of random tokens, the second half of each supervised."""
    generator = torch.Generator().manual_seed(0)
    T, half = size.tokens, size.tokens // 2
    tokens_BT = torch.randint(size.vocab, (count, T), generator=generator).tolist()
    mask = [0] * half + [1] * (T - half)
    return [TokenRow(str(i), "other", row, mask, "stop") for i, row in enumerate(tokens_BT)]


def train(size: Size, device: torch.device) -> None:
    """Train in bf16 with the target in the loop; print speed, use of the device and memory.

    Raises RuntimeError when the loss does not fall.
    """
    target = random_target(size, device, torch.bfloat16)
    head = random_head(target, size)
    config = TrainConfig(lr=3e-4, max_steps=size.steps, batch_rows=size.rows)
    parallel = make_parallel(ParallelConfig("single"), config, device)
    model, optimizer = parallel.prepare(head, lambda bare: make_optimizer(bare, config))
    source = OnlineFeatures(target, random_rows(size, 8 * size.rows), head.aux_features)
    clock, losses = StageClock(device), []
    source.stage = clock
    warm = size.steps // 5
    model.train()
    for step in range(size.steps):
        if step == warm:
            clock.read()
        first = step * size.rows % (8 * size.rows)
        with clock("data"):
            batch = source.batch(range(first, first + size.rows))
        lr = rate((step + 0.5) / size.steps, config)
        losses += train_step(
            model,
            [batch],
            source.parts,
            optimizer,
            parallel,
            lr=lr,
            clip=config.clip,
            clock=clock,
            number=step + 1,
        )[:1]
    by_stage = clock.read()
    tokens = (size.steps - warm) * size.rows * size.tokens
    _print_speed(target, head, tokens, by_stage, device)
    first, last = (sum(some) / len(some) for some in (losses[:5], losses[-5:]))
    print(f"loss: {first:.4f} over the first 5 steps, {last:.4f} over the last 5")
    if not last < first:
        raise RuntimeError(f"the loss did not fall: {first} to {last}")


def _print_speed(
    target: Target,
    head: Eagle3Head,
    tokens: int,
    by_stage: dict[str, float],
    device: torch.device,
) -> None:
    seconds = sum(by_stage.values())
    shares = ", ".join(f"{stage} {t / seconds:.0%}" for stage, t in by_stage.items())
    print(f"{tokens / seconds:.0f} tokens/s over {seconds:.1f} s ({shares})")
    layers = sum(weight.numel() for weight in target.layers.parameters())
    readout = target.parts.readout.weight_WD.numel()
    done = (head_flops(head) + StepFlops(2.0 * layers, 2.0 * readout)).of(tokens, tokens / 2)
    peak = known_peak(device, "bf16")
    if peak is None:
        print(f"{done / seconds / 1e12:.3g} TFLOP/s; MFU not known: no peak of this device")
    else:
        print(f"{done / seconds / 1e12:.3g} TFLOP/s, MFU {done / seconds / peak:.1%}")
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB")
    else:
        print("not checked on a CPU: peak memory of the device, and MFU")


def attend(size: Size, device: torch.device) -> None:
    """Compare flex attention with dense attention in fp32, over three steps of packed documents.

    Raises RuntimeError for outputs or gradients too far apart; without a GPU there is no backward
    pass of flex attention.
    """
    limits = {torch.float32: 2e-3, torch.bfloat16: 3e-2}
    if device.type == "cpu":
        limits = {torch.float32: 1e-5}
        print("not checked on a CPU: flex attention's backward pass, its compiled kernels, bf16")
    for dtype, limit in limits.items():
        inputs = _attention_inputs(size, device, dtype)
        want = _attended(size, [x.float() for x in inputs], flex=False)
        have = _attended(size, inputs, flex=True)
        for name, value in have.items():
            wanted = want[name].double()
            error = float((value.double() - wanted).norm() / wanted.norm())
            print(f"{dtype}, {name}: relative error {error:.1e} (limit {limit:.0e})")
            if not error <= limit:  # NaN never passes
                raise RuntimeError(f"flex attention: {name} in {dtype} is off by {error:.1e}")


STEPS = 3


def _attention_inputs(size: Size, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys and values of every step in turn."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int, length: int) -> Tensor:
        shape = (2, heads, length, size.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    lengths = [size.tokens] + [_places(size)] * (STEPS - 1)
    return [draw(n, T) for T in lengths for n in (size.heads, size.kv_heads, size.kv_heads)]


def _places(size: Size) -> int:
    return size.tokens * 2 // 3


def _attended(size: Size, inputs: list[Tensor], *, flex: bool) -> dict[str, Tensor]:
    """Return the outputs of every step, and, where there is a backward pass, all gradients."""
    device, backward = inputs[0].device, inputs[0].is_cuda
    inputs = [x.detach().requires_grad_(backward) for x in inputs]
    document_BT = torch.arange(size.tokens, device=device).mul(3).div(size.tokens).long()
    document_BT = torch.stack((document_BT, document_BT.masked_fill(document_BT == 2, -1)))
    place_M = torch.arange(_places(size), device=device) + size.tokens // 4
    place_BM = place_M.expand(2, -1)
    if flex:
        views = [document_blocks(document_BT), document_blocks(document_BT, place_BM)]
    else:
        mask = document_mask(document_BT, torch.float32)
        views = [mask, mask[:, :, place_M]]
    generator, found = torch.Generator(device).manual_seed(1), {}
    total = torch.zeros((), device=device)
    with torch.set_grad_enabled(backward):
        for step in range(STEPS):
            keys, values = inputs[1 : 3 * step + 2 : 3], inputs[2 : 3 * step + 3 : 3]
            out = ttt_attention(inputs[3 * step], keys, values, views[min(step, 1)])
            found[f"output of step {step}"] = out.detach()
            weight = torch.randn(out.shape, generator=generator, device=device)
            total = total + (out.float() * weight).sum()
    if backward:
        names = [f"gradient of {what}{step}" for step in range(STEPS) for what in ("q", "k", "v")]
        found |= dict(zip(names, torch.autograd.grad(total, inputs), strict=True))
    return found


def decode_compiled(size: Size, device: torch.device) -> None:
    """Decode greedily in fp32, eagerly and with compiled layers; on a GPU as CUDA graphs.

    Raises RuntimeError for other texts, and on a GPU when nothing was recorded.
    """
    target = random_target(size, device, torch.float32)
    head = random_head(target, size).eval()
    texts = {}
    for mode in ("eager", "compiled"):
        if mode == "compiled":
            RuntimeConfig(compile=["target", "drafter"]).attach(target)
        drafted = copy.deepcopy(head)
        target.adopt(drafted)
        drafter = HeadDrafter(drafted, target.parts, TREE, sampling=SamplingConfig())
        for name, one in (("plain", NoDrafter(device)), ("EAGLE-3", drafter)):
            texts[mode, name] = _decoded(target, one, size, f"{mode}, {name}")
    if len({str(text) for text in texts.values()}) > 1:
        for arm, text in texts.items():
            print(arm, text)
        raise RuntimeError("greedy texts differ between arms")
    info = target.compiled.info
    print(
        f"texts equal; {info.graphs} graphs compiled in {info.seconds:.0f} s, {info.recordings} "
        f"recorded, {info.late} of either while the clock ran"
    )
    if device.type == "cpu":
        print("not checked on a CPU: CUDA graphs; compiled layers were called, not replayed")
    elif not info.recordings:
        raise RuntimeError("nothing was recorded as a CUDA graph")


def _decoded(target: Target, drafter: Drafter, size: Size, name: str) -> list[list[int]]:
    """Return the texts of a few prompts; print the speed of the second time, when all is made."""
    prompts = [
        Request(row.row_id, tuple(row.token_ids[: size.tokens // 4]), size.new_tokens)
        for row in random_rows(size, 3)
    ]

    def all_texts() -> list[list[int]]:
        made = decode(target, drafter, prompts, sampling=SamplingConfig(), stop_ids=())
        return [c.token_ids for c in sorted(made, key=lambda c: c.prompt_id)]

    first = all_texts()
    started = time.perf_counter()
    if target.compiled is None:
        again = all_texts()
    else:
        with target.compiled.clock():
            again = all_texts()
    seconds = time.perf_counter() - started
    print(f"{name}: {sum(map(len, again)) / seconds:.1f} tokens/s")
    if first != again:
        raise RuntimeError(f"{name}: another text the second time")
    return again


PARTS: dict[str, Callable[[Size, torch.device], None]] = {
    "train": train,
    "attention": attend,
    "decode": decode_compiled,
}


def main() -> None:
    """Run one part. Raises RuntimeError without the device."""
    parser = argparse.ArgumentParser(prog="python -m headstart.train.gpu_parts")
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("device")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"--device {options.device}: torch {torch.__version__} sees no GPU")
        device = torch.device("cuda", 0)
        print(torch.cuda.get_device_name(device), f"torch {torch.__version__}")
    PARTS[options.part](TINY if options.tiny else ONE_BILLION, device)


if __name__ == "__main__":
    main()
