"""Our own checkpoints: complete or refused, bit-equal in a fresh process, run nothing."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import feature_batch, make_head, some_vocab, target_of, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import HeadInfo, check_pairing, info_for, load_head, save_head
from headstart.heads.parts import TargetParts
from headstart.heads.target import Target
from headstart.heads.vocab import DraftVocab

OPTIONS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 2, "readout": "own"},
    "eagle": {"num_layers": 2},
    "eagle3": {"num_layers": 2, "aux": [1, 2], "fc_norm": True},
    "hydra_heads": {"num_heads": 2, "arch": "prefix-mlp"},
}
FAMILIES = list(OPTIONS)
Tensors = dict[str, Tensor]


def _head(family: str, target: Target, vocab: DraftVocab | None = None) -> DraftHead:
    return make_head(family, target, vocab=vocab, **OPTIONS[family])


def _saved(directory: Path, family: str, target: Target, vocab: DraftVocab | None = None) -> Path:
    head = _head(family, target, vocab)
    save_head(directory / family, head, info_for(head, target.name, target.fingerprint))
    return directory / family


def _drafts(head: DraftHead, parts: TargetParts) -> Tensor:
    """Return logits of a fixed draft: the first depths, and a step where the head can."""
    generator = torch.Generator().manual_seed(0)
    weight = parts.readout.weight_WD
    tokens = torch.randint(128, (1, 5), generator=generator)
    width = 32 * max(1, len(head.aux_features))
    hidden = torch.randn(1, 5, width, generator=generator).to(weight.dtype)
    state = head.new_state(1, 16, 4, parts)
    logits = head.extend(state, tokens, hidden, [5], parts)
    if head.depths_at_once > 1:
        return logits
    more = head.step(state, tokens[:, :2], torch.tensor([[0, 0]]), parts)
    return torch.cat((logits, more), 1)


def _edit(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def _edit_config(path: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_comes_back_bit_for_bit_with_its_info(
    tmp_path: Path, tiny: Target, family: str, dtype: torch.dtype
) -> None:
    head = _head(family, tiny, some_vocab()).to(dtype)
    info = info_for(head, "tiny", tiny.fingerprint, step=7, trained_on={"rows": 3, "of": ["a"]})
    save_head(tmp_path / "head", head, info)
    loaded, read = load_head(tmp_path / "head")
    loaded.to(dtype)
    assert read == info
    assert read.family == family
    assert loaded.config == head.config
    assert loaded.shape == head.shape
    assert torch.equal(loaded.vocab.ids_W, head.vocab.ids_W)
    assert not loaded.training
    parts = tiny.parts.to(dtype)
    assert torch.equal(_drafts(loaded, parts), _drafts(head, parts))


RELOAD = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from test_checkpoint import FAMILIES, _drafts
from headstart.heads.parts import TargetParts
from headstart.heads.checkpoint import load_head
folder = Path(sys.argv[1])
parts = TargetParts.load(folder / "parts.safetensors")
torch.save({f: _drafts(load_head(folder / f)[0], parts) for f in FAMILIES}, folder / "drafts.pt")
"""


def test_p35_p36_a_fresh_process_drafts_bit_equal_logits(tmp_path: Path, tied: Target) -> None:
    """TINY-TIED with a draft vocabulary of 32; only the files cross to the other process.

    It imports no head family by name: families must be found by their files alone.
    """
    for family in FAMILIES:
        _saved(tmp_path, family, tied, some_vocab())
    tied.parts.save(tmp_path / "parts.safetensors")
    here = Path(__file__).parent
    folders = [str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", RELOAD, str(tmp_path), str(here)]
    subprocess.run(command, check=True, env=environment)
    there = torch.load(tmp_path / "drafts.pt", weights_only=True)
    for family in FAMILIES:
        assert torch.equal(there[family], _drafts(_head(family, tied, some_vocab()), tied.parts))


@pytest.mark.parametrize("family", FAMILIES)
def test_p35_a_checkpoint_has_clean_names_and_no_target_tensors(
    tmp_path: Path, tiny: Target, family: str
) -> None:
    path = _saved(tmp_path, family, tiny, some_vocab())
    names = set(load_file(path / "model.safetensors"))
    assert names == {name for name, _ in _head(family, tiny, some_vocab()).named_parameters()} | {
        *("d2t", "t2d")
    }
    assert not any("embed" in name or name.startswith("module") for name in names)
    assert sorted(f.name for f in path.iterdir()) == ["config.json", "model.safetensors"]


def test_p36_own_read_outs_on_a_tied_target_are_stored_whole(tmp_path: Path, tied: Target) -> None:
    path = _saved(tmp_path, "medusa", tied, some_vocab(32))
    stored = load_file(path / "model.safetensors")["lm_heads_KWD"]
    assert stored.shape == (2, 32, 32)
    config = json.loads((path / "config.json").read_text())
    assert not any(name.startswith("tie") for name in (*config["head"], *config["target_shape"]))
    head, _ = load_head(path)
    before = tied.parts.readout.weight_WD.clone()
    head.lm_heads_KWD.zero_()
    assert torch.equal(tied.parts.readout.weight_WD, before)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("eagle", lambda t: t.pop("fc.weight"), r"missing fc.weight; unexpected nothing \(1 mis"),
        ("medusa", lambda t: t.pop("lm_heads_KWD"), "missing lm_heads_KWD"),
        ("eagle", lambda t: t.pop("d2t"), "no d2t but draft_vocab_size is 32"),
        ("eagle", lambda t: t.update(extra=torch.zeros(1)), "missing nothing; unexpected extra"),
        ("eagle", lambda t: t["fc.weight"].view(-1)[:1].fill_(float("nan")), "finite: fc.weight"),
        ("eagle", lambda t: t.update({"fc.bias": torch.zeros(3)}), r"fc.bias has shape \(3,\), ex"),
        ("eagle", lambda t: t.update(d2t=t["d2t"][:5].clone()), "d2t of 5 but draft_vocab_size"),
        ("eagle", lambda t: t.update(d2t=-t["d2t"]), "ids must rise strictly inside 0..127"),
        ("eagle", lambda t: t.update(d2t=t["d2t"].float()), "expected a non-empty int64 vector"),
        ("eagle", lambda t: t.update(d2t=t["d2t"].view(2, 16)), "a non-empty int64 vector"),
        ("eagle", lambda t: t.pop("t2d"), "no t2d but draft_vocab_size is 32 of 128"),
        ("eagle", lambda t: t.update(t2d=t["t2d"][:99].clone()), "t2d of 99 but draft_vocab_size"),
        ("eagle", lambda t: t.update(t2d=t["t2d"].long()), "t2d is torch.int64 of shape .128,.; "),
        ("eagle", lambda t: t["t2d"][125:126].fill_(False), r"is false \(125\) and .* \(none\)"),
        ("eagle", lambda t: t["t2d"][7:8].fill_(True), r"is false \(none\) and .* true \(7\)"),
    ],
)
def test_p35_a_defect_in_the_tensors_is_an_error_that_names_it(
    tmp_path: Path, tiny: Target, family: str, change: Callable[[Tensors], object], message: str
) -> None:
    path = _saved(tmp_path, family, tiny, some_vocab())
    _edit(path, change)
    with pytest.raises(ValueError, match=message):
        load_head(path)


def test_p35_wrapper_prefixes_are_an_error_that_names_both_sides(
    tmp_path: Path, tiny: Target
) -> None:
    path = _saved(tmp_path, "eagle", tiny)

    def wrap(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"module._orig_mod.{name}"] = tensors.pop(name)

    _edit(path, wrap)
    with pytest.raises(ValueError, match=r"missing fc.bias, .*; unexpected module._orig_mod.fc.b"):
        load_head(path)


def test_d2t_without_a_draft_vocabulary_is_refused(tmp_path: Path, tiny: Target) -> None:
    path = _saved(tmp_path, "eagle", tiny)
    _edit(path, lambda t: t.update(d2t=some_vocab().d2t))
    with pytest.raises(ValueError, match="d2t of 32 but draft_vocab_size is None"):
        load_head(path)


def test_p12_a_draft_vocabulary_of_other_weights_is_refused(tmp_path: Path, tiny: Target) -> None:
    """d2t and t2d fit each other and the size: only the hash tells."""
    path, other = _saved(tmp_path, "eagle", tiny, some_vocab()), DraftVocab(torch.arange(32), 128)
    named = json.loads((path / "config.json").read_text())["draft_vocab"]
    assert named == some_vocab().hash
    _edit(path, lambda t: t.update(d2t=other.d2t, t2d=other.t2d))
    with pytest.raises(ValueError, match=f"safetensors is {other.hash}, .* names is {named}"):
        load_head(path)


def test_a_checkpoint_without_a_draft_vocabulary_names_none(tmp_path: Path, tiny: Target) -> None:
    path = _saved(tmp_path, "eagle", tiny)
    assert json.loads((path / "config.json").read_text())["draft_vocab"] is None
    _edit_config(path, lambda c: c.update(draft_vocab=some_vocab().hash))
    with pytest.raises(ValueError, match=f"safetensors is None, .* names is {some_vocab().hash}"):
        load_head(path)


