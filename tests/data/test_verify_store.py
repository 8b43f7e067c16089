"""A store is verified: its bytes against checksums, its states against the target."""

import json
from pathlib import Path

import pytest
import torch
from models import target_of, tiny_model
from safetensors.torch import save_file
from training import CHAT_VOCAB, chat_target, command, random_rows, save_target, saved

from headstart.data import store_job
from headstart.data.capture import capture
from headstart.data.rows import RowsMeta
from headstart.data.shards import HEADER, content_hash, read_shard
from headstart.data.verify_store import VerifyRun, verify_files, verify_rows

ROWS, META = random_rows(10), RowsMeta("", "t", {})


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(store_job, "SHARD_ROWS", 2)
    capture(chat_target(), ROWS, tmp_path / "store", meta=META, taps=[1])
    return tmp_path / "store"


def shards(store: Path) -> list[Path]:
    return sorted(store.glob("*-0*.safetensors"))


def rewrite(shard: Path, *, honest: bool) -> None:
    """Change one state of a shard, with or without the checksum of what it holds then."""
    tensors, row_ids = read_shard(shard)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["hidden_1"] *= 1.5
    header = {"sha256": content_hash(tensors) if honest else "?", "row_ids": row_ids}
    save_file(tensors, shard, {HEADER: json.dumps(header)})


def test_a_whole_store_is_told_so(store):
    assert verify_files(store) == {"shards": 5, "rows": 10}


@pytest.mark.parametrize("honest", [True, False])
def test_p19_a_shard_whose_content_is_not_the_indexs_is_named(store, honest):
    rewrite(shards(store)[2], honest=honest)
    with pytest.raises(
        ValueError, match=rf"^1 files of .*{shards(store)[2].name}: content differs"
    ):
        verify_files(store)


def test_p19_one_flipped_bit_is_found(store):
    path = shards(store)[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{path.name}: content differs"):
        verify_files(store)


def test_p19_every_damaged_file_is_named_at_once(store):
    first, second, third = shards(store)[:3]
    first.unlink()
    second.write_bytes(second.read_bytes()[:-7])
    rewrite(third, honest=False)
    message = rf"^3 files of .*{first.name}: no such.*{second.name}: damaged.*{third.name}: content"
    with pytest.raises(ValueError, match=message):
        verify_files(store)


def test_damaged_parts_are_named(store):
    parts = store / "parts.safetensors"
    data = bytearray(parts.read_bytes())
    data[-1] ^= 1
    parts.write_bytes(data)
    with pytest.raises(ValueError, match="parts.safetensors: content differs"):
        verify_files(store)


def test_rows_made_again_equal_what_is_stored(store):
    errors = verify_rows(store, chat_target(), 10)["relative_errors"]
    assert errors.keys() == {"hidden", "hidden_1"}
    assert max(errors.values()) < 1e-5


def test_states_that_the_target_does_not_make_are_refused_by_row_and_name(store):
    for path in shards(store):
        rewrite(path, honest=True)
    with pytest.raises(ValueError, match=r"row row-000: hidden_1 differs .* by 5.0e-01 relative"):
        verify_rows(store, chat_target(), 3)


@pytest.mark.parametrize(
    ("field", "options"),
    [("target_fingerprint", {"seed": 1}), ("dtype", {"dtype": torch.bfloat16})],
)
def test_a_store_of_another_target_is_refused_by_the_field_that_differs(store, field, options):
    dtype = options.pop("dtype", torch.float32)
    model = tiny_model(layers=2, vocab=CHAT_VOCAB, max_position_embeddings=2048, **options)
    target = target_of(model.to(dtype), chat_target().tokenizer)
    with pytest.raises(ValueError, match=f"feature store: made with {field}="):
        verify_rows(store, target, 1)


def test_the_verify_command_writes_what_it_found(store, tmp_path):
    target = saved(save_target(tmp_path / "target"))
    command("verify", *target, f"store={store}", "recompute=2", f"out={tmp_path}/verify")
    found = json.loads((tmp_path / "verify" / "verified.json").read_text())
    assert (found["shards"], found["rows"]) == (5, 10)
    assert found["relative_errors"].keys() == {"hidden", "hidden_1"}


def test_checksums_are_verified_without_a_target(store, tmp_path):
    nowhere = ["target=hf", "target.path=/no/such/target"]
    command("verify", *nowhere, f"store={store}", "recompute=0", f"out={tmp_path}/verify")
    assert json.loads((tmp_path / "verify" / "verified.json").read_text())["rows"] == 10


def test_a_number_of_rows_below_nothing_is_refused():
    with pytest.raises(ValueError, match="recompute=-1: need 0 or more rows"):
        VerifyRun(recompute=-1)
