"""The timing protocol: arms take turns prompt by prompt, after warm-up, the median repeat counts.

The order of the arms rotates, so that a machine that slows down slows all of them alike. What they
make of one group of prompts is a session, measured in one go or not at all: plain and drafted times
always belong together, in a run that was taken up again too.

Every arm is asked the same turns. A later turn of a conversation is rendered from the plain arm's
answers, for all arms: in fp32 greedy decoding their own would be the same; in half precision, or
sampled, they need not be, and the later turns would then compare the arms on different prompts.
"""

import contextlib
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

from tqdm import tqdm

from headstart.data.answering import Answer
from headstart.data.dialogue import Dialogue
from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import Drafter
from headstart.eval.engine.policy import DraftPolicy
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.sessions import Place, Session, Timed, Turn, collect
from headstart.eval.suites import Suite
from headstart.heads.target import Target

log = logging.getLogger(__name__)
WARMUP_TOKENS = 8
PLAIN = 0
"""Place of the plain arm among the drafters."""


@dataclass(frozen=True)
class Runner:
    """Decodes groups of prompts with any drafter, all under the same conditions."""

    target: Target
    sampling: SamplingConfig
    stop_ids: tuple[int, ...]
    batch_size: int
    max_pass_tokens: int | None = None
    """Most tokens that a pass reads, in every arm; null for no bound."""
    policies: Mapping[int, DraftPolicy] = field(default_factory=dict)
    """How deep drafters draft, by the id of each; the others as deep as they go."""

    def warm_up(
        self, drafters: Sequence[Drafter], requests: Sequence[Request], prompts: int
    ) -> None:
        """Decode the first tokens of a few prompts with every drafter; nothing is recorded.

        A whole batch at least: what a compiled runtime makes for many rows is made here. A drafter
        under a policy decodes them to the end: what is measured is a policy that knows the machine
        and the drafter, as after the first minute of a server.
        """
        whole = requests[: max(prompts, self.batch_size)]
        short = [replace(r, max_new_tokens=min(r.max_new_tokens, WARMUP_TOKENS)) for r in whole]
        for drafter in drafters:
            chosen = whole if id(drafter) in self.policies else short
            for group in _groups(chosen, self.batch_size):
                self.decode(drafter, group)

    def clock(self) -> contextlib.AbstractContextManager[None]:
        """Count what is compiled or recorded inside as late: its time is in the figures."""
        compiled = self.target.compiled
        return contextlib.nullcontext() if compiled is None else compiled.clock()

    def timed(
        self,
        drafters: Sequence[Drafter],
        suite: Suite,
        repeats: int,
        *,
        warmup_prompts: int,
        sessions: MutableMapping[Place, Session] | None = None,
    ) -> Timed:
        """Decode the suite with every drafter, of which the first drafts nothing.

        Sessions that are there already are not measured again; new ones are added as they come.
        """
        sessions = {} if sessions is None else sessions
        groups = _groups(suite.requests, self.batch_size)
        places = [(repeat, number) for repeat in range(repeats) for number in range(len(groups))]
        if not all(place in sessions for place in places):
            self.warm_up(drafters, suite.requests, warmup_prompts)
        with self.clock(), _Progress(repeats * len(drafters) * suite.num_turns) as progress:
            for repeat, number in places:
                if number == 0:  # a drafter that remembers answers would replay them
                    for drafter in drafters:
                        drafter.clear()
                if (repeat, number) in sessions:
                    progress.know(sessions[repeat, number])
                    _remember(drafters, sessions[repeat, number])
                    continue
                order = _rotated(len(drafters), repeat + number)
                first = sessions.get((0, number))
                session = self._session(drafters, order, groups[number], suite, first, progress)
                sessions[repeat, number] = session
        return collect(sessions, groups, repeats)

    def _session(
        self,
        drafters: Sequence[Drafter],
        order: Sequence[int],
        group: Sequence[Request],
        suite: Suite,
        first: Session | None,
        progress: "_Progress",
    ) -> Session:
        """Ask a group turn by turn, and in a later repeat what its `first` session was asked."""
        context = self.target.shape.max_positions
        dialogues = [suite.dialogue(request, context) for request in group] if not first else []
        open_dialogues = {d.conversation.prompt_id: d for d in dialogues if d is not None}
        session = Session([], [[] for _ in drafters], dict(first.unasked) if first else {})
        turns = [Turn(request.prompt_id, request) for request in group]
        while turns:
            session.asked.append(turns)
            for arm in order:
                answers = self.decode(drafters[arm], [turn.request for turn in turns])
                session.done[arm].append(answers)
                progress.add(answers)
            if first is None:
                turns = _next_turns(open_dialogues, turns, session.done[PLAIN][-1])
            else:
                turns = [*first.asked, []][len(session.asked)]
        for owner, dialogue in open_dialogues.items():
            if dialogue.ended:
                # Its room is the target's context here, and no option.
                session.unasked[owner] = dialogue.ended.removesuffix(" (data.max_length)")
        return session

    def decode(self, drafter: Drafter, group: Sequence[Request]) -> list[Completion]:
        """Decode one group; return its completions in order, sharing its wall time.

        A group larger than the batch waits for rows that end.
        """
        completions = decode(
            self.target,
            drafter,
            group,
            sampling=self.sampling,
            stop_ids=self.stop_ids,
            batch_size=self.batch_size,
            policy=self.policies.get(id(drafter)),
            max_pass_tokens=self.max_pass_tokens,
        )
        done = {completion.prompt_id: completion for completion in completions}
        return _share([done[request.prompt_id] for request in group])


