"""Rows from conversations that already have answers: `headstart prepare data.path=chats.jsonl`."""

import logging
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.source import DataConfig, load_conversations, source_settings
from headstart.data.template import Audit, ChatTemplate
from headstart.heads.load import TargetConfig, load_target

log = logging.getLogger(__name__)


@dataclass
class PrepareRun:
    """`headstart prepare`: conversations -> token rows with a loss mask."""

    target: TargetConfig = MISSING
    data: DataConfig = MISSING
    out: str = MISSING
    """Directory that receives rows.arrow and meta.json."""


def run(config: PrepareRun) -> None:
    """Render the conversations and write their rows, with an account of what was dropped."""
    conversations, account = load_conversations(config.data, need_answers=True)
    log.info("conversations: %s", account)
    target = load_target(config.target)
    template = ChatTemplate(target.tokenizer)
    meta = RowsMeta(target.fingerprint, template.hash, source_settings(config.data))
    writer = RowsWriter(Path(config.out), meta)
    done = {row.row_id for row in writer.rows}
    audit = Audit()
    for conversation in conversations:
        rows = template.rows(
            conversation.messages,
            row_id=conversation.prompt_id,
            category=conversation.category,
            max_length=config.data.max_length,
            audit=audit,
        )
        for row in rows:
            if row.row_id not in done:
                writer.add(row)
    if not audit.rows:
        writer.close()
        raise ValueError(f"data.path={config.data.path}: no row is usable: {audit.summary()}")
    writer.finish(audit.summary(), {"rows": audit.rows, "supervised_tokens": audit.supervised})
    log.info("%s: %s", config.out, audit.summary())
