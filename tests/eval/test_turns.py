"""Conversations in the benchmark: every turn is answered, and all arms are asked the same."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from models import anti, make_head, oracle, target_of, tiny_model
from scripted import arm, where
from training import CHAT_VOCAB, talking_target

from headstart.data.template import ChatTemplate
from headstart.eval import timing
from headstart.eval.arms import Arm
from headstart.eval.bench import benchmark
from headstart.eval.checks import LOOP_SHARE, repeated_ngram_share
from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import NoDrafter
from headstart.eval.engine.drafters.build import head_drafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.result import PromptRow, Result
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.eval.suites import Suite, load_suite
from headstart.eval.timing import Runner
from headstart.heads.target import Target

TALK = talking_target()
TEMPLATE = ChatTemplate(TALK.tokenizer)
QUICK = EvalConfig(resamples=2_000, warmup_prompts=1, max_new_tokens=12)
ROWS = [
    {"question_id": 1, "category": "talk", "turns": ["Say one.", "And then?", "Again."]},
    {"question_id": 2, "category": "math", "turns": ["What is 2 + 2?"]},
    {"question_id": 3, "category": "talk", "turns": ["Hi", "A much longer second question?"]},
]


def suite_of(path: Path, rows: Sequence[object] = ROWS, **changes: object) -> Suite:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_suite(replace(QUICK, suite=str(path), **changes), TEMPLATE)


def measured(
    suite: Suite,
    arms: list[Arm],
    target: Target = TALK,
    *,
    stops: Sequence[int] = TEMPLATE.stop_ids(TALK.stop_ids),
    **changes: object,
) -> list[tuple[Result, list[PromptRow]]]:
    return benchmark(
        target,
        arms,
        suite,
        sampling=SamplingConfig(),
        config=replace(QUICK, **changes),
        stop_ids=stops,
        provenance=where(target, suite),
    )


def null() -> list[Arm]:
    return [arm("null", NoDrafter())]


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, list[Request]]]:
    """Record every decode: the drafter's nodes and the requests; warm-up first."""
    calls: list[tuple[int, list[Request]]] = []

    def spy(target, drafter, requests, **options):
        calls.append((drafter.num_nodes, list(requests)))
        return decode(target, drafter, requests, **options)

    monkeypatch.setattr(timing, "decode", spy)
    return calls


def text_of(ids: Sequence[int]) -> str:
    stop = TEMPLATE.stop_ids(TALK.stop_ids)
    return TALK.tokenizer.decode(ids[:-1] if ids[-1] in stop else ids)


def test_the_next_prompt_holds_the_models_own_earlier_answers(tmp_path, asked):
    ((_, rows),) = measured(suite_of(tmp_path / "q.jsonl"), null())
    said = [(1, "Say one."), (2, "And then?"), (3, "Again.")]
    requests = [r[0] for nodes, r in asked[2:] if r[0].prompt_id.startswith("1")][::2]
    assert [r.prompt_id for r in requests] == ["1", "1#turn-2", "1#turn-3"]
    messages, start = [], 0
    for (_, text), request, count in zip(said, requests, rows[0].turn_tokens, strict=True):
        messages.append({"role": "user", "content": text})
        assert list(request.token_ids) == TEMPLATE.prompt_ids(messages)
        answer = rows[0].token_ids[start : start + count]
        messages.append({"role": "assistant", "content": text_of(answer)})
        start += count


def test_a_conversation_is_one_prompt_and_every_turn_has_a_token_from_prefill(tmp_path):
    suite = suite_of(tmp_path / "q.jsonl")
    ((result, rows),) = measured(suite, null())
    assert [row.turns for row in rows] == [3, 1, 2]
    assert result.counts.prompts == 3
    for row in rows:
        assert len(row.token_ids) == sum(row.turn_tokens) == row.turns + sum(row.emitted)
    assert result.figures["ms_prefill_per_turn"] > 0


def test_p52_identities_and_greedy_equality_hold_over_turns(tmp_path):
    suite = suite_of(tmp_path / "q.jsonl")
    runner = Runner(TALK, SamplingConfig(), tuple(TEMPLATE.stop_ids(TALK.stop_ids)), 1)
    turns = runner.timed([NoDrafter()], suite, 1, warmup_prompts=1).requests
    arms = [arm("oracle", oracle(TALK, turns, 4)), arm("anti", anti(TALK, turns, 4))]
    (best, _), (worst, _) = measured(suite, arms)
    assert best.equality.fraction_identical == worst.equality.fraction_identical == 1.0
    assert best.figures["tau_with_bonus_micro"] > worst.figures["tau_with_bonus_micro"]


