"""On-policy rows: the target's own answers to prompts, the largest single lever on acceptance.

`headstart generate data.num_prompts=400 out=runs/rows`. A conversation is answered turn by turn,
each user turn after the target's own earlier answers. Every answer is written when it comes, so a
killed run is taken up without loss or repeats, in the middle of a conversation too.
"""

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING
from tqdm import tqdm

from headstart.data.answer_log import ANSWERS, AnswerLog
from headstart.data.answering import Backend, EngineBackend, head_for
from headstart.data.audit import Audit
from headstart.data.audit_prompts import AuditConfig, new_audit
from headstart.data.audit_report import write_audit
from headstart.data.conversations import Account
from headstart.data.dialogue import Dialogue
from headstart.data.generate_config import GenerateConfig
from headstart.data.notes import Note, about, note_file
from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.server import ServerBackend
from headstart.data.source import (
    DataConfig,
    iter_conversations,
    load_conversations,
    source_settings,
)
from headstart.data.template import ChatTemplate
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree_config import TreeConfig
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.target import Target

log = logging.getLogger(__name__)


@dataclass
class GenerateRun:
    """`headstart generate`: prompts -> rows answered by the target itself."""

    target: TargetConfig = MISSING
    data: DataConfig = MISSING
    sampling: SamplingConfig = MISSING
    tree: TreeConfig = MISSING
    """What generate.head drafts."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    out: str = MISSING
    """Directory that receives the rows, meta.json, the audit, answers.jsonl (every answer with its
    temperature and how it ended), and row_notes.jsonl (what was dropped or ended early, where it
    came from and why)."""


def run(config: GenerateRun) -> None:
    """Load the target and generate (the command's entry)."""
    # Read as far as the first usable row: bad data is refused before the target is loaded.
    next(iter_conversations(config.data, need_answers=False, account=Account()))
    head = config.generate.head
    if head is not None and not (Path(head) / "config.json").is_file():
        raise FileNotFoundError(f"generate.head={head}: no head checkpoint there")
    generate(
        load_target(config.target),
        data=config.data,
        sampling=config.sampling,
        config=config.generate,
        directory=Path(config.out),
        tree=config.tree,
        audit_config=config.audit,
    )


def generate(
    target: Target,
    *,
    data: DataConfig,
    sampling: SamplingConfig,
    config: GenerateConfig,
    directory: Path,
    tree: TreeConfig | None = None,
    audit_config: AuditConfig | None = None,
) -> str:
    """Answer the turns that `directory` does not hold yet; return the audit's summary line.

    Prompts that do not fit, or that the template refuses, are dropped and counted. `tree` is what
    config.head drafts. Raises ValueError when nothing is left, and for a server or a head that
    does not fit the target; ConnectionError for a server that cannot be reached.
    """
    if config.temperatures is not None and sampling.temperature != 0:
        warnings.warn(
            f"sampling.temperature={sampling.temperature} has no effect with "
            f"generate.temperatures={config.temperatures}; drop one of the two",
            stacklevel=2,
        )
    template = ChatTemplate(target.tokenizer)
    notes: list[Note] = []
    conversations, account = load_conversations(
        data,
        need_answers=False,
        listener=lambda what, place, reason: notes.append(Note(what, reason, place)),
    )
    log.info("prompts: %s", account)
    audit = new_audit(audit_config or AuditConfig(), template)
    names = {conversation.prompt_id for conversation in conversations}
    dialogues = {
        conversation.prompt_id: Dialogue(
            conversation,
            template,
            longest=min(data.max_length, target.shape.max_positions),
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature_of(conversation.prompt_id, sampling),
            only_first=config.turns == "first",
            taken=names,
        )
        for conversation in conversations
    }
    writer = RowsWriter(directory, _meta(target, template, data, sampling, config))
    try:
        with closing(AnswerLog(directory / ANSWERS)) as answers, note_file(directory) as write:
            for note in notes:
                write(note)
            for dialogue in _taken_up(dialogues, answers):
                _keep(dialogue, writer, audit, write)
            if dialogues:
                backend = _backend(target, template, sampling, config, tree)
                for dialogue in _answered(dialogues, answers, backend):
                    _keep(dialogue, writer, audit, write)
        if not audit.rows:
            raise ValueError(f"{data.label}: no answer is usable: {audit.summary()}")
        writer.finish(audit.summary(), {"rows": audit.rows, "supervised_tokens": audit.supervised})
    finally:
        writer.close()
    log.info("%s: %s", directory, audit.summary())
    log.info("%s", write_audit(directory, audit, template.tokenizer, source=account))
    return audit.summary()


def _taken_up(dialogues: dict[str, Dialogue], answers: AnswerLog) -> Iterator[Dialogue]:
    """Take out and yield the dialogues that are over without anything being asked now.

    The others are left with the answers that an earlier run wrote down.
    """
    for name in [name for name, dialogue in dialogues.items() if dialogue.ask is None]:
        yield dialogues.pop(name)
    count = 0
    for dialogue in answers.replay(dialogues):
        count += 1
        if dialogue.ask is None:
            yield dialogues.pop(dialogue.conversation.prompt_id)
    if count:
        log.info("%s: %d answers are there already", answers.path, count)


def _answered(
    dialogues: dict[str, Dialogue], answers: AnswerLog, backend: Backend
) -> Iterator[Dialogue]:
    """Ask turn after turn, all first turns first; take out and yield each dialogue that is over."""
    bar = tqdm(
        total=sum(dialogue.turns_left for dialogue in dialogues.values()),
        unit="answer",
        desc="generate",
        smoothing=0.05,
    )
    started, tokens = time.perf_counter(), 0
    with bar:
        while dialogues:
            # One turn number at a time, so that the ids of its asks differ.
            turn = min(dialogue.turn for dialogue in dialogues.values())
            asked = {d.ask.prompt_id: d for d in dialogues.values() if d.turn == turn}
            for answer in backend.answers([dialogue.ask for dialogue in asked.values()]):
                dialogue = asked[answer.prompt_id]
                answers.add(dialogue, answer)
                left = dialogue.turns_left
                dialogue.take(answer)
                tokens += len(answer.token_ids)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s")
                bar.update(left - dialogue.turns_left)
                if dialogue.ask is None:
                    yield dialogues.pop(dialogue.conversation.prompt_id)
    seconds = time.perf_counter() - started
    log.info("%d tokens in %.1f s: %.1f tokens/s", tokens, seconds, tokens / seconds)


def _keep(
    dialogue: Dialogue, writer: RowsWriter, audit: Audit, write: Callable[[Note], None]
) -> None:
    """Count a dialogue that is over, and write those of its rows that are not there yet."""
    audit.listener = about(dialogue.conversation, write)
    dialogue.account(audit)
    audit.listener = None
    for row in dialogue.rows():
        if row.row_id not in writer.done_ids:
            writer.add(row)


def _backend(
    target: Target,
    template: ChatTemplate,
    sampling: SamplingConfig,
    config: GenerateConfig,
    tree: TreeConfig | None,
) -> Backend:
    stop_ids = template.stop_ids(target.stop_ids)
    if config.server.url is not None:
        return ServerBackend(
            config.server.client(),
            target,
            template,
            sampling=sampling,
            stop_ids=stop_ids,
            in_flight=config.batch_size,
            model=config.server.model,
        )
    return EngineBackend(
        target,
        sampling=sampling,
        stop_ids=stop_ids,
        batch_size=config.batch_size,
        head=None if config.head is None else head_for(Path(config.head), target),
        tree=tree,
    )


def _meta(
    target: Target,
    template: ChatTemplate,
    data: DataConfig,
    sampling: SamplingConfig,
    config: GenerateConfig,
) -> RowsMeta:
    """Say what the rows are made by.

    Neither the batch size nor a head that drafts is part of it: they change no distribution.
    """
    names = ("max_new_tokens", "turns", "temperatures", "weights")
    settings = source_settings(data) | {f"generate.{name}": getattr(config, name) for name in names}
    settings["generate.answers"] = "engine" if config.server.url is None else "server"
    settings |= {f"sampling.{name}": value for name, value in vars(sampling).items()}
    settings["target.dtype"] = str(target.dtype).removeprefix("torch.")
    return RowsMeta(target.fingerprint, template.hash, settings)
