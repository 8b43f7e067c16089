"""What decoding records: one Round a target pass that verified a draft, one Completion a prompt.

The first token of every turn comes from prefill and belongs to no round, so
`len(token_ids) == turns + sum(round.emitted)`.
"""

from dataclasses import dataclass, field


@dataclass
class Round:
    """Counts and seconds of one target pass over one draft."""

    accepted: int
    """Drafted tokens kept and emitted; neither the root nor the bonus token counts."""
    emitted: int
    """Tokens added to the output: accepted + 1, or accepted when the round was cut."""
    drafted: int
    """Drafted nodes, root excluded."""
    depth_max: int
    """Deepest drafted depth, counted from 1; 0 when nothing was drafted."""
    verified: int
    """Nodes the target computed: drafted + 1."""
    stop: str
    """'rejected' (children existed, none accepted), 'leaf' (no child to try) or 'cut' (a stop
    token, stop string or limit fell inside the accepted path or before the bonus token)."""
    t_draft: float = 0.0
    """Seconds spent proposing."""
    t_verify: float = 0.0
    """Seconds of the target pass."""
    t_commit: float = 0.0
    """Seconds of acceptance, cache moves and the drafter's refresh."""
    places: list[int] = field(default_factory=list)
    """Place of every accepted token among the siblings offered with it, 0 the first tried."""
    offered: list[int] = field(default_factory=list)
    """Children offered at the root and at every accepted node in turn; where a round was cut, the
    node behind the last kept token is left out: nobody knows what it would have accepted."""
    rows: int = 1
    """Rows that the pass verified together: the seconds above were spent on all of them."""


@dataclass
class Completion:
    """One prompt's output; a conversation of several turns is one completion."""

    prompt_id: str
    token_ids: list[int]
    """All new tokens, turn after turn, trimmed after the stop token."""
    stop_reason: str
    """'stop', 'length' or 'context'."""
    turns: int = 1
    prefill_seconds: float = 0.0
    """Summed over turns."""
    seconds: float = 0.0
    """Wall time, prefill included."""
    latency: float = 0.0
    """Wall time where `seconds` is the prompt's share of a group's; 0 where they are the same."""
    waited: float = 0.0
    """Seconds before a row was free for it; wall time does not hold them."""
    rounds: list[Round] = field(default_factory=list)
