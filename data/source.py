"""Where prompts and conversations come from: our generator, or sources of a user's own.

Sources are read row by row and in turn, so that a limit on the whole takes evenly from each; with
weights they are mixed in that proportion, by the seed, until one of them has no more.
"""

import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, islice
from random import Random
from typing import Any, TypeVar

from headstart.data.conversations import Account, Conversation, Listener, Place
from headstart.data.ids import IdSet
from headstart.data.prompts import generate_prompts, split_of
from headstart.data.readers import FORMATS, RowDataset, RowFiles, open_rows
from headstart.data.schemas import BadRow, parse_row

Rows = RowFiles | RowDataset
T = TypeVar("T")
REPEATED = "with a repeated id"


@dataclass
class SourceConfig:
    """One of several sources: {path: chats.jsonl.gz, weight: 3, limit: 10000}."""

    path: str = ""
    """File, directory or glob (JSON Lines, plain, .gz or .zst; Parquet), or Hugging Face dataset,
    by its name or the directory it was saved in."""
    weight: float | None = None
    """Share of the mixture, relative to the other sources' weights; null takes every row."""
    limit: int | None = None
    """Most conversations taken of this source; null means all."""
    format: str = "auto"
    """auto (by the name), jsonl, parquet or dataset."""
    subset: str | None = None
    """Configuration of a Hugging Face dataset."""
    dataset_split: str = "train"
    """Split of a Hugging Face dataset, such as train_sft."""
    revision: str | None = None
    """Revision of a dataset on the Hub; null means its default branch."""
    streaming: bool = False
    """Read a Hugging Face dataset as it arrives instead of downloading it first."""


@dataclass
class DataConfig:
    """Prompts (for generation) or conversations (for training on given answers)."""

    path: str | None = None
    """The one source, as in data.sources; null makes prompts with the built-in generator."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Several sources: 'data.sources=[{path:a.jsonl,weight:3},{path:b/*.parquet,weight:1}]'."""
    num_prompts: int | None = 400
    """Prompts taken, after the split; null takes all there are."""
    seed: int = 0
    """Seed of the prompt generator and of the mixture."""
    split: str = "train"
    """train, heldout (one text in eight, by a hash of the first user turn) or all (files only)."""
    max_length: int = 1024
    """Longest row in tokens, prompt and answer together."""

    def __post_init__(self) -> None:
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError(f"data.num_prompts={self.num_prompts}: need at least one, or null")
        if self.split not in ("train", "heldout", "all"):
            raise ValueError(f"data.split={self.split}: expected train, heldout or all")
        if self.max_length < 2:
            raise ValueError(f"data.max_length={self.max_length}: need at least 2 tokens")
        if self.sources:
            _check_sources(self.path, self.sources)
        elif self.path is None and (self.split == "all" or self.num_prompts is None):
            raise ValueError(
                "data.path is not set: give data=jsonl data.path=FILE, or data=synthetic with "
                "data.num_prompts and data.split=train or heldout"
            )

    @property
    def generated(self) -> bool:
        """Whether the prompts come from our own generator."""
        return self.path is None and not self.sources

    @property
    def label(self) -> str:
        """What the data is called in messages."""
        if self.sources:
            return f"data.sources=[{', '.join(source.path for source in self.sources)}]"
        return "generated prompts" if self.path is None else f"data.path={self.path}"


def iter_conversations(
    config: DataConfig, *, need_answers: bool, account: Account
) -> Iterator[Conversation]:
    """Yield the conversations of the configured split, in one order for one config.

    Every row read is counted in `account`. Memory does not grow with the data, save for 16 to 32
    bytes an id. Raises FileNotFoundError for a missing file, and ValueError, after the last row,
    when none was usable or none fell into the split.
    """
    if config.generated:
        yield from _generated(config, need_answers)
        return
    opened = open_sources(config)
    account.name_files |= len(opened) > 1 or len(getattr(opened[0][1], "files", ())) > 1
    ids, streams = IdSet(), []
    names = _source_names([rows.label for _, rows in opened])
    for number, (source, rows) in enumerate(opened, start=1):
        prefix = f"{number}-" if len(opened) > 1 else ""
        account.left_out += getattr(rows, "left_out", ())
        found = _usable(rows, prefix, ids, need_answers, account)
        chosen = (c for c in found if config.split in ("all", split_of(first_user_text(c))))
        streams.append(_counted(islice(chosen, source.limit), names[number - 1], account))
    weights = [source.weight for source, _ in opened]
    if None in weights:
        mixture = in_turn(streams)
    else:
        mixture = mixed(streams, weights, seed=config.seed, names=names, account=account)
    yield from islice(mixture, config.num_prompts)
    if not account.taken:
        raise ValueError(_nothing(config, account))


