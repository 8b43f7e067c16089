"""Render conversations into rows, in this process or in several, always in the order they came.

Every worker has a pipe of its own and at most one chunk in hand: it is given the next one only
after its answer was taken. So no two can wait for each other, memory stays bounded, and the end of
either side is the end of the pipe to the other: a dead worker is an error, and workers whose parent
died end by themselves.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from headstart.data.audit import Audit
from headstart.data.audit_prompts import texts_of_row
from headstart.data.conversations import Conversation
from headstart.data.notes import Note, about
from headstart.data.rows import check_rows
from headstart.data.template import ChatTemplate, cut_row
from headstart.data.token_row import TokenRow

CHUNK = 64
"""Conversations rendered at a time."""
ALONE = 2048
"""Conversations rendered here before workers are worth the seconds that they take to start."""
PATIENCE = 5.0
"""Seconds for a worker to end by itself."""


@dataclass(frozen=True)
class Renderer:
    """What turns conversations into rows; it travels to every worker once."""

    template: ChatTemplate
    max_length: int
    vocab_size: int
    """Rows that came tokenised must keep below it."""
    empty: Audit
    """What the account of every chunk starts from."""

    def __call__(self, conversations: Sequence[Conversation]) -> "Rendered":
        """Render one chunk. Raises ValueError for a tokenised row that is not the target's."""
        audit, rows, notes = self.empty.empty(), [], []
        for conversation in conversations:
            audit.listener = about(conversation, notes.append)
            rows += self._rows(conversation, audit)
        audit.listener = None
        audit.prompts = None  # the same for every chunk, and large: it need not travel back
        return Rendered(rows, notes, audit)

    def _rows(self, conversation: Conversation, audit: Audit) -> list[TokenRow]:
        if conversation.tokens is None:
            return self.template.offering(conversation.tools).rows(
                conversation.messages,
                row_id=conversation.prompt_id,
                category=conversation.category,
                max_length=self.max_length,
                audit=audit,
                stop_reason=conversation.stop_reason,
            )
        given = conversation.tokens
        check_rows([given], self.vocab_size)
        audit.see_tokens(lambda: texts_of_row(self.template, given.token_ids), given.row_id)
        row = cut_row(given, self.max_length, audit)
        return [] if row is None else [row]


@dataclass
class Rendered:
    """The rows of one chunk and the account of it."""

    rows: list[TokenRow]
    notes: list[Note]
    """Conversations of which a row was dropped or repaired."""
    audit: Audit


def usable_cpus() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def render_all(
    conversations: Iterable[Conversation], renderer: Renderer, *, workers: int
) -> Iterator[Rendered]:
    """Yield the chunks of all conversations, rendered by `workers` processes (1: by this one).

    What is yielded does not depend on `workers`. Raises RuntimeError when a worker dies.
    """
    chunks = _chunks(conversations)
    here = None if workers == 1 else ALONE // CHUNK
    yield from map(renderer, islice(chunks, here))
    for first in islice(chunks, 1):
        with _started(workers, renderer) as idle:
            yield from _shared_out(chain([first], chunks), idle)


def _shared_out(chunks: Iterable[list[Conversation]], idle: "list[_Worker]") -> Iterator[Rendered]:
    busy: deque[_Worker] = deque()
    for chunk in chunks:
        if idle:
            worker, done = idle.pop(), None
        else:
            worker = busy.popleft()  # the oldest chunk: answers keep their order
            done = worker.take()
        worker.give(chunk)
        busy.append(worker)
        if done is not None:
            yield done
    while busy:
        yield busy.popleft().take()


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection

    def give(self, chunk: list[Conversation]) -> None:
        try:
            self.pipe.send(chunk)
        except OSError:
            raise self._lost() from None

    def take(self) -> Rendered:
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):  # OSError: in the middle of an answer
            raise self._lost() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _lost(self) -> RuntimeError:
        self.process.join(PATIENCE)
        code = self.process.exitcode
        how = f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by signal {-code} ({signal.Signals(-code).name})"
        return RuntimeError(
            f"a rendering process ended {how}; run the same command again to go on from the rows "
            "that are written, with a smaller workers=N if memory ran out"
        )


@contextmanager
def _started(count: int, renderer: Renderer) -> Iterator[list[_Worker]]:
    # Not fork: tokenizers and torch hold threads and locks, which a forked child inherits held.
    context = multiprocessing.get_context("spawn")
    workers: list[_Worker] = []
    try:
        with _interrupts_held():
            for _ in range(count):
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(there, renderer), daemon=True)
                workers.append(_Worker(process, here))
                process.start()
                there.close()  # so that the pipe ends when the worker does
        yield workers.copy()
    finally:
        for worker in workers:
            worker.pipe.close()
        for worker in workers:
            _end(worker.process)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let processes that start here ignore Ctrl-C for good: their parent tells them to end."""
    resource_tracker.ensure_running()  # now: starting with the first process, it lets SIGINT in
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: BaseProcess) -> None:
    if process.pid is None:  # it never started
        return
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()


def _serve(pipe: Connection, renderer: Renderer) -> None:
    """Answer every chunk until the pipe ends (the life of a worker)."""
    try:
        while True:
            chunk = pipe.recv()
            try:
                answer: Rendered | Exception = renderer(chunk)
            except Exception as error:  # raised again by the parent
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        return


def _chunks(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    iterator = iter(conversations)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk
