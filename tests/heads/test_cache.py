"""The KV cache: what is kept, what is forgotten, who sees what, and when there is no room."""

import pytest
import torch
from models import target_of, variant_model
from torch import Tensor

from headstart.heads.cache import KVCache
from headstart.heads.target import Target

# P48's tree [[0],[1],[1,0]]: nodes 1 and 2 hang on the root, node 3 on node 2.
DEPTH_N = torch.tensor([0, 1, 1, 2])
VISIBLE_NN = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
ACCEPTED = [0, 2, 3]


def _tokens(*shape: int, seed: int) -> Tensor:
    return torch.randint(128, shape, generator=torch.Generator().manual_seed(seed))


def _pass(
    target: Target, cache: KVCache, tokens_RN: Tensor, rows: list[int] | None = None
) -> Tensor:
    R, N = tokens_RN.shape
    causal_RNN = torch.ones(R, N, N, dtype=torch.bool).tril()
    depth_RN = torch.arange(N).expand(R, N)
    return target.pass_over(tokens_RN, depth_RN, causal_RNN, cache, rows=rows).hidden_BTD


def _tree_pass(target: Target, cache: KVCache, tokens_RN: Tensor) -> Tensor:
    R = len(tokens_RN)
    visible_RNN = VISIBLE_NN.expand(R, 4, 4)
    return target.pass_over(tokens_RN, DEPTH_N.expand(R, 4), visible_RNN, cache).hidden_BTD


def _holds(target: Target, cache: KVCache, row: int, text: list[int]) -> None:
    """Assert that a row equals a fresh prefill of the text, in length and content."""
    fresh = target.new_cache(1, 64, 4)
    _pass(target, fresh, torch.tensor([text]))
    fresh.advance([len(text)])
    assert cache.lengths[row] == len(text)
    for have, want in zip(cache.committed(row), fresh.committed(0), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-5)


def _three_tree_rounds(target: Target, accepted: list[int]) -> None:
    cache, text = target.new_cache(1, 64, 4), _tokens(5, seed=0).tolist()
    _pass(target, cache, torch.tensor([text]))
    cache.advance([len(text)])
    for seed in (1, 2, 3):
        tokens_BN = _tokens(1, 4, seed=seed)
        _tree_pass(target, cache, tokens_BN)
        cache.keep([accepted])
        text += tokens_BN[0, accepted].tolist()
        _holds(target, cache, 0, text)


def test_p48_rows_of_a_later_branch_are_moved_into_place(tiny: Target) -> None:
    _three_tree_rounds(tiny, ACCEPTED)


@pytest.mark.parametrize("accepted", [[0], [0, 1], [0, 2]])
def test_any_accepted_path_leaves_what_a_fresh_prefill_writes(
    tiny: Target, accepted: list[int]
) -> None:
    _three_tree_rounds(tiny, accepted)


def test_windowed_layers_roll_back_as_well() -> None:
    _three_tree_rounds(target_of(variant_model("gemma3")), ACCEPTED)


def test_the_next_pass_after_a_rejection_reads_nothing_stale(tiny: Target) -> None:
    cache, prompt = tiny.new_cache(1, 64, 4), _tokens(1, 5, seed=0)
    _pass(tiny, cache, prompt)
    cache.advance([5])
    _tree_pass(tiny, cache, _tokens(1, 4, seed=1))
    cache.keep([[0]])
    root, after = _tokens(1, 4, seed=1)[:, :1], _tokens(1, 2, seed=2)
    have = _pass(tiny, cache, after)
    want = tiny.forward(torch.cat([prompt, root, after], 1)).hidden_BTD[:, 6:]
    torch.testing.assert_close(have, want, rtol=0, atol=1e-5)


def test_rows_of_unequal_length_accept_paths_of_their_own(tiny: Target) -> None:
    cache, texts = tiny.new_cache(3, 64, 4), [_tokens(n, seed=n).tolist() for n in (3, 7, 1)]
    padded = torch.tensor([text + [0] * (7 - len(text)) for text in texts])
    _pass(tiny, cache, padded)
    cache.advance([3, 7, 1])
    for seed in (1, 2):
        tokens_BN = _tokens(3, 4, seed=seed)
        _tree_pass(tiny, cache, tokens_BN)
        paths = [[0, 2, 3], [0], [0, 1]]
        cache.keep(paths)
        for row, path in enumerate(paths):
            texts[row] += tokens_BN[row, path].tolist()
            _holds(tiny, cache, row, texts[row])


def test_a_prompt_in_chunks_is_the_prompt_at_once(tiny: Target) -> None:
    text, cache = _tokens(1, 10, seed=0), tiny.new_cache(1, 64, 4)
    for part in (text[:, :4], text[:, 4:9], text[:, 9:]):
        _pass(tiny, cache, part)
        cache.advance([part.shape[1]])
    _holds(tiny, cache, 0, text[0].tolist())