def load_conversations(
    config: DataConfig, *, need_answers: bool, listener: Listener | None = None
) -> tuple[list[Conversation], str]:
    """Return what `iter_conversations` yields and one line on what was dropped."""
    account = Account(listener=listener)
    kept = list(iter_conversations(config, need_answers=need_answers, account=account))
    if config.generated:
        return kept, f"{len(kept)} generated prompts"
    return kept, f"{account.summary()}; {len(kept)} taken (split {config.split})"


def read_conversations(
    path: str, *, need_answers: bool, option: str = "data.path"
) -> tuple[list[Conversation], Account]:
    """Read the conversations of one path and account for every row.

    See `parse_row` for what `need_answers` changes. Blank lines are not rows. Raises
    FileNotFoundError when there is no such file and ValueError when no row is usable; both name
    `option`, the setting that gave the path.
    """
    rows, account = open_rows(str(path), option=option), Account()
    account.name_files = len(getattr(rows, "files", ())) > 1
    found = list(_usable(rows, "", IdSet(), need_answers, account))
    if not found:
        raise ValueError(f"{option}={path}: {_no_usable_row(account)}")
    return found, account


def open_sources(config: DataConfig) -> list[tuple[SourceConfig, Rows]]:
    """Find every source, in the order given. Raises as `open_rows` does."""
    named = [(f"data.sources[{i}].path", source) for i, source in enumerate(config.sources)]
    if config.path is not None:
        named = [("data.path", SourceConfig(path=config.path))]
    return [
        (
            source,
            open_rows(
                source.path,
                option=option,
                format=source.format,
                subset=source.subset,
                split=source.dataset_split,
                revision=source.revision,
                streaming=source.streaming,
            ),
        )
        for option, source in named
    ]


def expected_rows(config: DataConfig) -> int | None:
    """Return how many rows a whole read meets, or None where that is not known beforehand."""
    opened = [] if config.generated else open_sources(config)
    partial = any(s.limit is not None or s.weight is not None for s, _ in opened)
    if not opened or partial or config.num_prompts is not None:
        return None
    counts = [rows.count() for _, rows in opened]
    return None if None in counts else sum(counts)


def source_settings(config: DataConfig) -> dict[str, Any]:
    """Return what identifies the data: the options, and a hash of every source's content."""
    settings = {f"data.{n}": v for n, v in vars(config).items() if n != "sources"}
    if config.sources:
        chosen = [asdict(source) for source in config.sources]
        for source in chosen:
            del source["streaming"]  # the same rows, by another road
        settings["data.sources"] = chosen
    digests = [] if config.generated else [rows.digest() for _, rows in open_sources(config)]
    return settings | {"data.file_hash": "-".join(digests) or None}


def first_user_text(conversation: Conversation) -> str:
    """Return the text that decides a conversation's split; of a tokenised row, its prompt."""
    if conversation.tokens is not None:
        prompt = conversation.tokens.token_ids[: conversation.tokens.loss_mask.index(1)]
        return " ".join(map(str, prompt))
    return next((m["content"] for m in conversation.messages if m["role"] == "user"), "")


def in_turn(streams: Sequence[Iterator[T]]) -> Iterator[T]:
    """Take one item of every stream in turn; a stream that ends is passed over from then on."""
    open_streams = list(streams)
    while open_streams:
        still_open = []
        for stream in open_streams:
            for item in islice(stream, 1):
                still_open.append(stream)
                yield item
        open_streams = still_open


