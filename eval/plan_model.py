"""A model's sizes from its configuration alone: the plan's target, or a separate draft model.

The architecture is built by transformers on the meta device, without weights, so that what is
counted is what would be loaded. Shapes: D width, V vocabulary, L layers.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from headstart.eval.roofline import Context, Work
from headstart.heads.target import ATTENTION_KINDS, TargetShape

OPERATIONS_A_LAYER = 45
"""Operations that a layer of transformers' Llama starts, views not counted."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
UNDECLARED = ("head_dim",)
"""Fields that models read although not every configuration class declares them (Qwen3-MoE's)."""
NOT_PLANNED = {
    "kv_lora_rank": "latent attention keeps another cache",
    "num_kv_shared_layers": "layers that share a cache",
    "global_head_dim": "attention heads of several widths",
}
"""Fields of architectures whose cache the KV term does not describe, and what they mean."""


@dataclass
class ModelConfig:
    """A model to plan for: where its configuration lies, or its fields as numbers."""

    name: str = ""
    """What tables call the model; empty takes it from the path."""
    path: str | None = None
    """Directory, config.json or .gguf file, of which only the configuration is read; null means
    `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of a transformers configuration, model_type among them; used without a path."""

    def __post_init__(self) -> None:
        if (self.path is None) == (not self.config):
            given = f"model.path={self.path} and model.config with {len(self.config)} fields"
            raise ValueError(f"{given}: give one of them, such as model=hf model.path=DIRECTORY")