class _Progress:
    """The bar: answers of all arms, those of sessions that were there included."""

    def __init__(self, answers: int) -> None:
        self._bar = tqdm(total=answers, desc="evaluating", unit="answer", mininterval=1.0)
        self._tokens, self._seconds = 0, 0.0

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def know(self, session: Session) -> None:
        """Count a session that was measured earlier."""
        self._bar.initial += sum(len(turn) for turns in session.done for turn in turns)
        self._bar.n = self._bar.initial

    def add(self, answers: Sequence[Completion]) -> None:
        """Count answers and show the speed of all arms together."""
        self._tokens += sum(len(c.token_ids) for c in answers)
        self._seconds += sum(c.seconds for c in answers)
        self._bar.set_postfix_str(f"{self._tokens / self._seconds:.1f} tokens/s", refresh=False)
        self._bar.update(len(answers))


def _remember(drafters: Sequence[Drafter], session: Session) -> None:
    """Show a session of an earlier run to drafters that learn from answers, as if just decoded."""
    for drafter, turns in zip(drafters, session.done, strict=True):
        for completion in (c for turn in turns for c in turn):
            drafter.finish(0, completion.token_ids)


def _next_turns(
    dialogues: dict[str, Dialogue], turns: Sequence[Turn], answers: Sequence[Completion]
) -> list[Turn]:
    """Give the dialogues their answers and return what they ask next."""
    following = []
    for turn, answer in zip(turns, answers, strict=True):
        dialogue = dialogues.get(turn.owner)
        if dialogue is None:
            continue
        dialogue.take(Answer(answer.prompt_id, answer.token_ids, answer.stop_reason))
        if dialogue.ask is not None:
            ask = dialogue.ask
            # The dialogue has cut the limit to the room there is; decoding does so too, and says.
            request = Request(ask.prompt_id, ask.token_ids, turn.request.max_new_tokens)
            following.append(Turn(turn.owner, request))
    return following


def _groups(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def _rotated(count: int, by: int) -> list[int]:
    return [(by + i) % count for i in range(count)]


def _share(group: list[Completion]) -> list[Completion]:
    """Share the wall time of a group equally, and each round's among the rows that were in it.

    What the rows of a group add up to is then what the group took, as it is for single prompts.
    """
    wall = max(c.waited + c.seconds for c in group)
    return [
        replace(
            c,
            seconds=wall / len(group),
            latency=c.seconds,
            rounds=[
                replace(
                    r,
                    t_draft=r.t_draft / r.rows,
                    t_verify=r.t_verify / r.rows,
                    t_commit=r.t_commit / r.rows,
                )
                for r in c.rounds
            ],
        )
        for c in group
    ]
