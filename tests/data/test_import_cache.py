"""Caches of hidden states that speculators wrote: their rows, and what the target makes of them.

Written here as its data generation lays them out: the tapped states and, last, the pre-norm state.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from models import target_of, tiny_model, variant_model
from safetensors.torch import save_file
from torch import Tensor
from training import CHAT_VOCAB, chat_target, command, random_rows, saved

from headstart.data.cache_files import read_cache
from headstart.data.features import make_features
from headstart.data.import_cache import final_norm, import_cache
from headstart.data.rows import read_rows
from headstart.data.store import FeatureStore
from headstart.data.store_key import capture_key
from headstart.data.template import TokenRow
from headstart.heads.target import Target

ROWS = random_rows(5, seed=7)
TAPS = [1, 3]


def deep_target() -> Target:
    model = tiny_model(layers=5, vocab=CHAT_VOCAB, max_position_embeddings=2048)
    generator = torch.Generator().manual_seed(0)
    model.model.norm.weight.data.uniform_(0.5, 2, generator=generator)
    return target_of(model, chat_target().tokenizer)


def pre_norm_states(target: Target, row: TokenRow, taps: Sequence[int]) -> list[Tensor]:
    """Return the tapped states and the last one before the final norm, each [T, D]."""
    seen: list[Tensor] = []
    hook = final_norm(target).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    output = target.forward(torch.tensor([row.token_ids]), taps=taps)
    hook.remove()
    return [*(output.aux[s][0] for s in taps), seen[0][0]]


def stacked_cache(
    directory: Path,
    target: Target,
    *,
    taps: Sequence[int] = TAPS,
    fp8: bool = False,
    rows: Sequence[TokenRow] = ROWS,
) -> Path:
    """Write a dataset and hidden_states/hs_I.safetensors."""
    columns = {
        "input_ids": [row.token_ids for row in rows],
        "loss_mask": [row.loss_mask for row in rows],
        "seq_len": [len(row.token_ids) for row in rows],
    }
    datasets.Dataset.from_dict(columns).save_to_disk(directory)
    (directory / "hidden_states").mkdir()
    for number, row in enumerate(rows):
        states = torch.stack(pre_norm_states(target, row, taps), dim=1)
        tensors = {"token_ids": torch.tensor(row.token_ids), "hidden_states": states}
        if fp8:
            scale = states.abs().amax((1, 2), keepdim=True) / 448
            tensors["hidden_states"] = (states / scale).to(torch.float8_e4m3fn)
            tensors["hidden_states_scales"] = scale
        save_file(tensors, directory / "hidden_states" / f"hs_{number}.safetensors")
    return directory


def listed_cache(directory: Path, target: Target) -> Path:
    """Write data_I.pt, in which the states are a list."""
    directory.mkdir()
    for number, row in enumerate(ROWS):
        sample = {
            "input_ids": torch.tensor(row.token_ids),
            "loss_mask": torch.tensor(row.loss_mask),
            "hidden_states": pre_norm_states(target, row, TAPS),
        }
        torch.save(sample, directory / f"data_{number}.pt")
    return directory


def imported(tmp_path: Path, target: Target, cache: Path, **options: object) -> FeatureStore:
    options = {"taps": TAPS, "dtype": "target"} | options
    import_cache(target, cache, tmp_path / "rows", tmp_path / "store", **options)
    return FeatureStore(tmp_path / "store", options["taps"])


@pytest.mark.parametrize("write", [stacked_cache, listed_cache])
def test_an_imported_store_is_what_the_target_makes_of_the_rows(tmp_path, write):
    target = deep_target()
    store = imported(tmp_path, target, write(tmp_path / "cache", target))
    for index, row in enumerate(ROWS):
        have, want = store.batch([index]), make_features(target, [row], [index], TAPS)
        assert torch.equal(have.tokens_BT, want.tokens_BT)
        assert torch.equal(have.loss_mask_BT, want.loss_mask_BT)
        assert torch.equal(have.argmax_BT, want.argmax_BT)
        torch.testing.assert_close(have.hidden_BTD, want.hidden_BTD)
        torch.testing.assert_close(have.logsumexp_BT, want.logsumexp_BT)
        for s in TAPS:
            torch.testing.assert_close(have.aux[s], want.aux[s])


def test_training_on_imported_rows_finds_the_store_made_for_them(tmp_path):
    target = deep_target()
    store = imported(tmp_path, target, stacked_cache(tmp_path / "cache", target))
    rows, meta = read_rows(tmp_path / "rows")
    assert [(r.token_ids, r.loss_mask) for r in rows] == [(r.token_ids, r.loss_mask) for r in ROWS]
    store.require(capture_key(target, rows, meta, TAPS))


def test_states_in_fp8_with_scales_are_read(tmp_path):
    target = deep_target()
    store = imported(tmp_path, target, stacked_cache(tmp_path / "cache", target, fp8=True))
    have, want = store.batch([0]), make_features(target, ROWS[:1], [0], TAPS)
    for s in TAPS:
        assert (have.aux[s] - want.aux[s]).norm() / want.aux[s].norm() < 0.04


def test_an_interrupted_import_is_taken_up(tmp_path):
    target = deep_target()
    cache = stacked_cache(tmp_path / "cache", target)
    imported(tmp_path, target, cache)
    (tmp_path / "store" / "index.json").unlink()
    assert len(imported(tmp_path, target, cache).lengths) == 5


# What is refused


def test_p18_another_cache_of_the_same_name_and_lengths_is_other_rows(tmp_path):
    target = deep_target()
    imported(tmp_path, target, stacked_cache(tmp_path / "one" / "cache", target))
    others = [replace(row, token_ids=[t ^ 1 for t in row.token_ids]) for row in ROWS]
    cache = stacked_cache(tmp_path / "two" / "cache", target, rows=others)
    with pytest.raises(ValueError, match=r"made with cache.rows_hash=\w+, this run has"):
        import_cache(target, cache, tmp_path / "rows", tmp_path / "new", taps=TAPS, dtype="target")


def test_a_file_without_states_is_named(tmp_path):
    target = deep_target()
    cache = listed_cache(tmp_path / "cache", target)
    sample = torch.load(cache / "data_0.pt", weights_only=True)
    del sample["hidden_states"]
    torch.save(sample, cache / "data_0.pt")
    with pytest.raises(ValueError, match="data_0.pt: .*has no hidden_states; make the cache"):
        imported(tmp_path, target, cache)


def test_p14_states_of_a_neighbouring_layer_are_refused_with_the_layer_they_are_of(tmp_path):
    target = deep_target()
    cache = stacked_cache(tmp_path / "cache", target, taps=[2, 3])
    with pytest.raises(ValueError, match=r"given as s=1 differs .*; nearest is s=2 at 0\.00"):
        imported(tmp_path, target, cache)
    assert not (tmp_path / "rows").exists()


def test_p15_a_last_state_that_was_normed_already_is_refused(tmp_path):
    target = deep_target()
    cache = listed_cache(tmp_path / "cache", target)
    for path in cache.iterdir():
        sample = torch.load(path, weights_only=True)
        sample["hidden_states"][-1] = final_norm(target)(sample["hidden_states"][-1])
        torch.save(sample, path)
    with pytest.raises(ValueError, match="the last state, after the target's final norm, differs"):
        imported(tmp_path, target, cache)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "cohere", "phi"])
def test_p15_the_final_norm_is_the_targets_own_whatever_its_kind(name):
    target = target_of(variant_model(name))
    states = pre_norm_states(target, TokenRow("r", "", [5, 6, 7, 8], [0, 0, 1, 1], ""), [])
    want = target.forward(torch.tensor([[5, 6, 7, 8]])).hidden_BTD[0]
    torch.testing.assert_close(final_norm(target)(states[-1]), want)


def test_states_of_another_number_of_layers_ask_for_aux(tmp_path):
    target = deep_target()
    cache = stacked_cache(tmp_path / "cache", target)
    with pytest.raises(ValueError, match=r"2 tapped states; give as many in aux.*\(aux=\[1\]\)"):
        imported(tmp_path, target, cache, taps=[1])


def test_states_of_other_tokens_are_refused_by_file(tmp_path):
    target = deep_target()
    cache = stacked_cache(tmp_path / "cache", target)
    first, second = (cache / "hidden_states" / f"hs_{n}.safetensors" for n in (0, 1))
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match="hs_1.safetensors: holds other tokens than row 1"):
        imported(tmp_path, target, cache)


def test_p19_a_damaged_file_of_a_cache_is_named_and_not_replaced(tmp_path):
    target = deep_target()
    for write, name in (
        (stacked_cache, "hidden_states/hs_0.safetensors"),
        (listed_cache, "data_0.pt"),
    ):
        cache = write(tmp_path / write.__name__, target)
        path = cache / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ValueError, match=f"{path.name}: damaged .*; make the cache again"):
            imported(tmp_path, target, cache)


def test_a_missing_file_of_a_cache_is_named(tmp_path):
    cache = stacked_cache(tmp_path / "cache", deep_target())
    (cache / "hidden_states" / "hs_3.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="hs_3.safetensors: no such file"):
        read_cache(cache)


def test_nothing_in_a_pt_file_is_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "ran").touch, ())

    (tmp_path / "cache").mkdir()
    torch.save({"input_ids": Evil()}, tmp_path / "cache" / "data_0.pt")
    with pytest.raises(ValueError, match="data_0.pt: damaged"):
        read_cache(tmp_path / "cache").tokens(0)
    assert not (tmp_path / "ran").exists()


def test_a_directory_of_neither_layout_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither a dataset with .* nor data_I\.pt"):
        read_cache(tmp_path)


def test_the_capture_command_imports_a_cache(tmp_path):
    target = deep_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    cache = stacked_cache(tmp_path / "cache", target)
    places = [f"rows={tmp_path}/rows", f"cache={cache}", "aux=[1,3]"]
    command("capture", *saved(tmp_path / "target"), *places)
    assert FeatureStore(tmp_path / "rows-features").key["aux_features"] == TAPS