@dataclass(frozen=True)
class ModelSize:
    """How many weights a model has, how many a pass reads, and what its KV cache holds."""

    name: str
    shape: TargetShape
    num_parameters: int
    shared_parameters: int
    """Read by every pass: all but the experts and, unless tied to the read-out, the embedding."""
    expert_parameters: int
    """Of all experts of all layers."""
    num_experts: int
    top_k: int
    windows: tuple[int | None, ...]
    """Tokens each layer attends to; null means all."""

    @property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied by."""
        return self.shared_parameters + self.expert_parameters * self.top_k // self.num_experts

    def work(self, weight_bytes: int) -> Work:
        """Return what a pass reads and multiplies, every token read out as verifying needs."""
        return Work(
            read_bytes=self.shared_parameters * weight_bytes,
            flops_per_token=2.0 * self.active_parameters,
            expert_bytes=self.expert_parameters * weight_bytes,
            num_experts=self.num_experts,
            top_k=self.top_k,
            operations=OPERATIONS_A_LAYER * self.shape.num_layers,
        )

    def context(self, tokens: int, kv_bytes: int) -> Context:
        """Return what attention to a row of `tokens` cached tokens costs."""
        seen = sum(min(tokens, window or tokens) for window in self.windows)
        width, kv_width = (
            heads * self.shape.head_dim for heads in (self.shape.num_heads, self.shape.num_kv_heads)
        )
        return Context(row_bytes=2 * kv_width * kv_bytes * seen, flops_per_token=4.0 * width * seen)


def model_size(config: ModelConfig, *, option: str = "model") -> ModelSize:
    """Count the weights of a model that is not loaded; nothing is downloaded.

    `option` is what messages call the config. Raises FileNotFoundError for a path that is not
    there, ValueError naming the field of an architecture that cannot be planned.
    """
    full = read_config(config, option)
    name = config.name or Path(config.path or full.model_type).name
    try:
        refuse_unplanned(name, full)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(full)
        _refuse_recurrent(name, model)
        return measure_model(name, model)
    except (AttributeError, KeyError, TypeError) as error:  # a field that transformers misses
        raise ValueError(
            f"{name}: a model_type={full.model_type} of these fields cannot be built "
            f"({_first_sentence(error)}); complete the configuration or plan for another model"
        ) from error


def _refuse_recurrent(name: str, model: PreTrainedModel) -> None:
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name}: model_type={model.config.model_type} keeps a recurrent state, which a "
            "rejected draft cannot roll back; plan for a model of attention layers"
        )


def read_config(config: ModelConfig, option: str) -> PreTrainedConfig:
    """Read a configuration from disk, or make it of its fields."""
    if config.path is None:
        return _from_fields(dict(config.config), option)
    path = Path(config.path).expanduser()
    if not path.exists() or (path.is_dir() and not (path / "config.json").is_file()):
        raise FileNotFoundError(
            f"{option}.path={config.path}: no config.json there; plan reads local files "
            "only, give a directory, a config.json or a .gguf file"
        )
    place, file = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    try:
        return AutoConfig.from_pretrained(place, local_files_only=True, **file)
    except (ValueError, OSError) as error:
        raise ValueError(f"{option}.path={config.path}: {_first_sentence(error)}") from error


def _from_fields(fields: dict[str, Any], option: str) -> PreTrainedConfig:
    kind = fields.pop("model_type", None)
    try:
        known = AutoConfig.for_model(kind)
    except ValueError as error:
        raise ValueError(
            f"{option}.config.model_type={kind}: transformers {transformers.__version__} has "
            "no such architecture; give llama, qwen3_moe or another it knows"
        ) from error
    for field_name in fields:
        if not hasattr(known, field_name) and field_name not in UNDECLARED:
            raise ValueError(
                f"{option}.config.{field_name}: a {kind} configuration has no such field; check "
                "its spelling in the model's config.json"
            )
    return AutoConfig.for_model(kind, **fields)


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0]


def refuse_unplanned(name: str, full: PreTrainedConfig) -> None:
    """Raise ValueError for an architecture whose weights or cache the plan does not describe."""
    text = full.get_text_config()
    if getattr(full, "is_encoder_decoder", False):
        raise ValueError(
            f"{name}: is_encoder_decoder=true; drafts are made for decoder-only models"
        )
    for field_name, meaning in NOT_PLANNED.items():
        if getattr(text, field_name, None):
            raise ValueError(
                f"{name}: {field_name}={getattr(text, field_name)} ({meaning}) is not described by "
                "the plan's KV term; plan for another model"
            )
    kinds = set(getattr(text, "layer_types", None) or ()) - set(ATTENTION_KINDS)
    if kinds:
        raise ValueError(
            f"{name}: layer_types has {', '.join(sorted(kinds))}; the plan knows "
            f"{' and '.join(ATTENTION_KINDS)} only"
        )


def measure_model(name: str, model: PreTrainedModel) -> ModelSize:
    """Sort the weights of a model, on any device, by how often a pass reads them."""
    text = model.config.get_text_config()
    shape = TargetShape.of(text)
    read = _weights(model.get_decoder()) | _weights(model.get_output_embeddings())
    embedding, readout = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not readout:
        del read[embedding]
    experts = sum(weight.numel() for weight, path in read.items() if "experts" in path.split("."))
    num_experts, top_k = _routing(name, text, experts)
    stray = [p for w, p in read.items() if w.dim() == 3 and "experts" not in p.split(".")]
    if num_experts > 1 and stray:
        raise ValueError(
            f"{name}: {stray[0]} of {text.model_type} looks like weights of experts under another "
            "name; the plan cannot tell which of them a token reads"
        )
    return ModelSize(
        name=name,
        shape=shape,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        shared_parameters=sum(weight.numel() for weight in read) - experts,
        expert_parameters=experts,
        num_experts=num_experts,
        top_k=top_k,
        windows=_windows(text),
    )


def _weights(module: nn.Module) -> dict[nn.Parameter, str]:
    return {weight: path for path, weight in module.named_parameters()}


def _routing(name: str, text: PreTrainedConfig, experts: int) -> tuple[int, int]:
    """Return (E, experts a token); (1, 1) for a dense model."""
    counts = {key: getattr(text, key) for key in EXPERT_COUNTS if getattr(text, key, None)}
    top_k = getattr(text, "num_experts_per_tok", None)
    if not experts:
        if any(count > 1 for count in counts.values()):
            field_name, count = next(iter(counts.items()))
            raise ValueError(
                f"{name}: {field_name}={count}, but {text.model_type} has no weights named "
                "experts; the plan cannot tell which of them a token reads"
            )
        return 1, 1
    if not counts or not top_k:
        missing = "num_experts_per_tok" if counts else " or ".join(EXPERT_COUNTS)
        raise ValueError(
            f"{name}: {text.model_type} has weights of experts but no {missing}; the plan cannot "
            "tell how many of them a token reads"
        )
    return next(iter(counts.values())), top_k


def _windows(text: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return the attention window of each layer."""
    window = getattr(text, "sliding_window", None)
    kinds = (
        getattr(text, "layer_types", None)
        or ["sliding_attention" if window else "full_attention"] * text.num_hidden_layers
    )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
