"""Captured features: bit for bit what the target makes online, and never another run's."""

import json
import logging
import shutil
import time
from collections import namedtuple
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import target_of, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from training import CHAT_VOCAB, chat_target, command, random_rows, save_target, saved, token_row

from headstart.data import capture as capture_module
from headstart.data import shards, store_job, store_writer
from headstart.data.capture import capture
from headstart.data.features import OnlineFeatures, make_features, teacher_statistics
from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.shards import HEADER, content_hash
from headstart.data.store import FeatureStore
from headstart.data.store_job import Pass, StoreJob
from headstart.data.store_key import capture_key
from headstart.data.template import TokenRow
from headstart.files import check_free_space
from headstart.heads.base import FeatureBatch
from headstart.heads.target import Target

ROWS = random_rows(10)
META = RowsMeta("", "t", {"data.max_length": 24})
Disk = namedtuple("Disk", "total used free")


def captured(
    directory: Path, rows: list[TokenRow] = ROWS, meta: RowsMeta = META, **options: object
) -> FeatureStore:
    capture(chat_target(), rows, directory, meta=meta, **options)
    return FeatureStore(directory)


def by_length() -> list[int]:
    """Return the rows in the order in which they are captured."""
    return sorted(range(10), key=lambda row: (len(ROWS[row].token_ids), ROWS[row].row_id))


@pytest.fixture
def one_row_a_shard(monkeypatch):
    monkeypatch.setattr(store_job, "SHARD_ROWS", 1)


def test_a_stored_batch_equals_one_made_online_bit_for_bit(tmp_path):
    store, online = captured(tmp_path), OnlineFeatures(chat_target(), ROWS)
    assert store.lengths == online.lengths
    # The rows of one capture pass: other neighbours round differently, see the test below.
    have, want = store.batch(by_length()), online.batch(by_length())
    real_BT = want.document_BT >= 0
    for name in vars(FeatureBatch(*[torch.empty(0)] * 8)).keys() - {"aux"}:
        left, right = getattr(have, name), getattr(want, name)
        assert left.dtype == right.dtype
        if name != "row_ids_B":  # what the target computes on padding is not kept
            left, right = left[real_BT], right[real_BT]
        assert torch.equal(left, right), name


def test_a_row_alone_equals_the_same_row_in_a_batch(tmp_path):
    store, online = captured(tmp_path), OnlineFeatures(chat_target(), ROWS)
    for index in (0, 4, 9):
        have, want = store.batch([index]), online.batch([index])
        assert torch.equal(have.tokens_BT, want.tokens_BT)
        assert torch.equal(have.loss_mask_BT, want.loss_mask_BT)
        torch.testing.assert_close(have.hidden_BTD, want.hidden_BTD, rtol=1e-6, atol=3e-6)
        torch.testing.assert_close(have.logsumexp_BT, want.logsumexp_BT, rtol=0, atol=1e-5)
        assert torch.equal(have.argmax_BT, want.argmax_BT)


def test_padding_is_marked_and_supervises_nothing(tmp_path):
    store = captured(tmp_path)
    lengths = store.lengths
    batch = store.batch([lengths.index(min(lengths)), lengths.index(max(lengths))])
    short = int((batch.document_BT[0] >= 0).sum())
    assert short < batch.tokens_BT.shape[1]
    assert not batch.loss_mask_BT[0, short:].any()
    assert (batch.document_BT[0, short:] == -1).all()
    assert (batch.argmax_BT[0, short:] == -1).all()


def test_p16_two_captures_are_bit_equal(tmp_path):
    captured(tmp_path / "a")
    captured(tmp_path / "b")
    (left,), (right,) = (sorted((tmp_path / d).glob("*-0*.safetensors")) for d in "ab")
    assert left.read_bytes() == right.read_bytes()


def test_teacher_statistics_are_those_of_the_full_logits_where_the_next_token_counts():
    row = token_row("a", [9, 10, 11, 12, 13], 2)
    batch = make_features(chat_target(), [row], [0])
    logits_TV = chat_target().readout(batch.hidden_BTD)[0]
    teaches_T = torch.tensor([False, True, True, True, False])
    assert torch.equal(batch.argmax_BT[0], torch.where(teaches_T, logits_TV.argmax(-1), -1))
    want_T = torch.where(teaches_T, logits_TV.logsumexp(-1), 0)
    torch.testing.assert_close(batch.logsumexp_BT[0], want_T)


