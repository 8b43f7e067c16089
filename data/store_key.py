"""What makes the features of a store: one field for each thing that would change them.

Fields stand in the order of cause: another template also changes the rows, and is named first.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from headstart.data.rows import RowsMeta, rows_hash
from headstart.data.template import TokenRow
from headstart.heads.target import AUX_CONVENTION, Target

AUX = "aux_features"


def capture_key(
    target: Target,
    rows: Iterable[TokenRow],
    meta: RowsMeta,
    taps: Sequence[int] = (),
    *,
    stored_as: str | None = None,
) -> dict[str, Any]:
    """Return everything that changes the features of rows.

    A reader that takes them in whatever type they are stored leaves out `stored_as`.
    """
    key = {
        "target_fingerprint": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "aux_convention": AUX_CONVENTION,
        AUX: sorted(set(taps)),
        "template_hash": meta.template_hash,
        "max_length": meta.settings.get("data.max_length"),
        "rows_hash": rows_hash(rows),
    }
    return key if stored_as is None else key | {"stored_as": stored_as}


def refuse_other(
    have: dict[str, Any], want: dict[str, Any], *, what: str, cure: str, more_taps: bool = False
) -> None:
    """Raise ValueError naming the first field in which a store was made otherwise.

    With more_taps a store may hold more tapped states than are wanted, never fewer.
    """
    for name, value in want.items():
        stored = have.get(name)
        if name == AUX and more_taps and set(value) <= set(stored):
            continue
        if stored != value:
            raise ValueError(
                f"{what}: made with {name}={stored}, this run has {name}={value}; {cure}"
            )
