"""A target over several ranks or devices gives what a whole one gives, or says why it cannot."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensor_job
import torch
from accelerate import dispatch_model
from models import make_head, target_of, tiny_model
from tensor_job import ROWS, TAPS, losses, states
from training import CHAT_VOCAB, chat_target, save_target

from headstart.cli import load_config, register
from headstart.data.capture import capture
from headstart.data.features import OnlineFeatures, PackedFeatures, ranks_together
from headstart.data.rows import RowsMeta
from headstart.data.store import FeatureStore
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.placement import refuse_offloaded
from headstart.heads.target import Target

TESTS = Path(tensor_job.__file__).parent
SAME = 1e-5
"""In fp32: every layer's sums are taken in two parts."""


def end_session(leader: int) -> None:
    """Kill the processes that a job left."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


@pytest.fixture(scope="module")
def whole() -> Target:
    """Return the target as one process has it."""
    return chat_target(layers=4)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, whole: Target) -> dict[str, Any]:
    """Return what two gloo ranks made of it together, and where."""
    directory = save_target(tmp_path_factory.mktemp("target"), target=whole)
    paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    with (directory / "said").open("w") as said:  # a pipe would be held open by ranks that hang
        job = subprocess.Popen(
            [sys.executable, "-m", *torchrun, "tensor_job", str(directory)],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            assert job.wait(timeout=300) == 0, (directory / "said").read_text()[-4000:]
        finally:
            end_session(job.pid)
    first, second = (torch.load(directory / f"{rank}.pt") for rank in (0, 1))
    return {"directory": directory, "first": first, "second": second}


def test_two_ranks_give_the_states_of_one_and_whole_parts(ranks, whole):
    for name, want in states(whole).items():
        for rank in ("first", "second"):
            have = ranks[rank]["states"][name]
            torch.testing.assert_close(have, want, rtol=SAME, atol=SAME)


def test_each_rank_holds_half_of_a_layer(ranks, whole):
    halves = [ranks[rank]["rows of up_proj"] for rank in ("first", "second")]
    assert halves == [whole.layers[0].mlp.up_proj.out_features // 2] * 2


def test_a_target_is_known_by_the_same_fingerprint_however_it_lies(ranks, whole):
    assert {ranks[rank]["fingerprint"] for rank in ("first", "second")} == {whole.fingerprint}


def test_ranks_that_run_the_target_together_train_as_one_process_does(ranks, whole):
    (want, counts), (have, counted) = losses(whole, "single"), ranks["first"]["training"]
    assert len(set(want)) == 5
    assert have == pytest.approx(want, rel=SAME)
    assert counted == counts


def test_ranks_that_run_the_target_together_make_one_store(ranks, whole, tmp_path):
    capture(whole, ROWS, tmp_path / "store", meta=RowsMeta("", "t", {}), taps=TAPS)
    have, want = (
        FeatureStore(ranks["directory"] / "store", TAPS),
        FeatureStore(tmp_path / "store", TAPS),
    )
    assert have.lengths == want.lengths
    one, other = (store.batch(range(len(ROWS))) for store in (have, want))
    assert torch.equal(one.tokens_BT, other.tokens_BT)
    for s in TAPS:
        torch.testing.assert_close(one.aux[s], other.aux[s], rtol=SAME, atol=SAME)
    torch.testing.assert_close(one.hidden_BTD, other.hidden_BTD, rtol=SAME, atol=SAME)


def test_decoding_over_several_ranks_is_refused_with_the_cure(ranks):
    assert "its weights lie on 2 processes" in ranks["first"]["refusal"]
    assert "train.eval_prompts=0" in ranks["first"]["refusal"]


def test_tensor_parallel_in_one_process_is_an_error_with_its_cure(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    save_target(tmp_path)
    with pytest.raises(RuntimeError, match="tensor in one process: set launch.num_processes"):
        load_target(TargetConfig(str(tmp_path), parallel="tensor"))


def test_ranks_that_do_not_divide_the_key_value_heads_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    save_target(tmp_path)
    message = r"3 processes cannot share the target's 2 key/value heads evenly; .* can: 2$"
    with pytest.raises(ValueError, match=message):
        load_target(TargetConfig(str(tmp_path), parallel="tensor"))


# Device maps


def test_a_device_map_gives_the_states_of_a_plain_load(tmp_path, whole, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    save_target(tmp_path, target=whole)
    for device_map in ("auto", {"": "cpu"}):
        config = TargetConfig(
            str(tmp_path), dtype="float32", parallel="device_map", device_map=device_map
        )
        target = load_target(config)
        assert target.fingerprint == whole.fingerprint
        for name, want in states(whole).items():
            torch.testing.assert_close(states(target)[name], want, rtol=SAME, atol=SAME)


def test_a_map_of_modules_can_be_given_on_the_command_line():
    register()
    given = ["target=hf", "target.path=x", "rows=r", "out=o", "target.parallel=device_map"]
    config = load_config("capture", [*given, "target.device_map={model.layers: 0, lm_head: cpu}"])
    assert config.target.device_map == {"model.layers": 0, "lm_head": "cpu"}
    assert load_config("capture", given).target.device_map == "auto"


def test_layers_behind_accelerates_hooks_give_the_states_of_plain_ones():
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    names += [f"model.layers.{number}" for number in range(4)]
    plain, model = (tiny_model(vocab=CHAT_VOCAB) for _ in range(2))
    hooked = dispatch_model(model, device_map=dict.fromkeys(names, "cpu"), force_hooks=True)
    assert hasattr(hooked.model.layers[2], "_hf_hook")
    have, want = states(target_of(hooked)), states(target_of(plain))
    assert all(torch.equal(have[name], want[name]) for name in want)


def test_a_head_trains_on_a_target_behind_hooks():
    model = tiny_model(vocab=CHAT_VOCAB)
    names = ["model", "lm_head"]
    target = target_of(dispatch_model(model, dict.fromkeys(names, "cpu"), force_hooks=True))
    have, _ = losses(target, "single")
    want, _ = losses(target_of(tiny_model(vocab=CHAT_VOCAB)), "single")
    assert have == want


def test_a_device_map_under_torchrun_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    save_target(tmp_path)
    with pytest.raises(RuntimeError, match="device_map in one of 2 processes: each would spread"):
        load_target(TargetConfig(str(tmp_path), parallel="device_map"))


def test_a_map_that_left_modules_off_the_gpus_is_refused():
    model = tiny_model()
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu"}
    message = r"no room on the GPUs for 1 of 3 modules \(model.layers.1\).* captured features"
    with pytest.raises(RuntimeError, match=message):
        refuse_offloaded(model)
    model.hf_device_map = {"model.layers.0": "disk"}
    with pytest.raises(RuntimeError, match="1 of 1 modules"):
        refuse_offloaded(model)
    model.hf_device_map = {"": "cpu"}
    refuse_offloaded(model)


def test_a_target_on_several_devices_does_not_decode():
    target = target_of(tiny_model())
    target.model.lm_head.to("meta")
    spread = len({weight.device for weight in target.model.parameters()}) > 1
    assert spread
    target.spread = spread
    with pytest.raises(ValueError, match="lie on several devices, and decoding runs on one"):
        target.new_cache(1, 64, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "tensors"}, "target.parallel=tensors: expected one of replicated, tensor"),
        ({"device_map": "cuda"}, "target.device_map=cuda: expected auto, balanced"),
        ({"device_map": {}}, "or a mapping of module names"),
    ],
)
def test_unknown_ways_to_lay_out_a_target_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TargetConfig("x", **options)


@pytest.mark.parametrize(
    "options",
    [{"device_map": "balanced"}, {"parallel": "tensor", "device": "cuda:1"}],
)
def test_settings_that_a_layout_does_not_use_are_warned_of(options):
    with pytest.warns(UserWarning, match="has no effect with target.parallel="):
        TargetConfig("x", **options)


def test_features_from_a_store_need_no_ranks_together(ranks, whole):
    online = OnlineFeatures(whole, ROWS)
    online.target = type("Shared", (), {"tensor_ranks": 2})()
    assert ranks_together(online) == 2
    assert ranks_together(FeatureStore(ranks["directory"] / "store", TAPS)) == 1
    assert ranks_together(PackedFeatures(OnlineFeatures(whole, ROWS), 64)) == 1


def test_heads_adopted_by_a_target_behind_hooks_go_to_its_device():
    model = tiny_model()
    target = target_of(dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True))
    head = make_head("medusa", target)
    target.adopt(head)
    assert {weight.device for weight in head.parameters()} == {target.device}