def test_every_arm_is_asked_the_plain_arms_next_turn_though_its_own_answer_differs(
    tmp_path, monkeypatch
):
    asked: dict[int, dict[str, tuple[int, ...]]] = {1: {}, 2: {}}
    said: dict[int, dict[str, list[int]]] = {1: {}, 2: {}}

    def forged(target, drafter, requests, **options):
        """Put other text into the drafted arm's answers, as bf16 or sampling may."""
        arm_nodes = drafter.num_nodes
        asked[arm_nodes] |= {r.prompt_id: r.token_ids for r in requests}
        for done in decode(target, drafter, requests, **options):
            if arm_nodes == 2:
                done.token_ids[0] = TALK.tokenizer.convert_tokens_to_ids("Z")
            said[arm_nodes][done.prompt_id] = done.token_ids
            yield done

    monkeypatch.setattr(timing, "decode", forged)
    suite = suite_of(tmp_path / "q.jsonl", ROWS[2:])
    head = make_head("medusa", TALK, num_heads=1)
    drafter = head_drafter(head, TALK.parts, TreeConfig(name="chain1", depth=1), SamplingConfig())
    ((result, _),) = measured(suite, [arm("other", drafter)])
    assert said[1]["3"] != said[2]["3"]
    assert asked[1]["3#turn-2"] == asked[2]["3#turn-2"]
    answer = {"role": "assistant", "content": text_of(said[1]["3"])}
    users = [{"role": "user", "content": text} for text in ROWS[2]["turns"]]
    assert list(asked[2]["3#turn-2"]) == TEMPLATE.prompt_ids([users[0], answer, users[1]])
    told = {d.prompt_id: d.position for d in result.equality.divergences}
    assert told == {"3": 0, "3#turn-2": 0}  # a turn is compared by itself


def test_repeats_are_asked_what_the_first_repeat_was(tmp_path, asked):
    suite = suite_of(tmp_path / "q.jsonl", ROWS[:1])
    measured(suite, null(), repeats=3)
    prompts = {}
    for _, (request, *_) in asked[2:]:
        prompts.setdefault(request.prompt_id, set()).add(request.token_ids)
    assert {name: len(found) for name, found in prompts.items()} == {
        "1": 1,
        "1#turn-2": 1,
        "1#turn-3": 1,
    }


def test_turns_are_answered_after_an_answer_cut_by_the_limit(tmp_path):
    ((_, rows),) = measured(suite_of(tmp_path / "q.jsonl", max_new_tokens=3), null())
    assert [row.turns for row in rows] == [3, 1, 2]
    first, second, _ = rows[0].turn_tokens
    assert second == 3
    assert rows[0].token_ids[first + second - 1] not in TEMPLATE.stop_ids(TALK.stop_ids)


def test_a_batch_gives_the_text_of_single_prompts_and_drops_who_has_no_turn_left(tmp_path, asked):
    suite = suite_of(tmp_path / "q.jsonl")
    ((_, alone),) = measured(suite, null())
    asked.clear()
    ((_, together),) = measured(suite, null(), batch_size=3)
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]
    groups = [[r.prompt_id for r in requests] for nodes, requests in asked[2::2]]
    assert groups == [["1", "2", "3"], ["1#turn-2", "3#turn-2"], ["1#turn-3"]]


def test_most_turns_can_be_limited_and_it_is_said(tmp_path):
    suite = suite_of(tmp_path / "q.jsonl", max_turns=1)
    ((result, rows),) = measured(suite, null())
    assert [row.turns for row in rows] == [1, 1, 1]
    assert any("later turns of 2 prompts are left out (max_turns=1)" in w for w in result.warnings)


def test_a_turn_without_room_is_not_asked_by_any_arm_and_is_told(tmp_path):
    small = target_of(
        tiny_model(layers=2, vocab=CHAT_VOCAB, max_position_embeddings=80), TALK.tokenizer
    )
    small.model.load_state_dict(TALK.model.state_dict())
    rows = [{"id": "a", "turns": ["Hi", "x" * 60]}, {"id": "b", "turns": ["Hi", "Yes?"]}]
    suite = suite_of(tmp_path / "q.jsonl", rows)
    ((result, found),) = measured(suite, null(), small, max_new_tokens=4)
    assert [row.turns for row in found] == [1, 2]
    (told,) = [w for w in result.warnings if "not asked" in w]
    assert told == ("later turns of 1 prompts were not asked: 1 with a prompt of 80 tokens or more")


def test_p63_context_lengths_count_every_turn_with_what_came_before_it(tmp_path):
    suite = suite_of(tmp_path / "q.jsonl")
    ((result, rows),) = measured(suite, null())
    assert sum(c.counts.prompts for c in result.context_lengths.values()) == 6
    assert sum(c.counts.tokens for c in result.context_lengths.values()) == result.counts.tokens
    first = max(suite.lengths.values())
    assert max(int(name.split("-")[1]) for name in result.context_lengths) > first


def test_p55_a_turn_that_repeats_an_earlier_answer_is_no_loop(tmp_path, monkeypatch):
    def same(target, drafter, requests, **options):
        for done in decode(target, drafter, requests, **options):
            done.token_ids[:] = range(20, 20 + len(done.token_ids))
            yield done

    monkeypatch.setattr(timing, "decode", same)
    suite = suite_of(tmp_path / "q.jsonl", ROWS[:1], max_new_tokens=40)
    ((result, rows),) = measured(suite, null(), stops=(), check_equality=False)
    assert rows[0].turn_tokens == [40, 40, 40]
    assert repeated_ngram_share(rows[0].token_ids) > LOOP_SHARE
    assert result.loops == {}
    assert rows[0].repeated_ngram_share == 0.0
