"""Rows from conversations that already have answers: `headstart prepare data.path=chats.jsonl`.

Conversations stream from the sources through rendering processes to disk, in one order for one
config. A run that was killed renders again and writes what is missing: the rows, and the account of
what was dropped, are those of an uninterrupted run.
"""

import logging
import resource
import sys
import time
import warnings
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from omegaconf import MISSING
from tqdm import tqdm

from headstart.data.audit import Audit
from headstart.data.audit_prompts import AuditConfig, new_audit
from headstart.data.audit_report import write_audit
from headstart.data.conversations import Account
from headstart.data.ids import IdSet
from headstart.data.notes import Note, note_file
from headstart.data.render import Renderer, render_all, usable_cpus
from headstart.data.rows import RowsMeta, RowsWriter, read_rows
from headstart.data.show import show_rows
from headstart.data.source import (
    DataConfig,
    expected_rows,
    iter_conversations,
    source_settings,
)
from headstart.data.template import ChatTemplate
from headstart.data.token_row import TokenRow
from headstart.heads.load import TargetConfig, load_target

log = logging.getLogger(__name__)
RENAMED = "renamed, as an earlier row had their id"


@dataclass
class PrepareRun:
    """`headstart prepare`: conversations -> token rows with a loss mask."""

    target: TargetConfig = MISSING
    data: DataConfig = MISSING
    workers: int | None = None
    """Processes that render; null means one for each CPU, 1 means no process beside this one."""
    audit: AuditConfig = field(default_factory=AuditConfig)
    show: int = 0
    """Rows to print at the end, their supervised tokens coloured."""
    out: str = MISSING
    """Directory that receives the rows, meta.json, the audit, and row_notes.jsonl: what was
    dropped or repaired, with place and reason, one note a line."""

    def __post_init__(self) -> None:
        if self.show < 0:
            raise ValueError(f"show={self.show}: need a number of rows, or 0")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers}: need at least 1, or null")


def run(config: PrepareRun) -> None:
    """Render the conversations and write their rows, with an account of what was dropped."""
    started = time.monotonic()
    # Read as far as the first usable row: bad data is refused before the target is loaded.
    next(iter_conversations(config.data, need_answers=True, account=Account()))
    target = load_target(config.target)
    template = ChatTemplate(target.tokenizer)
    meta = RowsMeta(target.fingerprint, template.hash, source_settings(config.data))
    audit = new_audit(config.audit, template)
    longest = _longest(config.data.max_length, target.shape.max_positions)
    renderer = Renderer(template, longest, target.shape.vocab_size, audit.empty())
    del target  # the weights have said who they are; rendering needs the tokenizer alone
    account, writer = Account(), RowsWriter(Path(config.out), meta)
    try:
        _write(config, renderer, writer, audit, account)
        if not audit.rows:
            raise ValueError(f"{config.data.label}: no row is usable: {audit.summary()}")
        writer.finish(audit.summary(), {"rows": audit.rows, "supervised_tokens": audit.supervised})
    except KeyboardInterrupt:
        log.warning("interrupted; run the same command again to complete %s", config.out)
        raise
    finally:
        writer.close()
    source = account.summary()
    log.info("conversations: %s", source)
    log.info("%s: %s", config.out, audit.summary())
    log.info("%s", write_audit(writer.directory, audit, template.tokenizer, source=source))
    show_rows(islice(read_rows(writer.directory)[0], config.show), template.tokenizer)
    minutes = (time.monotonic() - started) / 60
    told = (account.total, minutes, _peak_memory())
    log.info("%d rows in %.1f minutes; peak memory %.0f MB", *told)


def _longest(max_length: int, context: int) -> int:
    if max_length > context:
        warnings.warn(
            f"data.max_length={max_length} is more than the target's context of {context} tokens; "
            "rows are cut to that",
            stacklevel=2,
        )
    return min(max_length, context)


def _write(
    config: PrepareRun, renderer: Renderer, writer: RowsWriter, audit: Audit, account: Account
) -> None:
    """Write every row that is not there yet; add what was rendered and read to the accounts."""
    ids, done = IdSet(), writer.done_ids
    if done:
        log.info("%s: %d rows are there already", writer.directory, len(done))
    total, workers = expected_rows(config.data), config.workers or usable_cpus()
    with note_file(writer.directory) as write, _bar(total) as bar:
        account.listener = lambda what, place, reason: write(Note(what, reason, place))
        conversations = iter_conversations(config.data, need_answers=True, account=account)
        # Closed here, so that the processes end before an error is told.
        with closing(render_all(conversations, renderer, workers=workers)) as parts:
            for part in parts:
                audit.merge(part.audit)
                for note in part.notes:
                    write(note)
                for row in part.rows:
                    if _renamed(row, ids):
                        audit.note(RENAMED)
                        write(Note("repaired", RENAMED, None, row.row_id))
                    if row.row_id not in done:
                        writer.add(row)
                bar.update(account.total - bar.n)


def _renamed(row: TokenRow, ids: IdSet) -> bool:
    """Give a row another id where an earlier one has it: x-1 of a split x may be one's own."""
    before, row.row_id = row.row_id, ids.unique(row.row_id, "again")
    return row.row_id != before


def _bar(total: int | None) -> tqdm:
    return tqdm(total=total, unit="row", desc="prepare", smoothing=0.05, mininterval=0.5)


def _peak_memory() -> float:
    """Return the largest resident size that this process had, in MB.

    Not that of its workers: the system counts what a child was before it became one.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