def test_chunked_statistics_equal_those_of_one_chunk(monkeypatch):
    batch = make_features(chat_target(), ROWS, range(10))
    monkeypatch.setattr("headstart.data.features.READOUT_CHUNK", 7)
    logsumexp_BT, argmax_BT = teacher_statistics(
        batch.hidden_BTD, batch.loss_mask_BT, chat_target().readout
    )
    torch.testing.assert_close(logsumexp_BT, batch.logsumexp_BT)
    assert torch.equal(argmax_BT, batch.argmax_BT)


def test_the_parts_load_without_the_model(tmp_path):
    store = captured(tmp_path)
    parts = chat_target().parts
    tokens = torch.arange(CHAT_VOCAB)
    assert torch.equal(store.parts.embed(tokens), parts.embed(tokens))
    hidden = store.batch([0]).hidden_BTD
    assert torch.equal(store.parts.readout(hidden), parts.readout(hidden))


# Damage


def test_p19_a_shard_cut_in_half_is_an_error_that_names_it(tmp_path, one_row_a_shard):
    captured(tmp_path)
    shards = sorted(tmp_path.glob("*-0*.safetensors"))
    assert len(shards) == 10
    shards[3].write_bytes(shards[3].read_bytes()[: shards[3].stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"{shards[3].name}: damaged .*capture again"):
        FeatureStore(tmp_path)


def test_p19_a_missing_shard_is_an_error_that_names_it(tmp_path, one_row_a_shard):
    captured(tmp_path)
    gone = sorted(tmp_path.glob("*-0*.safetensors"))[7]
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=f"{gone.name}: no such shard; capture again"):
        FeatureStore(tmp_path)


def test_p19_a_deleted_shard_alone_is_made_again(tmp_path, one_row_a_shard):
    captured(tmp_path)
    gone, *others = sorted(tmp_path.glob("*-0*.safetensors"))
    content = gone.read_bytes()
    gone.unlink()
    kept = {path: path.stat().st_mtime_ns for path in others}
    assert len(captured(tmp_path).lengths) == 10
    assert gone.read_bytes() == content
    assert {path: path.stat().st_mtime_ns for path in others} == kept


