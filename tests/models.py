"""Tiny targets with known behaviour, feature batches, random heads and scripted drafters.

Shapes: B rows, T tokens, V vocabulary, N tree nodes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import Drafter, NoDrafter
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig, prompt_key
from headstart.eval.engine.tree import DraftTree, Path, TreeShape
from headstart.heads.base import DraftHead, FeatureBatch, build_head, families
from headstart.heads.target import Target
from headstart.heads.vocab import DraftVocab

transformers.logging.set_verbosity_error()

GREEDY = SamplingConfig()
DIMENSIONS = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Ten times the usual 0.02: at this width attention is flat otherwise, and context idle.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 20.0,
        "attn_implementation": "eager",
    },
    "gemma3": {"kind": "Gemma3Text", "sliding_window": 8, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "phi": {},
}


def seeded(seed: int, make: Callable[[], nn.Module]) -> Any:
    """Make a module under its own seed; the global random state is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def variant_model(name: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Build a tiny random model of one of VARIANTS, its norm weights and biases random as well."""
    options = {**DIMENSIONS, **VARIANTS[name], **config}
    kind = options.pop("kind", name.capitalize())
    attention = options.pop("attn_implementation", "sdpa")
    config_class = getattr(transformers, f"{kind}Config")
    model_class = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    model = seeded(
        seed,
        lambda: model_class._from_config(config_class(**options), attn_implementation=attention),
    )
    generator = torch.Generator().manual_seed(seed)
    zero_centred = name.startswith("gemma")
    low, high = (-0.5, 1.0) if zero_centred else (0.5, 2.0)
    for parameter_name, weight in model.named_parameters():
        if "norm" in parameter_name and parameter_name.endswith("weight"):
            weight.data.uniform_(low, high, generator=generator)
        elif parameter_name.endswith("bias"):
            weight.data.normal_(0, 0.2, generator=generator)
    return model.eval()


def tiny_model(
    seed: int = 0,
    layers: int = 4,
    hidden: int = 32,
    vocab: int = 128,
    tied: bool = False,
    **config: Any,
) -> PreTrainedModel:
    """Build TINY: a random fp32 Llama of 4 layers, width 32, 4 heads and 128 tokens."""
    options = {
        **DIMENSIONS,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **config,
    }
    make = transformers.LlamaForCausalLM
    return seeded(seed, lambda: make(transformers.LlamaConfig(**options))).eval()


def recurrent_model() -> PreTrainedModel:
    """Build a model whose state cannot be rolled back."""
    config = transformers.JambaConfig(
        **{**DIMENSIONS, "num_experts": 1, "num_experts_per_tok": 1, "pad_token_id": 0}
    )
    return seeded(0, lambda: transformers.JambaForCausalLM(config))


def markov(rows: Sequence[Sequence[float]]) -> PreTrainedModel:
    """Build MARKOV: the next token's law is the row of the last token, whatever came before."""
    law_VV = torch.tensor(rows, dtype=torch.float64).clamp(min=1e-9)
    V = len(rows)
    model = tiny_model(
        layers=2,
        hidden=V,
        vocab=V,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=V // 2,
        intermediate_size=V,
        rms_norm_eps=1e-12,
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(4 * torch.eye(V))
        model.lm_head.weight.copy_(law_VV.log().T / math.sqrt(V))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def cycle() -> PreTrainedModel:
    """Build CYCLE: token i is followed by i + 1 modulo 8 with probability 0.9999."""
    rows = torch.full((8, 8), 0.0001 / 7)
    rows[torch.arange(8), (torch.arange(8) + 1) % 8] = 0.9999
    return markov(rows.tolist())


def target_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "tiny"
) -> Target:
    """Wrap a model in memory."""
    return Target(model, tokenizer, name)


@torch.no_grad()
def feature_batch(
    target: Target,
    rows: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]],
    *,
    documents: Sequence[Sequence[int]] | None = None,
    pad_to: int = 0,
    taps: Sequence[int] = (),
) -> FeatureBatch:
    """Make features online; `documents` numbers packed documents (default: one a row)."""
    T = max(pad_to, *(len(row) for row in rows))

    def padded(lists: Sequence[Sequence[int]], value: int) -> Tensor:
        return torch.tensor([[*x, *[value] * (T - len(x))] for x in lists])

    tokens_BT, mask_BT = padded(rows, 0), padded(masks, 0)
    document_BT = padded(documents or [[0] * len(row) for row in rows], -1)
    starts_BT = torch.ones_like(document_BT, dtype=torch.bool)
    starts_BT[:, 1:] = document_BT.diff(dim=1) != 0
    place_T = torch.arange(T)
    positions_BT = place_T - (starts_BT * place_T).cummax(1).values
    output = target.forward(tokens_BT, positions_BT, taps=taps)
    hidden_BTD = output.hidden_BTD
    logits_BTV = target.readout(hidden_BTD).float()
    return FeatureBatch(
        tokens_BT,
        mask_BT,
        positions_BT,
        document_BT,
        torch.arange(len(rows)),
        hidden_BTD,
        logits_BTV.logsumexp(-1),
        logits_BTV.argmax(-1),
        output.aux,
    )