def test_where_a_head_started_from_is_not_part_of_it(tmp_path: Path, tiny: Target) -> None:
    head = make_head("eagle", tiny, init_from="runs/first/head")
    save_head(tmp_path / "head", head, info_for(head, "tiny", tiny.fingerprint))
    assert "runs/first" not in (tmp_path / "head" / "config.json").read_text()
    assert load_head(tmp_path / "head")[0].config.init_from is None


def test_a_head_that_is_not_finite_is_not_saved(tmp_path: Path, tiny: Target) -> None:
    head = _head("eagle", tiny)
    head.fc.weight.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match="not finite: fc.weight"):
        save_head(tmp_path / "head", head, info_for(head, "tiny", tiny.fingerprint))
    assert not (tmp_path / "head").exists()


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_else(
    tmp_path: Path, tiny: Target
) -> None:
    for step in (1, 2):
        head = _head("eagle", tiny)
        info = info_for(head, "tiny", tiny.fingerprint, step=step)
        save_head(tmp_path / "head", head, info)
    assert load_head(tmp_path / "head")[1].step == 2
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(_target_="os.system"), r"unknown keys \['_target_'\], missing keys"),
        (lambda c: c["head"].update(_target_="os.system"), r"head: unknown keys \['_target_'\]"),
        (lambda c: c["info"].update(_target_="os.system"), r"info: unknown keys \['_target_'\]"),
        (lambda c: c["info"].update(target_name="${oc.env:HOME}"), "a value holds '\\${'"),
        (lambda c: c["info"].update(family="os"), "head family 'os' is not one of eagle, eagle3"),
        (lambda c: c["head"].update(num_layers="two"), "head: Value 'two' of type 'str'"),
        (lambda c: c["head"].update(num_layers=0), "head.num_layers=0: need at least one layer"),
        (lambda c: c["target_shape"].pop("rope"), r"target_shape: .* missing keys \['rope'\]"),
        (lambda c: c.update(format_version=9), "version 9, expected headstart version 2"),
        (lambda c: c.update(aux_features=[1, 2]), r"aux features \[1, 2\] .* expected \[\]"),
        (lambda c: c.update(aux_convention="layer outputs"), "convention 'layer outputs' do not"),
    ],
)
def test_p60_a_config_that_is_not_ours_is_refused_and_nothing_runs(
    tmp_path: Path, tiny: Target, change: Callable[[dict], object], message: str
) -> None:
    path = _saved(tmp_path, "eagle", tiny)
    _edit_config(path, change)
    with pytest.raises(ValueError, match=message):
        load_head(path)


def test_p60_pickled_weights_are_not_read(tmp_path: Path, tiny: Target) -> None:
    path = _saved(tmp_path, "eagle", tiny)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="heads are stored as safetensors only"):
        load_head(path)
    (path / "pytorch_model.bin").rename(path / "model.safetensors")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_head(path)


def test_a_file_cut_short_is_refused(tmp_path: Path, tiny: Target) -> None:
    path = _saved(tmp_path, "eagle", tiny) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="not a whole safetensors file .* copy it again"):
        load_head(path.parent)


def test_a_directory_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such head checkpoint"):
        load_head(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        load_head(tmp_path / "empty")


# Pairing.


def test_p40_another_target_stops_the_run_unless_forced(tmp_path: Path, tiny: Target) -> None:
    head, info = load_head(_saved(tmp_path, "eagle", tiny))
    assert check_pairing(tmp_path, info, head, tiny, force=False) == ""
    other = target_of(tiny_model(seed=1), name="other")
    with pytest.raises(ValueError, match=f"trained for target tiny .*{other.fingerprint}.*force"):
        check_pairing(tmp_path, info, head, other, force=False)
    with pytest.warns(UserWarning, match="paired with other"):
        note = check_pairing(tmp_path, info, head, other, force=True)
    assert tiny.fingerprint in note
    assert other.fingerprint in note


@pytest.mark.parametrize("force", [False, True])
def test_p40_another_vocabulary_is_always_an_error(
    tmp_path: Path, tiny: Target, force: bool
) -> None:
    head, info = load_head(_saved(tmp_path, "eagle", tiny))
    wider = target_of(tiny_model(vocab=130), name="other")
    with pytest.raises(ValueError, match="vocab_size=128, but other has 130"):
        check_pairing(tmp_path, info, head, wider, force=force)


def test_info_names_the_family_of_a_config(tiny: Target) -> None:
    assert info_for(_head("medusa", tiny), "tiny", "f") == HeadInfo("medusa", "tiny", "f")


# The draft vocabulary.


def test_p10_few_distinct_tokens_are_filled_up_and_stop_tokens_kept() -> None:
    counts = torch.zeros(100, dtype=torch.int64)
    counts[5:10] = torch.tensor([3, 9, 1, 4, 2])
    vocab = DraftVocab.from_counts(counts, 32, forced=[2, 4])
    assert len(vocab) == 32
    assert (vocab.ids_W.diff() > 0).all()
    assert {2, 4, 5, 6, 7, 8, 9} <= set(vocab.ids_W.tolist())
    assert vocab.ids_W.tolist() == list(range(32))  # the fillers are the lowest unused ids
    assert vocab.t2d.sum() == 32
    assert vocab.t2d[torch.arange(32) + vocab.d2t].all()


def test_p10_stop_tokens_displace_the_rarest() -> None:
    counts = torch.arange(100)
    vocab = DraftVocab.from_counts(counts, 5, forced=[2, 4])
    assert vocab.ids_W.tolist() == [2, 4, 97, 98, 99]


def test_ties_at_the_edge_keep_the_lowest_ids() -> None:
    vocab = DraftVocab.from_counts(torch.tensor([1, 5, 1, 1, 1]), 3, forced=[4])
    assert vocab.ids_W.tolist() == [0, 1, 4]


@pytest.mark.parametrize("size", [2, 101])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"head.draft_vocab_size={size}: expected more than 2"):
        DraftVocab.from_counts(torch.ones(100), size, forced=[2, 4])


