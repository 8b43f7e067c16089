"""The frozen target: a Hugging Face causal LM seen as hidden states, taps and a read-out.

Shapes: B rows, T tokens, D width, V vocabulary, N tree nodes, R rows of a pass.
`hidden_states[s]` is Hugging Face numbering: s = 0 embeddings, s = l the input of layer l, s = L
the output of the last layer AFTER the final norm.
"""

import contextlib
import hashlib
import inspect
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads.cache import KVCache
from headstart.heads.packing import pack_linears
from headstart.heads.parts import TargetParts, whole

if TYPE_CHECKING:
    from headstart.heads.compiled_target import CompiledTarget

AUX_CONVENTION = "hidden_states[s]"  # s = input of layer s; stored with every artifact
ATTENTION_KINDS = ("full_attention", "sliding_attention")
PENALTIES = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
}


@dataclass
class TargetOutput:
    """What one pass gives: the post-final-norm state and the tapped `hidden_states[s]`."""

    hidden_BTD: Tensor
    aux: dict[int, Tensor] = field(default_factory=dict)


def pick_features(hidden: Tensor, aux: dict[int, Tensor], taps: Sequence[int]) -> Tensor:
    """Return what a head reads: its tapped states side by side [.., F*D], or the last state."""
    return torch.cat([aux[s] for s in taps], dim=-1) if taps else hidden


