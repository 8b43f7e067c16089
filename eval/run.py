"""`headstart eval`: head checkpoints + prompts -> result.json, per-prompt rows and a report."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from omegaconf import MISSING

from headstart.data.template import ChatTemplate
from headstart.eval.bench import evaluate_heads
from headstart.eval.drafter_arms import refuse_bad_fallbacks
from headstart.eval.engine.drafters.config import DrafterConfig, ModelConfig
from headstart.eval.engine.policy_config import PolicyConfig
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.eval.suites import refuse_unreadable
from headstart.heads.load import TargetConfig, load_target, refuse_missing
from headstart.heads.runtime import RuntimeConfig


@dataclass
class EvalRun:
    """`headstart eval`: what each head buys, against the same model decoding alone."""

    target: TargetConfig = MISSING
    checkpoints: list[str] = MISSING
    """Head checkpoint directories, measured against one plain arm."""
    drafters: dict[str, DrafterConfig] = field(default_factory=dict)
    """Drafters without a head, measured beside them: drafter=[NAME,...] or
    +drafter@drafters.MINE=NAME, and then drafters.MINE.tokens=5."""
    tree: TreeConfig = MISSING
    """Draft that each head is measured with, unless there are several in `trees`."""
    trees: dict[str, TreeConfig] = field(default_factory=dict)
    """Several drafts, each for every head: +tree@trees.NAME=OPTION adds one."""
    policy: PolicyConfig = MISSING
    sampling: SamplingConfig = MISSING
    runtime: RuntimeConfig = MISSING
    eval: EvalConfig = field(default_factory=EvalConfig)
    out: str = MISSING
    """Directory that receives one directory of results a drafter, report.html and report.md with
    figures, and journal.jsonl, from which an interrupted run goes on."""

    def __post_init__(self) -> None:
        if not self.checkpoints and not self.drafters:
            raise ValueError(
                "checkpoints=[] and no drafters: nothing to measure; give checkpoints=[DIRECTORY] "
                "or drafter=[lookup]"
            )
        refuse_bad_fallbacks(self.drafters, num_heads=len(self.checkpoints))


def run(config: EvalRun) -> None:
    """Measure the heads (the command's entry)."""
    missing = [c for c in config.checkpoints if not (Path(c) / "config.json").is_file()]
    if missing:
        raise FileNotFoundError(
            f"checkpoints: no head checkpoint at {', '.join(missing)}; "
            "give directories that hold config.json and model.safetensors"
        )
    refuse_unreadable(config.eval)
    for name, drafter in config.drafters.items():
        if isinstance(drafter, ModelConfig):
            refuse_missing(drafter.path, f"drafters.{name}.path")
    config.runtime.apply()
    target = load_target(config.target)
    config.runtime.attach(target)
    evaluate_heads(
        target,
        ChatTemplate(target.tokenizer),
        [Path(c) for c in config.checkpoints],
        list(config.trees.values()) or [config.tree],
        sampling=config.sampling,
        config=config.eval,
        out=Path(config.out),
        drafters=config.drafters,
        run_config=asdict(config),
        policy=config.policy,
    )
