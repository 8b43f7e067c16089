"""Show rows as they are trained on: `headstart prepare show=3` colours the supervised tokens."""

from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from headstart.data.token_row import TokenRow

SUPERVISED, GIVEN = "bold black on green", "dim"
BRACKETS = ("[[", "]]")
"""Written around supervised text where there are no colours, a file say."""


def segments(row: TokenRow, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Return the row's text in runs, each with whether it is supervised.

    Special tokens are written out; control characters other than newline and tab are escaped, so
    that a row cannot steer the terminal that shows it.
    """
    pairs = zip(row.token_ids, row.loss_mask, strict=True)
    return [
        (_visible(tokenizer.decode([token for token, _ in run])), bool(on))
        for on, run in groupby(pairs, key=lambda pair: pair[1])
    ]


def row_text(row: TokenRow, tokenizer: PreTrainedTokenizerBase, *, coloured: bool = True) -> Text:
    """Return one row as text, its supervised runs coloured, or in double brackets without."""
    left, right = ("", "") if coloured else BRACKETS
    text = Text()
    for run, supervised in segments(row, tokenizer):
        if supervised:
            text.append(f"{left}{run}{right}", SUPERVISED)
        else:
            text.append(run, GIVEN)
    return text


def title(row: TokenRow) -> str:
    """Return one line on a row: its id and how much of it is supervised."""
    share = 100 * row.coverage
    text = f"{row.row_id} ({row.category}): {row.supervised} of {len(row.token_ids)} tokens "
    text += f"supervised ({share:.0f} %)"
    return text + (f", stopped by {row.stop_reason}" if row.stop_reason else "")


def show_rows(
    rows: Iterable[TokenRow], tokenizer: PreTrainedTokenizerBase, console: Console | None = None
) -> None:
    """Print rows with their supervised tokens coloured."""
    console = console or Console(highlight=False)
    coloured = console.color_system is not None
    for row in rows:
        console.rule(Text(title(row)))
        console.print(row_text(row, tokenizer, coloured=coloured), soft_wrap=True)


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
