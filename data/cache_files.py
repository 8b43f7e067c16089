"""The files in which speculators stores hidden states, read as rows and states.

Two layouts: a dataset on disk with hidden_states/hs_I.safetensors for its row I, and the older
data_I.pt, which hold the tokens too. The states are the tapped ones and, last, the output of the
last layer BEFORE the final norm. Which layers were tapped stands in neither.
Shapes: T tokens, A tapped states, D width.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import datasets
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

STATES = "hidden_states"
DATASET_FILE = "state.json"  # what datasets.save_to_disk leaves beside the Arrow files


@dataclass
class CachedRows:
    """The rows of a cache; row i's states are read when they are asked for."""

    directory: Path
    files: list[Path]
    table: Any = None
    """The dataset with input_ids and loss_mask; None where each file holds its own."""

    def tokens(self, index: int) -> tuple[list[int], list[int]]:
        """Return a row's token ids and its loss mask. Raises ValueError naming the file."""
        path = self.files[index]
        held = self._read(path) if self.table is None else self.table[index]
        try:
            ids, mask = list(map(int, held["input_ids"])), list(map(int, held["loss_mask"]))
        except KeyError as error:
            raise ValueError(f"{path}: has no {error}; make the cache again") from error
        if len(ids) != len(mask):
            raise ValueError(f"{path}: {len(ids)} tokens, a loss mask of {len(mask)}")
        return ids, mask

    def states(self, index: int) -> list[Tensor]:
        """Return a row's states, each [T, D]: the tapped ones, and the pre-norm last one.

        Raises ValueError naming the file when the states are not those of the row's tokens.
        """
        path = self.files[index]
        held = self._read(path)
        ids, _ = self.tokens(index)
        stored = held.get("token_ids", held.get("input_ids"))
        if stored is None or stored.tolist() != ids:
            raise ValueError(f"{path}: holds other tokens than row {index} of {self.directory}")
        if STATES not in held:
            raise ValueError(f"{path}: has no {STATES}; make the cache again")
        states = _apart(held[STATES], held.get(f"{STATES}_scales"))
        for state_TD in states:
            if state_TD.dim() != 2 or len(state_TD) != len(ids):
                raise ValueError(f"{path}: states {tuple(state_TD.shape)} for {len(ids)} tokens")
        return states

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            if path.suffix == ".pt":  # weights_only: nothing in the file is run
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            return load_file(path)
        except (SafetensorError, UnpicklingError, RuntimeError, OSError, EOFError) as error:
            raise ValueError(f"{path}: damaged ({error}); make the cache again") from error


def read_cache(directory: Path) -> CachedRows:
    """Return the rows of a cache.

    Raises FileNotFoundError for a directory with neither layout, or with a dataset whose states are
    missing for some row.
    """
    directory = Path(directory)
    if (directory / DATASET_FILE).is_file():
        table = datasets.load_from_disk(str(directory))
        files = [directory / STATES / f"hs_{i}.safetensors" for i in range(len(table))]
        gone = next((path for path in files if not path.is_file()), None)
        if gone is not None:
            raise FileNotFoundError(f"{gone}: no such file; the cache lacks the states of a row")
        return CachedRows(directory, files, table)
    files = sorted(directory.rglob("data_*.pt"), key=lambda path: (path.parent, _number(path)))
    if not files:
        raise FileNotFoundError(
            f"cache={directory}: neither a dataset with {STATES}/hs_I.safetensors nor data_I.pt"
        )
    return CachedRows(directory, files)


def _number(path: Path) -> int:
    found = re.fullmatch(r"data_(\d+)", path.stem)
    if found is None:
        raise ValueError(f"{path}: expected data_I.pt, I a number; move the file elsewhere")
    return int(found[1])


def _apart(states: Tensor | list[Tensor], scales: Tensor | list[Tensor] | None) -> list[Tensor]:
    """Return one tensor a state: the older layout lists them, the newer stacks them [T, A+1, D].

    fp8 states have scales, which broadcast over a listed state, or over the stack.
    """
    if isinstance(states, Tensor):
        wide = states if scales is None else states.float() * scales.float()
        return list(wide.unbind(1))
    if scales is None:
        return states
    return [state.float() * scale.float() for state, scale in zip(states, scales, strict=True)]
