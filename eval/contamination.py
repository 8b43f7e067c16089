"""Evaluation prompts that a head saw in training: looked for before anything is measured.

Generated held-out prompts are apart from generated training prompts by construction, and share
whole sentences with them; so only prompts that came from a file are looked for.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headstart.data.audit_prompts import user_texts
from headstart.data.overlap import NGRAM, EvaluationPrompts, Overlap
from headstart.data.rows import Rows, read_rows, rows_hash
from headstart.data.template import ChatTemplate
from headstart.eval.arms import Arm
from headstart.eval.suites import Suite

log = logging.getLogger(__name__)
SHOWN = 3


def with_contamination(
    arms: Sequence[Arm], suite: Suite, template: ChatTemplate, given: Sequence[str]
) -> list[Arm]:
    """Return the arms, those noted whose training rows hold prompts of the suite.

    The rows of a head are the `given` ones of its own hash, else where it says that they were; a
    head that says nothing of its rows gets no note. Raises FileNotFoundError or ValueError for
    given rows that cannot be read.
    """
    if not suite.given:
        return list(arms)
    prompts = EvaluationPrompts(
        {
            r.prompt_id: suite.user_texts(r.prompt_id)
            for r in suite.requests
            if r.prompt_id in suite.given
        }
    )
    known = {}
    for directory in given:
        rows, _ = read_rows(Path(directory))
        known[rows_hash(rows)] = (directory, rows)
    told: dict[str, tuple[str, ...]] = {}
    noted = []
    for arm in arms:
        digest = arm.trained_on.get("rows_hash")
        if digest and digest not in told:
            told[digest] = _notes(arm.trained_on, known, prompts, template)
        noted.append(replace(arm, notes=(*arm.notes, *told.get(digest, ()))))
    return noted


def _notes(
    trained_on: Mapping[str, object],
    known: Mapping[str, tuple[str, Rows]],
    prompts: EvaluationPrompts,
    template: ChatTemplate,
) -> tuple[str, ...]:
    digest, path = trained_on["rows_hash"], trained_on.get("rows_path")
    if digest in known:
        return _overlap(*known[digest], prompts, template)
    if not path:
        return ()
    if not Path(str(path)).is_dir():
        return (f"training rows {path} are not there: whether they hold these prompts is unknown",)
    rows, _ = read_rows(Path(str(path)))
    if rows_hash(rows) != digest:
        return (
            f"training rows {path} have changed since the head was trained: whether they held "
            "these prompts is unknown",
        )
    return _overlap(str(path), rows, prompts, template)


def _overlap(
    directory: str, rows: Rows, prompts: EvaluationPrompts, template: ChatTemplate
) -> tuple[str, ...]:
    log.info("looking for the prompts in the %d training rows of %s", len(rows), directory)
    overlap = Overlap()
    for row in rows:
        overlap.see(prompts, user_texts(template, row.token_ids), row.row_id)
    some, mostly = overlap.prompts(prompts)
    if not some:
        return ()
    names = ", ".join((mostly or some)[:SHOWN])
    return (
        f"contamination: {len(some)} of {len(prompts.names)} prompts share a run of {NGRAM} words "
        f"(or all, if fewer) with the training rows {directory}, {len(mostly)} of them by four "
        f"fifths or more ({names}): acceptance on what was trained on is no forecast",
    )
