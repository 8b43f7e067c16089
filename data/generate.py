"""On-policy rows: the target's own answers to prompts, the largest single lever on acceptance.

`headstart generate data.num_prompts=400 out=runs/rows`. Batched with continuous refill; every
answer is written when it is finished, so a killed run is taken up without loss or repeats.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING
from tqdm import tqdm

from headstart.data.conversations import Conversation
from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.source import DataConfig, load_conversations, source_settings
from headstart.data.template import Audit, ChatTemplate, TemplateRefusal
from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import NoDrafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.target import Target

log = logging.getLogger(__name__)


@dataclass
class GenerateConfig:
    """How answers are generated."""

    max_new_tokens: int = 128
    """Longest answer in tokens; a cut answer teaches no end of turn."""
    batch_size: int = 32
    """Prompts decoded side by side."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"generate.{name}={getattr(self, name)}: need at least 1")


@dataclass
class GenerateRun:
    """`headstart generate`: prompts -> rows answered by the target itself."""

    target: TargetConfig = MISSING
    data: DataConfig = MISSING
    sampling: SamplingConfig = MISSING
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    out: str = MISSING
    """Directory that receives rows.arrow and meta.json."""


def run(config: GenerateRun) -> None:
    """Load the target and generate (the command's entry)."""
    load_conversations(config.data, need_answers=False)  # a bad file is refused before the target
    target = load_target(config.target)
    generate(
        target,
        data=config.data,
        sampling=config.sampling,
        config=config.generate,
        directory=Path(config.out),
    )


def generate(
    target: Target,
    *,
    data: DataConfig,
    sampling: SamplingConfig,
    config: GenerateConfig,
    directory: Path,
) -> str:
    """Answer the prompts that `directory` does not hold yet; return the audit's summary line.

    Only the first user turn of a conversation is answered. Prompts that do not fit, or that the
    template refuses, are dropped and counted. Raises ValueError when nothing is left.
    """
    template = ChatTemplate(target.tokenizer)
    conversations, account = load_conversations(data, need_answers=False)
    log.info("prompts: %s", account)
    writer = RowsWriter(directory, _meta(target, template, data, sampling, config))
    audit = Audit()
    done = {row.row_id for row in writer.rows}
    for row in writer.rows:
        audit.conversations += 1
        audit.keep(row)
    if done:
        log.info("%s: %d answers are there already", directory, len(done))
    requests = list(_requests(conversations, done, template, target, data, config, audit))
    by_id = {c.prompt_id: c for c in conversations}
    bar = tqdm(total=len(requests), unit="answer", desc="generate", smoothing=0.05)
    started, tokens = time.perf_counter(), 0
    try:
        for completion in decode(
            target,
            NoDrafter(target.device),
            requests,
            sampling=sampling,
            stop_ids=template.stop_ids(target.stop_ids),
            batch_size=config.batch_size,
        ):
            conversation = by_id[completion.prompt_id]
            row = template.row_from_answer(
                first_turn(conversation),
                completion.token_ids,
                stop_reason=completion.stop_reason,
                row_id=completion.prompt_id,
                category=conversation.category,
                max_length=data.max_length,
                audit=audit,
            )
            if row is not None:
                writer.add(row)
            tokens += len(completion.token_ids)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s")
            bar.update()
    finally:
        bar.close()
        writer.close()
    if not audit.rows:
        source = f"data.path={data.path}" if data.path else "generated prompts"
        raise ValueError(f"{source}: no answer is usable: {audit.summary()}")
    writer.finish(audit.summary(), {"rows": audit.rows, "supervised_tokens": audit.supervised})
    log.info("%s: %s", directory, audit.summary())
    return audit.summary()


def first_turn(conversation: Conversation) -> list[dict[str, str]]:
    """Return the turns up to and including the first user turn."""
    messages = []
    for message in conversation.messages:
        messages.append(message)
        if message["role"] == "user":
            break
    return messages


def _requests(
    conversations: list[Conversation],
    done: set[str],
    template: ChatTemplate,
    target: Target,
    data: DataConfig,
    config: GenerateConfig,
    audit: Audit,
) -> Iterator[Request]:
    longest = min(data.max_length, target.shape.max_positions)
    for conversation in conversations:
        if conversation.prompt_id in done:
            continue
        try:
            ids = template.prompt_ids(first_turn(conversation))
        except TemplateRefusal as refusal:
            audit.conversations += 1
            audit.dropped[str(refusal)] += 1
            continue
        if len(ids) >= longest:
            audit.conversations += 1
            audit.dropped[f"with a prompt of {longest} tokens or more (data.max_length)"] += 1
            continue
        limit = min(config.max_new_tokens, longest - len(ids))
        yield Request(conversation.prompt_id, tuple(ids), limit)


def _meta(
    target: Target,
    template: ChatTemplate,
    data: DataConfig,
    sampling: SamplingConfig,
    config: GenerateConfig,
) -> RowsMeta:
    settings = source_settings(data) | {"generate.max_new_tokens": config.max_new_tokens}
    settings |= {f"sampling.{name}": value for name, value in vars(sampling).items()}
    settings["target.dtype"] = str(target.dtype).removeprefix("torch.")
    return RowsMeta(target.fingerprint, template.hash, settings)