def test_p11_offsets_are_what_is_stored() -> None:
    vocab = DraftVocab(torch.tensor([0, 3, 7]), 10)
    assert vocab.d2t.tolist() == [0, 2, 5]
    assert DraftVocab.from_d2t(torch.tensor([0, 2, 5]), vocab.t2d).ids_W.tolist() == [0, 3, 7]
    assert vocab.draft_id_V.tolist() == [0, -1, -1, 1, -1, -1, -1, 2, -1, -1]
    with pytest.raises(ValueError, match="is d2t absolute where offsets are expected"):
        DraftVocab.from_d2t(torch.tensor([0, 3, 8]), vocab.t2d)


def test_p11_absolute_ids_that_rise_like_offsets_are_refused_by_the_membership() -> None:
    """They would lead to 0, 4 and 9, all inside the target's ten tokens."""
    t2d = DraftVocab(torch.tensor([0, 3, 7]), 10).t2d
    with pytest.raises(ValueError, match=r"t2d is false \(4, 9\) .* true \(3, 7\); is d2t absol"):
        DraftVocab.from_d2t(torch.tensor([0, 3, 7]), t2d)


def test_p13_the_table_of_a_large_vocabulary_takes_less_than_a_second() -> None:
    """V 151936, W 32000: counted, stored, named and read again."""
    V, W = 151936, 32000
    counts = torch.randint(1000, (V,), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    vocab = DraftVocab.from_counts(counts, W, forced=[2, 4])
    read = DraftVocab.from_d2t(vocab.d2t, vocab.t2d)
    assert read.hash == vocab.hash
    assert time.perf_counter() - start < 1
    assert vocab.t2d.sum() == W


def test_p13_ids_past_the_tokenizers_are_picked_by_no_count_and_no_force() -> None:
    counts = torch.arange(128)
    vocab = DraftVocab.from_counts(counts, 5, forced=[2, 126], below=120)
    assert vocab.ids_W.tolist() == [2, 116, 117, 118, 119]
    assert vocab.target_size == 128
    with pytest.raises(ValueError, match="head.draft_vocab_size=121: .* at most the target's 120"):
        DraftVocab.from_counts(counts, 121, forced=[2], below=120)


def test_the_hash_of_a_draft_vocabulary_is_of_its_ids_and_the_target_size() -> None:
    same = DraftVocab(torch.tensor([0, 3, 7]), 10).hash
    assert DraftVocab(torch.tensor([0, 3, 7]), 10).hash == same
    assert DraftVocab(torch.tensor([0, 3, 8]), 10).hash != same
    assert DraftVocab(torch.tensor([0, 3, 7]), 11).hash != same


def test_probabilities_spread_over_the_target_vocabulary() -> None:
    vocab = DraftVocab(torch.tensor([0, 3, 7]), 10)
    have = vocab.spread(torch.tensor([[0.5, 0.25, 0.25]]))
    assert have.tolist() == [[0.5, 0, 0, 0.25, 0, 0, 0, 0.25, 0, 0]]


def test_a_loaded_draft_vocabulary_means_the_same_loss(tmp_path: Path, tiny: Target) -> None:
    head = _head("eagle", tiny, some_vocab())
    batch = feature_batch(tiny, [list(range(1, 12))], [[1] * 11])
    want = head(batch, tiny.parts)
    have = load_head(_saved(tmp_path, "eagle", tiny, some_vocab()))[0](batch, tiny.parts)
    for name, numerator in want.numerators.items():
        assert torch.equal(have.numerators[name], numerator)
