"""A session: what all arms made of one group of prompts in one go; and what the repeats come to."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headstart.eval.engine.decode import Request
from headstart.eval.engine.records import Completion

Place = tuple[int, int]
"""Repeat and number of the group, both from 0."""


@dataclass(frozen=True)
class Turn:
    """One user turn, as every arm was asked it."""

    owner: str
    """Prompt id of its conversation; the request has an id of its own, for its draws."""
    request: Request


@dataclass(frozen=True)
class Session:
    """A group of prompts decoded by every arm: measured whole or not at all."""

    asked: list[list[Turn]]
    """By turn: the prompts of the group that came to it."""
    done: list[list[list[Completion]]]
    """By arm, by turn: the answers, in the order of `asked`."""
    unasked: dict[str, str] = field(default_factory=dict)
    """Prompts with a turn that could not be asked, with the reason."""


@dataclass
class Timed:
    """What was measured, turns in the order of the prompts and those of one prompt together."""

    turns: list[Turn]
    done: list[list[Completion]]
    """By arm: its answer to every turn, in the median repeat."""
    notes: list[list[str]]
    """By arm: what a reader of its figures must know."""

    @property
    def requests(self) -> list[Request]:
        """Every turn as a prompt of its own."""
        return [turn.request for turn in self.turns]

    def by_turn(self, arm: int) -> dict[str, list[Completion]]:
        """Return the answers of an arm to each prompt, turn by turn."""
        found: dict[str, list[Completion]] = {}
        for turn, completion in zip(self.turns, self.done[arm], strict=True):
            found.setdefault(turn.owner, []).append(completion)
        return found

    def prompts(self, arm: int) -> list[Completion]:
        """Return one completion a prompt, the turns of a conversation joined."""
        return [joined(owner, turns) for owner, turns in self.by_turn(arm).items()]


def joined(owner: str, turns: Sequence[Completion]) -> Completion:
    """Join the turns of one conversation: ids and rounds in order, times added up."""
    return replace(
        turns[-1],
        prompt_id=owner,
        token_ids=[token for turn in turns for token in turn.token_ids],
        turns=len(turns),
        prefill_seconds=sum(turn.prefill_seconds for turn in turns),
        seconds=sum(turn.seconds for turn in turns),
        latency=sum(turn.latency for turn in turns),
        rounds=[r for turn in turns for r in turn.rounds],
    )


def collect(
    sessions: Mapping[Place, Session], groups: Sequence[Sequence[Request]], repeats: int
) -> Timed:
    """Put the sessions together; of several repeats each arm's one of the median time counts."""
    repeated = [[sessions[r, g] for r in range(repeats)] for g in range(len(groups))]
    asked = [_in_order(group, of[0].asked) for group, of in zip(groups, repeated, strict=True)]
    turns = [
        of[0].asked[turn][place]
        for of, order in zip(repeated, asked, strict=True)
        for turn, place in order
    ]
    done, notes = [], []
    for arm in range(len(repeated[0][0].done)):
        chosen = [_median([session.done[arm] for session in of]) for of in repeated]
        done.append(
            [
                c[turn][place]
                for c, order in zip(chosen, asked, strict=True)
                for turn, place in order
            ]
        )
        notes.append(_unequal([[s.done[arm] for s in of] for of in repeated]))
    unasked = _unasked(of[0].unasked for of in repeated)
    return Timed(turns, done, [unasked + told for told in notes])


def _in_order(group: Sequence[Request], asked: list[list[Turn]]) -> list[tuple[int, int]]:
    """Return (turn, place in it) of everything asked, prompt by prompt."""
    places: dict[str, list[tuple[int, int]]] = {request.prompt_id: [] for request in group}
    for number, turns in enumerate(asked):
        for place, turn in enumerate(turns):
            places[turn.owner].append((number, place))
    return [place for of_prompt in places.values() for place in of_prompt]


def _median(repeats: list[list[list[Completion]]]) -> list[list[Completion]]:
    """Return the repeat of the median wall time (the lower middle one of an even number)."""
    return sorted(repeats, key=_seconds)[(len(repeats) - 1) // 2]


def _seconds(turns: list[list[Completion]]) -> float:
    return sum(completion.seconds for turn in turns for completion in turn)


def _ids(turns: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for turn in turns for completion in turn]


def _unequal(groups: list[list[list[list[Completion]]]]) -> list[str]:
    """Tell that repeats, which are asked and draw the same, gave other tokens."""
    differ = sum(any(_ids(r) != _ids(repeats[0]) for r in repeats) for repeats in groups)
    if not differ:
        return []
    return [
        f"the repeats of {differ} of {len(groups)} groups of prompts differ in their tokens: "
        "arithmetic here is not reproducible, or the drafts depend on earlier ones"
    ]


def _unasked(groups: Iterable[Mapping[str, str]]) -> list[str]:
    reasons = Counter(reason for unasked in groups for reason in unasked.values())
    if not reasons:
        return []
    told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return [f"later turns of {reasons.total()} prompts were not asked: {told}"]