def mixed(
    streams: Sequence[Iterator[T]],
    weights: Sequence[float],
    *,
    seed: int,
    names: Sequence[str],
    account: Account,
) -> Iterator[T]:
    """Draw every item from a stream chosen by weight, until the chosen one has no more.

    Stopping there keeps the proportions; which stream it was is noted in `account`.
    """
    random, edges = Random(seed), list(accumulate(weights))
    while True:
        chosen = min(bisect_right(edges, random.random() * edges[-1]), len(edges) - 1)
        for item in islice(streams[chosen], 1):
            yield item
            break
        else:
            account.ended_by = names[chosen]
            return


def _usable(
    rows: Rows, prefix: str, ids: IdSet, need_answers: bool, account: Account
) -> Iterator[Conversation]:
    for place, default_id, row in rows.rows():
        try:
            if isinstance(row, BadRow):
                raise row
            conversation, repairs = parse_row(
                row, default_id=f"{prefix}{default_id}", need_answers=need_answers
            )
        except BadRow as bad:
            account.drop(place, str(bad))
            continue
        name = ids.unique(conversation.prompt_id, f"{place.unit}{place.number}")
        if name != conversation.prompt_id:
            repairs.append(REPEATED)
        conversation = _placed(conversation, name, place)
        account.keep(place, repairs)
        yield conversation


def _placed(conversation: Conversation, name: str, place: Place) -> Conversation:
    tokens = conversation.tokens
    if tokens is not None:
        tokens.row_id = name
    return replace(conversation, prompt_id=name, place=place)


def _source_names(labels: list[str]) -> list[str]:
    """Tell sources apart that have one path, two splits of a dataset say."""
    return [
        label if labels.count(label) == 1 else f"{label} (data.sources[{i}])"
        for i, label in enumerate(labels)
    ]


def _counted(
    stream: Iterator[Conversation], label: str, account: Account
) -> Iterator[Conversation]:
    for conversation in stream:
        account.taken[label] += 1
        yield conversation


def _generated(config: DataConfig, need_answers: bool) -> Iterator[Conversation]:
    if need_answers:
        raise ValueError("data.path=null: generated prompts have no answers; use generate")
    for prompt in generate_prompts(config.num_prompts, seed=config.seed, split=config.split):
        yield Conversation(prompt.prompt_id, prompt.family, prompt.messages)


def _nothing(config: DataConfig, account: Account) -> str:
    if account.ended_by is not None:
        return (
            f"{config.label}: the weighted mixture ended at once, as {account.ended_by} has no "
            f"usable row in data.split={config.split} ({account.summary()}); fix or remove it"
        )
    if not account.kept:
        return f"{config.label}: {_no_usable_row(account)}"
    return (
        f"{config.label}: no conversation in data.split={config.split} "
        f"({account.kept} usable); use data.split=all"
    )


def _no_usable_row(account: Account) -> str:
    return f"no usable row, {account.summary()}; fix or replace the file"


def _check_sources(path: str | None, sources: Sequence[SourceConfig]) -> None:
    if path is not None:
        raise ValueError(f"data.path={path}: data.sources is given too; keep one of them")
    for number, source in enumerate(sources):
        name = f"data.sources[{number}]"
        if not source.path:
            raise ValueError(f"{name}.path is not set: give every source a path")
        if source.weight is not None and not 0 < source.weight < float("inf"):
            raise ValueError(f"{name}.weight={source.weight}: need more than 0, or null")
        if source.limit is not None and source.limit < 1:
            raise ValueError(f"{name}.limit={source.limit}: need at least one, or null")
        if source.format not in FORMATS:
            raise ValueError(f"{name}.format={source.format}: expected one of {', '.join(FORMATS)}")
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        lacking = weighted.index(False)
        raise ValueError(
            f"data.sources[{lacking}].weight=null: other sources have weights; give one to each "
            "or to none"
        )
    if weighted == [True]:
        warnings.warn(
            "data.sources[0].weight has no effect: there is no other source to mix with",
            stacklevel=3,
        )
