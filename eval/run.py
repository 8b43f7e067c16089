"""`headstart eval`: head checkpoints + prompts -> result.json, per-prompt rows and a report."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from omegaconf import MISSING

from headstart.data.source import read_conversations
from headstart.data.template import ChatTemplate
from headstart.eval.bench import evaluate_heads
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.runtime import RuntimeConfig


@dataclass
class EvalRun:
    """`headstart eval`: what each head buys, against the same model decoding alone."""

    target: TargetConfig = MISSING
    checkpoints: list[str] = MISSING
    """Head checkpoint directories, measured against one plain arm."""
    tree: TreeConfig = MISSING
    sampling: SamplingConfig = MISSING
    runtime: RuntimeConfig = MISSING
    eval: EvalConfig = field(default_factory=EvalConfig)
    out: str = MISSING
    """Directory that receives one directory of results a head, and report.md."""


def run(config: EvalRun) -> None:
    """Measure the heads (the command's entry)."""
    missing = [c for c in config.checkpoints if not (Path(c) / "config.json").is_file()]
    if missing or not config.checkpoints:
        raise FileNotFoundError(
            f"checkpoints: no head checkpoint at {', '.join(missing) or 'all'}; "
            "give directories that hold config.json and model.safetensors"
        )
    if config.eval.suite is not None:  # a bad file is refused before the target is loaded
        read_conversations(config.eval.suite, need_answers=False, option="eval.suite")
    config.runtime.apply()
    target = load_target(config.target)
    config.runtime.attach(target)
    evaluate_heads(
        target,
        ChatTemplate(target.tokenizer),
        [Path(c) for c in config.checkpoints],
        [config.tree],
        sampling=config.sampling,
        config=config.eval,
        out=Path(config.out),
        run_config=asdict(config),
    )