def test_p19_parts_cut_in_half_are_an_error_that_names_them(tmp_path):
    captured(tmp_path)
    parts = tmp_path / "parts.safetensors"
    parts.write_bytes(parts.read_bytes()[: parts.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"parts.safetensors: damaged .*capture again"):
        FeatureStore(tmp_path)


def test_a_store_of_an_older_format_is_refused(tmp_path):
    captured(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    del index["format"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="format None, this headstart reads 2; delete the store"):
        FeatureStore(tmp_path)


def test_a_shard_of_another_length_than_the_index_says_is_refused(tmp_path):
    captured(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["lengths"][-1] += 5
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="the index says .*; delete the store and capture again"):
        FeatureStore(tmp_path)


def test_a_capture_that_was_never_finished_is_refused(tmp_path):
    captured(tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"index.json: no such file; run headstart capture"):
        FeatureStore(tmp_path)


def test_p17_states_that_the_target_itself_overflows_are_refused_when_written(tmp_path):
    target = target_of(tiny_model(layers=2, vocab=CHAT_VOCAB).half(), chat_target().tokenizer)
    target.model.model.norm.weight.data[3] = 65504.0
    message = r"-00000.safetensors: row row-\d+, token \d+: .* inf is not finite; use another"
    with pytest.raises(ValueError, match=message):
        capture(target, ROWS, tmp_path, meta=META)
    assert not list(tmp_path.glob("*-0*.safetensors"))


def test_p17_70000_is_refused_by_a_store_of_fp16_with_shard_row_and_reason(tmp_path, monkeypatch):
    ours = capture_module.make_features

    def loud(*arguments: object, **options: object) -> FeatureBatch:
        batch = ours(*arguments, **options)
        batch.hidden_BTD[-1, 2, 5] = 70000.0
        return batch

    monkeypatch.setattr(capture_module, "make_features", loud)
    last = by_length()[-1]
    message = (
        rf"[0-9a-f]{{8}}-00000.safetensors: row {ROWS[last].row_id}, token 2: a value of hidden is "
        "not stored: 70000.0 is beyond 65504, the largest fp16; use dtype=bf16 or fp32"
    )
    with pytest.raises(ValueError, match=message):
        capture(chat_target(), ROWS, tmp_path / "fp16", meta=META, dtype="fp16")
    assert not list((tmp_path / "fp16").glob("*-0*.safetensors"))
    capture(chat_target(), ROWS, tmp_path / "bf16", meta=META, dtype="bf16")
    assert FeatureStore(tmp_path / "bf16").batch([last]).hidden_BTD[0, 2, 5] == 70144.0


def test_p17_a_state_that_is_not_finite_is_refused_when_read_with_shard_and_row(tmp_path):
    captured(tmp_path)
    (shard,) = tmp_path.glob("*-0*.safetensors")
    tensors = {name: t.clone() for name, t in load_file(shard).items()}
    tensors["hidden"][-1, 0] = float("inf")
    row_ids = [ROWS[row].row_id for row in by_length()]
    header = {"sha256": content_hash(tensors), "row_ids": row_ids}
    save_file(tensors, shard, {HEADER: json.dumps(header)})
    store, *others, last = FeatureStore(tmp_path), *by_length()
    store.batch(others)
    message = rf"{shard.name}: the states of row {ROWS[last].row_id} are not finite"
    with pytest.raises(ValueError, match=message):
        store.batch([others[0], last])


def test_two_captures_into_one_directory_wait_for_each_other(
    tmp_path, monkeypatch, one_row_a_shard
):
    ours = shards.save_file

    def slow(*arguments: object, **options: object) -> None:
        ours(*arguments, **options)
        time.sleep(0.1)  # the unfinished file is there for a while

    monkeypatch.setattr(shards, "save_file", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(capture, chat_target(), ROWS, tmp_path, meta=META)
        while not list(tmp_path.glob(".*-00003.safetensors.*")):
            time.sleep(0.01)
        second = pool.submit(capture, chat_target(), ROWS, tmp_path, meta=META)
        first.result()
        second.result()
    assert FeatureStore(tmp_path).lengths == [len(row.token_ids) for row in ROWS]


# Room


def test_p19_the_targets_own_parts_need_room_too(tmp_path, monkeypatch):
    target = chat_target()
    states = sum(len(row.token_ids) for row in ROWS) * store_job.bytes_per_token(target, [])
    for free in (states, states + target.parts.nbytes - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Disk(free, 0, free))
        with pytest.raises(ValueError, match="capture .* needs"):
            capture(target, ROWS, tmp_path, meta=META)
    free = states + target.parts.nbytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(free, 0, free))
    capture(target, ROWS, tmp_path, meta=META)
    assert (tmp_path / "parts.safetensors").stat().st_size >= target.parts.nbytes


def test_p19_a_request_of_67_gb_is_told_on_a_disk_of_1_gb(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(10**9, 0, 10**9))
    with pytest.raises(ValueError, match=r"capture needs 67\.1 GB, 1\.0 GB free in"):
        check_free_space(tmp_path, 1000 * 2048 * 4 * 4096 * 2, "capture")


class Wide:
    """A target of 4096 numbers a state in bf16, of which nothing but its size may be asked."""

    dtype, fingerprint, name, tensor_ranks = torch.bfloat16, "wide", "wide", 1
    shape = SimpleNamespace(vocab_size=128, hidden_size=4096, num_layers=32)
    parts = SimpleNamespace(nbytes=0)

    def check_taps(self, taps: Sequence[int]) -> None:
        """Take any."""


def test_p19_capture_prints_67_gb_and_refuses_them_on_a_disk_of_1_gb(tmp_path, monkeypatch, caplog):
    row = token_row("r", [5] * 2048, 1000)
    told = r"2048000 tokens x 4 states .* needs 67\.1 GB, 1\.0 GB free"
    caplog.set_level(logging.INFO, logger="headstart")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(10**9, 0, 10**9))
    with pytest.raises(ValueError, match=told):
        capture(Wide(), [row] * 1000, tmp_path / "store", meta=META, taps=[2, 16, 29])
    assert "capture: 67.1 GB (1000 rows, 2048000 tokens x 4 states x 4096 in bf16)" in caplog.text
    assert not (tmp_path / "store").exists()


class Untouched:
    """A target whose forward pass must not be reached."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __getattr__(self, name: str) -> object:
        assert name != "forward", "the target ran before the disk was checked"
        return getattr(self._target, name)


def test_p19_a_disk_too_small_is_told_before_the_first_forward(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(10**9, 10**9, 1000))
    tokens = sum(len(row.token_ids) for row in ROWS)
    with pytest.raises(ValueError, match=rf"\(10 rows, {tokens} tokens .*\) needs .* free in"):
        capture(Untouched(chat_target()), ROWS, tmp_path / "store", meta=META)
    assert not (tmp_path / "store").exists()


def test_p13_a_row_outside_the_vocabulary_is_refused_before_the_first_forward(tmp_path):
    bad = token_row("bad", [5, CHAT_VOCAB], 1)
    with pytest.raises(ValueError, match=f"row bad: token id {CHAT_VOCAB} outside"):
        capture(Untouched(chat_target()), [*ROWS, bad], tmp_path, meta=META)


# Taking up and reuse


def test_an_interrupted_capture_keeps_the_shards_that_are_there(
    tmp_path, monkeypatch, one_row_a_shard
):
    made: list[int] = []
    ours = store_writer.write_shard

    def counting(*arguments: object) -> None:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(1)
        ours(*arguments)

    monkeypatch.setattr(store_writer, "write_shard", counting)
    with pytest.raises(KeyboardInterrupt):
        captured(tmp_path / "cut")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").glob("*-0*.safetensors")}
    assert len(kept) == 4
    monkeypatch.setattr(store_writer, "write_shard", ours)
    resumed, straight = captured(tmp_path / "cut"), captured(tmp_path / "straight")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for index in range(10):
        assert torch.equal(resumed.batch([index]).hidden_BTD, straight.batch([index]).hidden_BTD)


def test_taking_up_a_capture_needs_room_for_the_rest_only(tmp_path, monkeypatch):
    captured(tmp_path)
    (tmp_path / "index.json").unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(10**9, 10**9, 0))
    assert len(captured(tmp_path).lengths) == 10


def other_target(**options: object) -> Target:
    model = tiny_model(layers=2, vocab=CHAT_VOCAB, max_position_embeddings=2048, **options)
    return target_of(model, chat_target().tokenizer)


def half_target() -> Target:
    model = tiny_model(layers=2, vocab=CHAT_VOCAB, max_position_embeddings=2048)
    return target_of(model.to(torch.bfloat16), chat_target().tokenizer)


def other_meta(template: str = "t", max_length: int = 24) -> RowsMeta:
    return RowsMeta("", template, {"data.max_length": max_length})


CHANGES = {
    "template_hash": {"meta": other_meta(template="u")},
    "max_length": {"meta": other_meta(max_length=20)},
    "aux_features": {"taps": [1]},
    "dtype": {"target": half_target()},
    "target_fingerprint": {"target": other_target(seed=1)},
    "rows_hash": {"rows": [token_row("cut", ROWS[0].token_ids[:4], 1), *ROWS[1:]]},
}
"""One thing that changes the features, by the field that it is named by."""


def changed(**settings: object) -> dict[str, object]:
    """Return the key of a run in which one thing differs."""
    run = {"target": chat_target(), "rows": ROWS, "meta": META, "taps": []} | settings
    return capture_key(run["target"], run["rows"], run["meta"], run["taps"])


def test_p18_template_length_taps_dtype_and_weights_make_different_keys():
    keys = [changed(), *(changed(**change) for change in CHANGES.values())]
    assert len({json.dumps(key) for key in keys}) == 7
    for name, change in CHANGES.items():
        differing = [field for field, value in changed(**change).items() if value != keys[0][field]]
        assert differing == [name]


@pytest.mark.parametrize("field", CHANGES)
def test_p18_a_store_of_another_run_is_refused_by_the_field_that_differs(tmp_path, field):
    store = captured(tmp_path)
    store.require(changed())
    with pytest.raises(ValueError, match=rf"feature store: made with {field}=.*; capture again"):
        store.require(changed(**CHANGES[field]))


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("field", [*CHANGES, "stored_as"])
def test_p18_a_capture_does_not_take_up_that_of_another_run(tmp_path, field, finished):
    captured(tmp_path)
    if not finished:
        (tmp_path / "index.json").unlink()
    change = CHANGES.get(field, {"dtype": "bf16"})
    run = {"target": chat_target(), "rows": ROWS, "meta": META} | change
    target, rows = run.pop("target"), run.pop("rows")
    with pytest.raises(ValueError, match=rf": made with {field}=.*; choose another directory or"):
        capture(target, rows, tmp_path, **run)


def test_a_store_of_another_dtype_serves_a_run_in_the_type_the_target_computes_in(tmp_path):
    captured(tmp_path, dtype="bf16")
    store = FeatureStore(tmp_path)
    store.require(changed())
    assert store.key["stored_as"] == "bf16"
    assert store.batch([0]).hidden_BTD.dtype == torch.float32


def test_tapped_states_are_stored_as_they_are_made_online(tmp_path):
    capture(chat_target(), ROWS, tmp_path, meta=META, taps=[1])
    store = FeatureStore(tmp_path, taps=[1])
    online = OnlineFeatures(chat_target(), ROWS, taps=[1])
    have, want = store.batch(by_length()), online.batch(by_length())
    assert list(have.aux) == [1]
    real_BT = want.document_BT >= 0
    assert torch.equal(have.aux[1][real_BT], want.aux[1][real_BT])
    assert torch.equal(have.hidden_BTD[real_BT], want.hidden_BTD[real_BT])


def test_p14_a_store_holds_the_models_own_hidden_states_by_s_and_the_conventions_name(tmp_path):
    target = target_of(tiny_model())
    row = token_row("r", torch.arange(5, 14).tolist(), 4)
    capture(target, [row], tmp_path, meta=META, taps=[1, 2, 3])
    batch = FeatureStore(tmp_path, taps=[1, 2, 3]).batch([0])
    want = target.model(torch.tensor([row.token_ids]), output_hidden_states=True).hidden_states
    for s in (1, 2, 3):
        assert torch.equal(batch.aux[s], want[s])
    key = json.loads((tmp_path / "index.json").read_text())["key"]
    assert (key["aux_convention"], key["aux_features"]) == ("hidden_states[s]", [1, 2, 3])
    with pytest.raises(ValueError, match="aux feature s=4: expected 0 < s < 4"):
        capture(target, [row], tmp_path / "other", meta=META, taps=[4])


def test_a_store_with_more_states_than_a_run_needs_serves_it_with_those_alone(tmp_path):
    target = target_of(tiny_model(layers=4, vocab=CHAT_VOCAB), chat_target().tokenizer)
    capture(target, ROWS, tmp_path, meta=META, taps=[3, 1, 3, 2])
    store = FeatureStore(tmp_path, taps=[1, 3])
    assert store.key["aux_features"] == [1, 2, 3]
    for taps in ([], [2], [1, 3]):
        store.require(capture_key(target, ROWS, META, taps))
    batch = store.batch([0, 9])
    assert list(batch.aux) == [1, 3]
    assert FeatureStore(tmp_path).batch([0]).aux == {}


def test_a_store_that_lacks_a_tapped_state_is_refused(tmp_path):
    captured(tmp_path)
    with pytest.raises(ValueError, match=r"aux_features=\[\], this run has aux_features=\[1\]"):
        FeatureStore(tmp_path, taps=[1])


def test_a_tap_outside_the_layers_is_refused_before_the_first_forward(tmp_path):
    with pytest.raises(ValueError, match="aux feature s=2: expected 0 < s < 2"):
        capture(Untouched(chat_target()), ROWS, tmp_path, meta=META, taps=[2])


def test_tapped_states_count_towards_the_disk_they_need(tmp_path, monkeypatch):
    size = sum(len(row.token_ids) for row in ROWS) * (3 * 32 * 4 + 13)
    target = target_of(tiny_model(layers=4, vocab=CHAT_VOCAB), chat_target().tokenizer)
    asked: list[int] = []
    monkeypatch.setattr(store_job, "check_free_space", lambda path, need, what: asked.append(need))
    capture(target, ROWS, tmp_path, meta=META, taps=[1, 2])
    assert asked == [size + target.parts.nbytes]


def test_the_capture_command_stores_beside_the_rows(tmp_path):
    rows = tmp_path / "rows"
    writer = RowsWriter(rows, RowsMeta(chat_target().fingerprint, "t", META.settings))
    for row in ROWS:
        writer.add(row)
    writer.finish("made for a test", {})
    command("capture", *saved(save_target(tmp_path / "target")), f"rows={rows}")
    store = FeatureStore(tmp_path / "rows-features")
    store.require(changed())
    assert hidden(store) == hidden(captured(tmp_path / "straight"))


def hidden(store: FeatureStore) -> list[list[float]]:
    states: Tensor = store.batch(range(len(store.lengths))).hidden_BTD
    return states.flatten(1).tolist()


def test_a_shard_that_lacks_a_pass_is_not_written(tmp_path):
    """The pass was refused, and its error is on its way to whoever captures."""
    rows = ROWS[:2]

    def one_pass(shard: list[int]) -> Iterator[Pass]:
        batch = make_features(chat_target(), [rows[shard[0]]], [shard[0]])
        yield shard[:1], capture_module.columns(batch, [len(rows[shard[0]].token_ids)])

    job = StoreJob.of(chat_target(), rows, META, (), "target", one_pass)
    shard = store_writer._Shard(tmp_path / "s.safetensors", [0, 1], job, tqdm(disable=True))
    for passed in job.make([0, 1]):
        shard.add(*passed)
    shard.finish()
    assert not list(tmp_path.iterdir())