def make_head(
    family: str,
    target: Target,
    *,
    vocab: DraftVocab | None = None,
    seed: int | None = 0,
    **options: Any,
) -> DraftHead:
    """Build a head in eval mode; seed None leaves the weights where `initialise` puts them."""
    size = None if vocab is None else len(vocab)
    config = families()[family][0](draft_vocab_size=size, **options)
    head = seeded(seed or 0, lambda: build_head(config, target.shape, vocab))
    head.initialise(target.parts)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in head.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            weight.data.normal_(mean, 0.1, generator=generator)
    return head.to(target.dtype).eval()


def markov_head(target: Target) -> DraftHead:
    """Return an EAGLE head of a MARKOV target that drafts by the target's own law."""
    head = make_head("eagle", target, seed=None)
    V = target.shape.vocab_size
    with torch.no_grad():
        for layer in head.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        head.fc.bias.zero_()
        # Embeddings are 4 e_i, states after the norm sqrt(V) e_i.
        head.fc.weight.copy_(torch.cat((torch.eye(V) * V**0.5 / 4, torch.zeros(V, V)), dim=1))
    return head


def some_vocab(size: int = 32, of: int = 128) -> DraftVocab:
    """Return a draft vocabulary spread over the target's."""
    return DraftVocab(torch.arange(size) * (of // size) + 1, of)


def requests(
    count: int, new: int, *, vocab: int = 128, seed: int = 0, longest: int = 12
) -> list[Request]:
    """Make random prompts of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    prompts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
    return [Request(f"p{i}", tuple(prompt), new) for i, prompt in enumerate(prompts)]


def run(
    target: Target,
    drafter: Drafter | None,
    prompts: Iterable[Request],
    *,
    sampling: SamplingConfig = GREEDY,
    stop_ids: Iterable[int] = (),
    batch_size: int = 4,
    max_len: int | None = None,
) -> dict[str, Completion]:
    """Decode and return the completions by prompt id; every prompt must come out exactly once."""
    prompts = list(prompts)
    done = list(
        decode(
            target,
            drafter or NoDrafter(),
            prompts,
            sampling=sampling,
            stop_ids=stop_ids,
            batch_size=batch_size,
            max_len=max_len,
        )
    )
    assert sorted(c.prompt_id for c in done) == sorted(r.prompt_id for r in prompts)
    return {c.prompt_id: c for c in done}


def tokens_of(completions: dict[str, Completion]) -> dict[str, list[int]]:
    """Return the new tokens by prompt id."""
    return {prompt_id: c.token_ids for prompt_id, c in sorted(completions.items())}


def tau(completions: dict[str, Completion]) -> float:
    """Return tokens emitted a target pass, bonus included."""
    rounds = [r for c in completions.values() for r in c.rounds]
    return sum(r.emitted for r in rounds) / len(rounds)


class ScriptedDrafter:
    """Drafts a known text along the paths that `right` names and other tokens elsewhere."""

    name, scheme, draft_calls = "scripted", "b", 0
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        shape: TreeShape,
        texts: dict[str, list[int]],
        vocab_size: int,
        right: Callable[[Path], bool],
    ) -> None:
        self.shape, self.vocab_size, self.right = shape, vocab_size, right
        self.texts = {prompt_key(prompt_id): text for prompt_id, text in texts.items()}
        self.num_nodes = shape.num_nodes

    def start(self, batch: int, max_len: int) -> None:
        """Need nothing."""

    def begin(self, row: int, first_token: int) -> None:
        """Hold nothing."""

    def observe(self, *_: Any, **__: Any) -> None:
        """Learn nothing."""

    def move_row(self, source: int, destination: int) -> None:
        """Move nothing: rows are known by their keys."""

    def finish(self, *_: Any) -> None:
        """Learn nothing."""

    def clear(self) -> None:
        """Forget nothing."""

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Fill the shape from each row's text, which starts at absolute position 0."""
        rows = zip(root_B.tolist(), positions_B.tolist(), keys_B.tolist(), strict=True)
        return self.shape.fill(torch.tensor([self._row(*row) for row in rows]))

    def _row(self, root: int, position: int, key: int) -> list[int]:
        text, tokens = self.texts[key], [root]
        for path in self.shape.choices:
            place = position + len(path)
            truth = text[place] if place < len(text) else 0
            wrong = (truth + 1 + path[-1]) % self.vocab_size
            tokens.append(truth if self.right(path) else wrong)
        return tokens


def scripted(
    target: Target,
    prompts: Sequence[Request],
    shape: TreeShape,
    right: Callable[[Path], bool],
    sampling: SamplingConfig = GREEDY,
) -> ScriptedDrafter:
    """Script the target's own plain continuation of the prompts."""
    plain = tokens_of(run(target, None, prompts, sampling=sampling))
    texts = {r.prompt_id: [*r.token_ids, *plain[r.prompt_id]] for r in prompts}
    return ScriptedDrafter(shape, texts, target.shape.vocab_size, right)


def oracle(
    target: Target, prompts: Sequence[Request], depth: int, sampling: SamplingConfig = GREEDY
) -> ScriptedDrafter:
    """Draft what the target will say, `depth` tokens deep."""
    return scripted(target, prompts, TreeShape.chain(depth), lambda path: True, sampling)


def anti(target: Target, prompts: Sequence[Request], depth: int) -> ScriptedDrafter:
    """Never draft what the target will say."""
    return scripted(target, prompts, TreeShape.chain(depth), lambda path: False)
