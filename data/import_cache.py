"""Import hidden states that speculators stored: token rows, and a feature store of them.

Their last state is from before the final norm; the target's own norm is applied to it, whatever its
kind. The layers that were tapped are given as aux: a few rows are run through the target, and
states that are not the ones given are refused.
Shapes: T tokens, N tokens of some rows, D width.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from headstart.data.cache_files import CachedRows, read_cache
from headstart.data.codec import LAST, Codec, aux_name
from headstart.data.features import teacher_statistics
from headstart.data.rows import RowsMeta, RowsWriter, read_rows, rows_hash
from headstart.data.store_job import Pass, StoreJob
from headstart.data.store_writer import write_store
from headstart.data.template import ChatTemplate, TokenRow
from headstart.heads.target import Target
from headstart.ranks import place

log = logging.getLogger(__name__)
COMPARED_ROWS = 3
TOLERANCE = 0.2
"""Relative error of a state against the target's own: room for another engine's rounding and for
fp8, none for another model. A neighbouring layer may be nearer than that, so that the state must
also be nearest to that of its own layer."""


def import_cache(
    target: Target, cache: Path, rows_at: Path, out: Path, *, taps: Sequence[int], dtype: str
) -> None:
    """Write the rows of a cache and their feature store; an interrupted import is taken up.

    The rows are taken to be rendered by the target's chat template, which the cache does not say.
    Raises ValueError when the states are not the target's, or not those of the layers given.
    """
    if place()[1] > 1:
        raise ValueError(
            f"cache={cache}: the import runs in one process; start it without torchrun"
        )
    held, taps = read_cache(cache), sorted(set(taps))
    check_states(target, held, taps)
    write_rows(target, held, rows_at)
    rows, meta = read_rows(rows_at)
    norm = final_norm(target)
    rounded = Codec.of(dtype, target.dtype).stored(LAST)

    def passes(shard: list[int]) -> Iterator[Pass]:
        for index in shard:
            yield [index], _columns(target, held, index, rows[index], taps, norm, rounded)

    write_store(StoreJob.of(target, rows, meta, taps, dtype, passes), out)


def write_rows(target: Target, held: CachedRows, directory: Path) -> None:
    """Write the token rows of a cache, in its order."""
    template = ChatTemplate(target.tokenizer).hash
    # By content: other caches have directories and numbers of rows alike.
    settings = {"cache.rows_hash": rows_hash(_row(held, i) for i in range(len(held.files)))}
    writer = RowsWriter(directory, RowsMeta(target.fingerprint, template, settings))
    supervised = 0
    for index in range(len(held.files)):
        row = _row(held, index)
        supervised += sum(row.loss_mask)
        if row.row_id not in writer.done_ids:
            writer.add(row)
    summary = f"{len(held.files)} rows of a cache"
    writer.finish(summary, {"rows": len(held.files), "supervised_tokens": supervised})
    log.info("%s: %s, taken to be of the target's chat template", directory, summary)


@torch.no_grad()
def check_states(target: Target, held: CachedRows, taps: Sequence[int]) -> None:
    """Compare a few rows with what the target makes of them.

    Raises ValueError naming the state that differs, and the one that it is nearest to.
    """
    norm = final_norm(target)
    layers = range(1, target.shape.num_layers)
    for index in range(0, len(held.files), max(1, len(held.files) // COMPARED_ROWS)):
        path, (ids, _) = held.files[index], held.tokens(index)
        states = [state_TD.to(target.device, target.dtype) for state_TD in held.states(index)]
        if len(states) != len(taps) + 1:
            raise ValueError(
                f"{path}: {len(states) - 1} tapped states; give as many in aux, ascending: the s "
                f"of hidden_states[s] for each (aux={list(taps)})"
            )
        if states[0].shape[-1] != target.shape.hidden_size:
            raise ValueError(
                f"{path}: states of width {states[0].shape[-1]}, the target has "
                f"{target.shape.hidden_size}; choose the target that made them"
            )
        output = target.forward(torch.tensor([ids], device=target.device), taps=layers)
        for s, state_TD in zip(taps, states, strict=False):
            errors = {k: _error(state_TD, output.aux[k][0]) for k in layers}
            nearest = min(errors, key=errors.__getitem__)
            if nearest != s or errors[s] > TOLERANCE:
                raise ValueError(
                    f"{path}: the state given as s={s} differs from the target's by "
                    f"{errors[s]:.2f} relative; nearest is s={nearest} at {errors[nearest]:.2f}"
                )
        error = _error(norm(states[-1]), output.hidden_BTD[0])
        if error > TOLERANCE:
            raise ValueError(
                f"{path}: the last state, after the target's final norm, differs from its own by "
                f"{error:.2f} relative; these are states of another model"
            )


def final_norm(target: Target) -> nn.Module:
    """Return the module that makes the last state of the last layer's output.

    It is found by its output, since models name it differently. Raises ValueError when there is
    none.
    """
    made: dict[str, Tensor] = {}
    hooks = [
        child.register_forward_hook(lambda _, __, output, name=name: made.update({name: output}))
        for name, child in target.decoder.named_children()
        if not isinstance(child, nn.ModuleList)
    ]
    try:
        last = target.forward(torch.zeros(1, 2, dtype=torch.int64, device=target.device)).hidden_BTD
    finally:
        for hook in hooks:
            hook.remove()
    for name, output in made.items():
        if isinstance(output, Tensor) and output.shape == last.shape and output.equal(last):
            return target.decoder.get_submodule(name)
    raise ValueError(
        f"{target.name}: no final norm found; a cache of its states cannot be imported"
    )


def _row(held: CachedRows, index: int) -> TokenRow:
    ids, mask = held.tokens(index)
    return TokenRow(f"{index:09d}", "imported", ids, mask, "")


def _error(have: Tensor, want: Tensor) -> float:
    """Return the norm of a difference over the norm of what it should be; the first token is left
    out: its state is some hundred times as large in many models.
    """
    have, want = have[1:].float(), want[1:].float()
    return ((have - want).norm() / want.norm().clamp(min=1e-12)).item()


@torch.no_grad()
def _columns(
    target: Target,
    held: CachedRows,
    index: int,
    row: TokenRow,
    taps: Sequence[int],
    norm: nn.Module,
    rounded: torch.dtype,
) -> dict[str, Tensor]:
    assert held.tokens(index)[0] == row.token_ids, "rows of another cache"
    *tapped, last_TD = held.states(index)
    hidden_TD = norm(last_TD.to(target.device, target.dtype))
    seen_TD = hidden_TD.to(rounded).to(target.dtype)
    mask_T = torch.tensor(row.loss_mask, device=target.device).bool()
    logsumexp_BT, argmax_BT = teacher_statistics(seen_TD[None], mask_T[None], target.parts.readout)
    made = {
        "tokens": torch.tensor(row.token_ids),
        "loss_mask": mask_T,
        LAST: hidden_TD,
        "logsumexp": logsumexp_BT[0],
        "argmax": argmax_BT[0],
    }
    return made | {aux_name(s): t.to(target.dtype) for s, t in zip(taps, tapped, strict=True)}
