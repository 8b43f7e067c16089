"""Where prompts and conversations come from: our generator, or a user's JSON Lines file."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from headstart.data.conversations import Conversation, read_conversations
from headstart.data.prompts import generate_prompts, split_of


@dataclass
class DataConfig:
    """Prompts (for generation) or conversations (for training on given answers)."""

    path: str | None = None
    """JSON Lines file; null makes prompts with the built-in generator."""
    num_prompts: int | None = 400
    """Prompts taken, after the split; null takes all of a file."""
    seed: int = 0
    """Seed of the prompt generator."""
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
        if self.path is None and (self.split == "all" or self.num_prompts is None):
            raise ValueError(
                "data.path is not set: give data=jsonl data.path=FILE, or data=synthetic with "
                "data.num_prompts and data.split=train or heldout"
            )


def load_conversations(config: DataConfig, *, need_answers: bool) -> tuple[list[Conversation], str]:
    """Return the conversations of the configured split and one line on what was dropped.

    Raises FileNotFoundError for a missing file, ValueError when nothing is left.
    """
    if config.path is None:
        if need_answers:
            raise ValueError("data.path=null: generated prompts have no answers; use generate")
        prompts = generate_prompts(config.num_prompts, seed=config.seed, split=config.split)
        made = [Conversation(p.prompt_id, p.family, p.messages) for p in prompts]
        return made, f"{len(made)} generated prompts"
    found, dropped = read_conversations(config.path, need_answers=need_answers)
    kept = [c for c in found if config.split in ("all", split_of(first_user_text(c)))]
    kept = kept[: config.num_prompts]
    if not kept:
        raise ValueError(
            f"{config.path}: no conversation in data.split={config.split} "
            f"({len(found)} usable); use data.split=all"
        )
    return kept, f"{dropped.summary()}; {len(kept)} taken (split {config.split})"


def first_user_text(conversation: Conversation) -> str:
    """Return the text that decides a conversation's split."""
    return next((m["content"] for m in conversation.messages if m["role"] == "user"), "")


def source_settings(config: DataConfig) -> dict[str, str | int | None]:
    """Return what identifies the data: the options and, for a file, a hash of its content."""
    digest = None
    if config.path is not None:
        path = Path(config.path)
        if not path.is_file():
            raise FileNotFoundError(f"data.path={config.path}: no such file")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return {f"data.{name}": value for name, value in vars(config).items()} | {
        "data.file_hash": digest
    }