@dataclass(frozen=True)
class TargetShape:
    """The target's dimensions a head is built from; stored in every head checkpoint."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    rope: dict[str, Any]

    @classmethod
    def of(cls, config: Any) -> "TargetShape":
        """Read the dimensions from a transformers text config.

        Raises ValueError for a model without attention layers, from which heads take their shape,
        or without a context limit.
        """
        heads = getattr(config, "num_attention_heads", None)
        if heads is None:
            raise ValueError(
                f"{config.model_type} has no attention layers; headstart needs a target with some"
            )
        if getattr(config, "max_position_embeddings", None) is None:
            raise ValueError(
                f"{config.model_type} states no max_position_embeddings; headstart needs a target "
                "with a context limit"
            )
        return cls(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
            max_positions=config.max_position_embeddings,
            rope=_rope(config),
        )


class Target:
    """A frozen causal LM. Owns the model and the tokenizer; eval mode, no gradient, for good.

    Built by `load_target`, or directly around a model in memory. The read-out and the embedding are
    checked against the model's own logits at construction: a mismatch is a ValueError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.name = tokenizer, name or model.config._name_or_path
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        self.shape = TargetShape.of(self.config)
        self.device, self.dtype = model.device, model.dtype
        self.layers = _layers(self.decoder, self.shape.num_layers)
        self.cannot_decode = _recurrent(model)
        self.tensor_ranks: int = getattr(model, "_tp_size", None) or 1
        """Processes that make each pass together; each holds a part of every layer."""
        self.spread = len({weight.device for weight in model.parameters()}) > 1
        """Whether layers lie on several devices."""
        self.windows = _attention_windows(self.config)
        parameters = inspect.signature(self.decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.parts = TargetParts.of(model, self._embedding_output)
        self.fingerprint = fingerprint(model, tokenizer)
        self.tokenizer_size = _tokenizer_size(tokenizer, self.shape.vocab_size)
        self.stop_ids = _stop_ids(model, tokenizer)
        self.compiled: CompiledTarget | None = None  # set by RuntimeConfig.attach
        self._check_readout()
        _warn_of_penalties(model)

    def pack(self) -> None:
        """Pack the weights of the layers and the read-out, where that is of use; see packing.py."""
        pack_linears(self.decoder)
        self.parts.readout.pack()
        self._check_readout()

    def adopt(self, head: nn.Module) -> None:
        """Bring a trained head to the target's device and dtype, packed when the target is."""
        head.to(self.device, self.dtype).eval().requires_grad_(False)
        if head.vocab is not None:  # no part of the module, and read at every level of a draft
            head.vocab = head.vocab.to(self.device)
        if self.parts.readout.packed_WD is not None:
            pack_linears(head)
        if self.compiled is not None:
            self.compiled.adopt(head)

    def adopt_model(self, model: "Target") -> None:
        """Have a draft model run as this target does: packed and compiled when it is."""
        if self.parts.readout.packed_WD is not None:
            model.pack()
        if self.compiled is not None:
            self.compiled.adopt_model(model)

    @torch.no_grad()
    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        *,
        mask: dict[str, Tensor] | None = None,
        cache: KVCache | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """Run the target and return its post-norm state and `hidden_states[s]` for s in taps.

        mask None means causal (right-padded or packed rows; positions that restart separate packed
        documents). With a cache, `mask` is what `cache.open` returned. Raises ValueError for a tap
        outside 0 < s < L: at s = L the stored entry is post-norm and is `hidden_BTD`. Collective
        over `tensor_ranks`, which must be given the same tokens.
        """
        self.check_taps(taps)
        aux: dict[int, Tensor] = {}
        hooks = [self._tap(s, aux) for s in taps]
        cached = {self._cache_argument: cache, "use_cache": True} if cache is not None else {}
        attention = mask if mask is None or len(mask) > 1 else next(iter(mask.values()))
        try:
            output = self.decoder(
                input_ids=tokens_BT,
                position_ids=positions_BT,
                attention_mask=attention,
                **(cached or {"use_cache": False}),
            )
        finally:
            for hook in hooks:
                hook.remove()
        # From whichever device holds the layer.
        aux = {s: states_BTD.to(self.device) for s, states_BTD in aux.items()}
        return TargetOutput(output.last_hidden_state.to(self.device), aux)

    def check_taps(self, taps: Sequence[int]) -> None:
        """Raise ValueError for a tap outside 0 < s < L."""
        for s in taps:
            if not 0 < s < self.shape.num_layers:
                raise ValueError(
                    f"aux feature s={s}: expected 0 < s < {self.shape.num_layers} "
                    f"({AUX_CONVENTION}; s = {self.shape.num_layers} is post-norm)"
                )

    def _tap(self, s: int, aux: dict[int, Tensor]) -> Any:
        def keep(_: nn.Module, args: tuple, kwargs: dict) -> None:
            aux[s] = args[0] if args else kwargs["hidden_states"]

        return self.layers[s].register_forward_pre_hook(keep, with_kwargs=True)

    def new_cache(self, batch: int, max_len: int, max_nodes: int) -> KVCache:
        """Make an empty cache for `batch` rows of up to `max_len` tokens and trees of `max_nodes`.

        Raises ValueError for a target that cannot decode.
        """
        self.check_decodes()
        cache = KVCache(
            batch,
            max_len,
            max_nodes,
            dtype=self.dtype,
            device=self.device,
            windows=self.windows,
            num_layers=self.shape.num_layers,
        )
        if self.compiled is not None:
            self.compiled.prepare(batch)
            self.compiled.place(cache)
        return cache

    def check_decodes(self) -> None:
        """Raise ValueError for a state that cannot be rolled back, or weights in several places."""
        if self.cannot_decode:
            raise ValueError(
                f"{self.name}: {self.cannot_decode} cannot be rolled back after a rejected draft, "
                "so that it can neither decode nor draft here; heads can be trained for it from "
                "captured features"
            )
        if self.tensor_ranks > 1 or self.spread:
            where = f"{self.tensor_ranks} processes" if self.tensor_ranks > 1 else "several devices"
            raise ValueError(
                f"{self.name}: its weights lie on {where}, and decoding runs on one; train without "
                "it (train.eval_prompts=0), and decode with target.parallel=replicated"
            )

    def pass_over(
        self,
        tokens_RN: Tensor,
        depth_RN: Tensor,
        visible_RNN: Tensor,
        cache: KVCache,
        *,
        rows: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """Run a tree (or a prompt chunk) on top of the cache; nothing is committed.

        depth_RN counts from each row's length: position = length + depth. visible_RNN[r, n, m]
        is true where node n sees node m (itself included). Absent nodes (token -1) are computed
        with token 0 and must not be read.
        """
        lengths = (
            cache.lengths[: len(tokens_RN)] if rows is None else [cache.lengths[r] for r in rows]
        )
        starts = torch.tensor(lengths, device=self.device)[:, None]
        positions_RN = (starts + depth_RN).clamp(max=self.shape.max_positions - 1)
        mask = cache.open(positions_RN, visible_RNN, rows=rows)
        mode = "compiled" if rows is None else "eager"  # prefills, of any length, name their rows
        with contextlib.nullcontext() if self.compiled is None else self.compiled.within(mode):
            return self.forward(
                tokens_RN.clamp(min=0), positions_RN, mask=mask, cache=cache, taps=taps
            )

    def readout(self, hidden: Tensor) -> Tensor:
        """Return the target's own logits [.., V] from post-norm states [.., D]."""
        return self.parts.readout(hidden)

    @torch.no_grad()
    def _embedding_output(self, tokens_BT: Tensor) -> Tensor:
        """Return hidden_states[0] as the first layer receives it."""
        seen: list[Tensor] = []

        def keep(_: nn.Module, args: tuple, kwargs: dict) -> None:
            seen.append(args[0] if args else kwargs["hidden_states"])

        hook = self.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
        try:
            self.decoder(input_ids=tokens_BT, use_cache=False)
        finally:
            hook.remove()
        return seen[0]

    @torch.no_grad()
    def _check_readout(self) -> None:
        """Refuse a target whose logits are not `readout(hidden)`: soft caps, scales, odd norms."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, self.shape.vocab_size, (1, 16), generator=generator)
        tokens = tokens.to(self.device)
        want = self.model(input_ids=tokens, use_cache=False).logits.float().to(self.device)
        have = self.readout(self.forward(tokens).hidden_BTD).float()
        error = ((have - want).abs().max() / want.abs().max().clamp(min=1e-6)).item()
        limit = 1e-4 if self.dtype in (torch.float32, torch.float64) else 2e-2
        if not error <= limit:
            raise ValueError(
                f"{self.name}: logits rebuilt from hidden_states[{self.shape.num_layers}] differ "
                f"from the model's own by {error:.1e} relative (limit {limit:.0e}); "
                f"{type(self.model).__name__} reads out in a way headstart does not know"
            )


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return 16 hex digits that name the target: sampled weights, vocabulary, architecture.

    Weights are rounded to bf16 and to multiples of 2^-12 first, so that the dtype a target was
    loaded in does not matter; library versions do not enter.
    """
    digest = hashlib.sha256()
    config = model.config.get_text_config()
    shape = TargetShape.of(config)
    digest.update(
        json.dumps([config.model_type, vars(shape)], sort_keys=True, default=str).encode()
    )
    if tokenizer is not None:
        digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    named = sorted(model.named_parameters(), key=lambda item: item[0])
    for name, weight in named:
        sample = whole(weight).flatten()[:: max(1, weight.numel() // 64)][:64]
        grid = (sample.to(torch.bfloat16).float() * 4096).round().to(torch.int64)
        digest.update(name.encode() + json.dumps(grid.tolist()).encode())
    return digest.hexdigest()[:16]


def _layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    found = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise ValueError(
            f"{type(decoder).__name__}: expected one list of {count} layers, found {len(found)}; "
            "headstart cannot tap this architecture"
        )
    return found[0]


def _recurrent(model: PreTrainedModel) -> str | None:
    """Name what keeps this model from tree verification, or return None."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - set(ATTENTION_KINDS)
    if kinds:
        return f"{config.model_type} layers of type {', '.join(sorted(kinds))}"
    if getattr(model, "_is_stateful", False):
        return f"the recurrent state of {config.model_type}"
    return None


def _attention_windows(config: Any) -> dict[str, int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or (
        ["sliding_attention"] if window else ["full_attention"]
    )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}


def _rope(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    # Models that mix windows keep one set a layer kind; heads attend fully.
    rope = rope.get("full_attention", rope)
    return json.loads(json.dumps(dict(rope), default=str))


def _tokenizer_size(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> int:
    """Return one past the highest id with a token; the model's rows from there on are padding."""
    if tokenizer is None:
        return vocab_size
    return min(vocab_size, max(tokenizer.get_vocab().values()) + 1)


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return every id that ends an answer: of both configs of the model and of the tokenizer."""
    found: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return sorted(found)


def _warn_of_penalties(model: PreTrainedModel) -> None:
    generation = model.generation_config
    for name, neutral in PENALTIES.items():
        value = getattr(generation, name, None)
        if value not in (None, neutral):
            warnings.warn(
                f"the target's generation config sets {name}={value}; headstart decodes without "
                "penalties, in the drafted run and in the plain baseline alike",
                stacklevel=3,
            )