def test_a_row_can_be_reset_and_filled_anew(tiny: Target) -> None:
    cache, texts = tiny.new_cache(2, 64, 4), _tokens(2, 6, seed=0)
    _pass(tiny, cache, texts)
    cache.advance([6, 6])
    cache.reset(0)
    assert cache.lengths == [0, 6]
    fresh = _tokens(1, 4, seed=1)
    _pass(tiny, cache, fresh, rows=[0])
    cache.advance([4], rows=[0])
    _holds(tiny, cache, 0, fresh[0].tolist())
    _holds(tiny, cache, 1, texts[1].tolist())
    cache.reset()
    assert cache.lengths == [0, 0]


def test_a_moved_row_is_the_row_and_its_source_stays(tiny: Target) -> None:
    cache, texts = tiny.new_cache(2, 64, 4), _tokens(2, 6, seed=0)
    _pass(tiny, cache, texts)
    cache.advance([6, 3])
    cache.move_row(1, 0)
    _holds(tiny, cache, 0, texts[1, :3].tolist())
    _holds(tiny, cache, 1, texts[1, :3].tolist())


def test_p50_a_pass_without_room_raises_before_it_starts(tiny: Target) -> None:
    cache = tiny.new_cache(1, 6, 2)
    _pass(tiny, cache, _tokens(1, 6, seed=0))
    cache.advance([6])
    before = [pair[0].clone() for pair in cache.committed(0)]
    with pytest.raises(ValueError, match="a row holds 6 of 6 tokens and 1 more were asked for"):
        _pass(tiny, cache, _tokens(1, 1, seed=1))
    after = [pair[0] for pair in cache.committed(0)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_p50_a_tree_may_reach_past_the_end_by_its_own_size_and_no_further(tiny: Target) -> None:
    cache = tiny.new_cache(1, 6, 4)
    _pass(tiny, cache, _tokens(1, 5, seed=0))
    cache.advance([5])
    assert _tree_pass(tiny, cache, _tokens(1, 4, seed=1)).isfinite().all()
    with pytest.raises(ValueError, match="a row holds 5 of 6 tokens and 6 more were asked for"):
        _pass(tiny, cache, _tokens(1, 6, seed=1))


def test_masks_show_the_committed_rows_and_the_nodes_own_path() -> None:
    cache = KVCache(2, 8, 4, dtype=torch.float32)
    cache.lengths = [3, 1]
    masks = cache.open(torch.zeros(2, 4, dtype=torch.int64), VISIBLE_NN.expand(2, 4, 4))
    seen_RNS = masks["full_attention"][:, 0] == 0
    assert list(masks) == ["full_attention"]
    for row, length in enumerate([3, 1]):
        assert seen_RNS[row, :, :length].all()
        assert torch.equal(seen_RNS[row, :, length : length + 4], VISIBLE_NN)
        assert not seen_RNS[row, :, length + 4 :].any()


def test_a_window_counts_positions_and_not_slots() -> None:
    """Node 3 of the tree sits in slot 8 at position 7, its parent in slot 7 at position 6."""
    cache = KVCache(1, 8, 4, dtype=torch.float32, windows={"sliding_attention": 3, "full": None})
    cache.lengths = [5]
    masks = cache.open(5 + DEPTH_N[None], VISIBLE_NN[None])
    seen_NS = masks["sliding_attention"][0, 0] == 0
    assert seen_NS[0].nonzero().flatten().tolist() == [3, 4, 5]
    assert seen_NS[2].nonzero().flatten().tolist() == [4, 5, 7]
    assert seen_NS[3].nonzero().flatten().tolist() == [5, 7, 8]
    assert (masks["full"][0, 0, 3] == 0).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 7, 8]


def test_pending_rows_of_an_earlier_pass_stay_visible_until_the_keep() -> None:
    cache = KVCache(1, 8, 4, dtype=torch.float32)
    cache.lengths = [2]
    first = torch.ones(1, 1, 1, 1)
    cache.open(torch.tensor([[2]]), torch.ones(1, 1, 1, dtype=torch.bool))
    cache.update(first, first, 0)
    mask = cache.open(torch.tensor([[3]]), torch.ones(1, 1, 2, dtype=torch.bool))["full_attention"]
    keys, _ = cache.update(2 * first, 2 * first, 0)
    assert keys[0, 0, 2:4, 0].tolist() == [1.0, 2.0]
    assert (mask[0, 0, 0] == 0).nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_slots_are_read_in_multiples_of_128() -> None:
    cache = KVCache(1, 300, 4, dtype=torch.float32)
    widths = []
    for length in (0, 120, 127, 128, 299):
        cache.lengths = [length]
        mask = cache.open(torch.tensor([[length]]), torch.ones(1, 1, 1, dtype=torch.bool))
        widths.append(mask["full_attention"].shape[-1])
    assert widths == [128, 128, 128, 256, 304]
