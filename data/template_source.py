"""What decides the ids of a chat: a tokenizer's whole state, and a template text without a clock.

A template that writes today's date would give another prompt every day: a run taken up tomorrow
would hold prompts that the target never answered. Such a date is held at one day.
"""

import datetime
import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

DAY = datetime.date(2024, 7, 26)
"""The day that templates write; the one that Llama 3's falls back to where there is no clock."""
_CLOCK = "strftime_now"
_TODAY = re.compile(_CLOCK + r"\(\s*(['\"])([^'\"]*)\1\s*\)")
_CALLED = re.compile(_CLOCK + r"\s*\(")
PER_CALL = ("truncation", "padding")
"""Parts of a tokenizer's state that every call sets anew."""


def without_clock(source: str, name: str) -> str:
    """Return the template text of tokenizer `name`, writing DAY where it would write today's date.

    Raises ValueError where a date's format is not a text inside the call.
    """
    fixed = _TODAY.sub(lambda call: json.dumps(DAY.strftime(call[2])), source)
    if _CALLED.search(fixed):
        raise ValueError(
            f"{name}: the chat template calls {_CLOCK} with something else than a text, so its "
            "date cannot be held fixed; write the format into the call, or the date itself"
        )
    return fixed


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return as plain data all that decides how a tokenizer splits a text: merges and rules too.

    A tokenizer that is not of the `tokenizers` library is known by its vocabulary alone.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return sorted(tokenizer.get_vocab().items())
    state = json.loads(backend.to_str())
    return {name: value for name, value in state.items() if name not in PER_CALL}
