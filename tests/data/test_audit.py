"""The audit: sums that add over workers, overlap with evaluation prompts, and its pages."""

import json
import pickle
import tracemalloc
from pathlib import Path

import pytest
from fixtures_chat import chat_tokenizer
from training import command, save_target, saved

from headstart.data.audit import Audit
from headstart.data.audit_prompts import AuditConfig, new_audit
from headstart.data.audit_report import figures, histogram, markdown, short, write_audit
from headstart.data.conversations import MAX_REASONS, Conversation
from headstart.data.overlap import EvaluationPrompts, words_of
from headstart.data.render import Renderer
from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.template import ChatTemplate
from headstart.data.token_row import TokenRow

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def user(text: str, answer: str = "yes") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def row(name: str, tokens: list[int], supervised: int, stop: str | None = None) -> TokenRow:
    mask = [0] * (len(tokens) - supervised) + [1] * supervised
    return TokenRow(name, "other", tokens, mask, stop)


def audit_of(*texts: str, against: dict[str, list[str]] | None = None) -> Audit:
    audit = Audit(EvaluationPrompts(against) if against else None)
    template = ChatTemplate(chat_tokenizer())
    for number, text in enumerate(texts):
        template.rows(user(text), row_id=f"r{number}", category="c", max_length=1000, audit=audit)
    return audit


# Sums


def test_every_count_of_two_rows_is_theirs():
    audit = Audit()
    audit.see(user("a") + user("b"), "x")
    audit.keep(row("x", [9, 9, 5, 5, 6], 3))
    audit.see(user("c"), "y")
    audit.keep(row("y", [9, 7], 1, "length"))
    found = figures(audit)
    assert (found["conversations"], found["rows"], found["tokens"]) == (2, 2, 7)
    assert (found["supervised_tokens"], found["supervised_share"]) == (4, 4 / 7)
    assert found["user_turns"] == {"1": 1, "2": 1}
    assert found["stop_reasons"] == {"given": 1, "length": 1}
    assert found["row_tokens"] == {
        "mean": 3.5,
        "min": 2,
        "p10": 2,
        "p50": 2,
        "p90": 5,
        "p99": 5,
    } | {"max": 5}
    assert found["row_supervised_percent"]["max"] == 60
    assert found["distinct_supervised_tokens"] == 3


def test_the_coverage_is_that_of_the_most_frequent_supervised_tokens():
    audit = Audit()
    audit.keep(row("x", [1, 1, 1, 1, 5, 5, 5, 6, 6, 7], 6))
    assert [audit.coverage(size) for size in (1, 2, 3, 99)] == [3 / 6, 5 / 6, 1.0, 1.0]


def test_the_coverage_is_shown_up_to_the_first_size_that_holds_everything():
    audit = Audit()
    audit.keep(row("x", list(range(600)), 600))
    coverage = figures(audit)["draft_vocabulary_coverage"]
    assert coverage == {"256": 256 / 600, "512": 512 / 600, "1024": 1.0}


def test_duplicates_are_counted_by_ids_and_by_the_words_of_the_first_prompt():
    audit = audit_of("Say OK!", "say  ok", "Say OK!", "another")
    assert (audit.duplicate_rows, audit.duplicate_prompts) == (1, 2)


def test_what_the_row_length_cuts_away_is_counted_p08():
    audit = Audit()
    template = ChatTemplate(chat_tokenizer())
    prompt = len(template.prompt_ids(user("x")[:1]))
    for length in (prompt, prompt + 1, prompt + 4):
        template.rows(user("x"), row_id="r", category="c", max_length=length, audit=audit)
    assert audit.cut_away == 4 + 3 + 0
    assert (audit.dropped.total(), audit.noted.total(), audit.rows) == (1, 1, 2)


def test_lengths_fall_into_powers_of_two():
    audit = Audit()
    for length in (1, 16, 17, 32, 33, 100):
        audit.keep(row("x", [5] * length, 1))
    assert histogram(audit.lengths) == {"1-16": 2, "17-32": 2, "33-64": 1, "65-128": 1}


def test_the_audits_of_two_workers_add_up_to_the_audit_of_one():
    texts = [f"prompt {n % 7}" for n in range(20)] + [LONG, "<|im_end|>"]
    against = {"p": [LONG], "q": ["prompt 3"], "r": ["nowhere"]}
    whole = audit_of(*texts, against=against)
    template = ChatTemplate(chat_tokenizer())
    merged = Audit(whole.prompts)
    for part in (range(1, 22, 2), range(0, 22, 2)):
        worker = pickle.loads(pickle.dumps(merged.empty()))
        for n in part:
            template.rows(
                user(texts[n]), row_id=f"r{n}", category="c", max_length=1000, audit=worker
            )
        merged.merge(pickle.loads(pickle.dumps(worker)))
    assert figures(merged) == figures(whole)
    assert merged.samples == whole.samples
    assert len(whole.samples) == 8


def test_an_audit_of_many_rows_keeps_a_few_bytes_a_row():
    audit = Audit()
    tracemalloc.start()
    for number in range(2000):
        audit.see(user(f"prompt {number}"), f"r{number}")
        audit.keep(row(f"r{number}", [number % 200, *range(100)], 50))
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert audit.duplicate_prompts == 0
    assert kept / 2000 < 40  # two hashes of eight bytes, their spare room, and the counters


def test_reasons_that_quote_what_they_found_stay_few():
    whole = Audit()
    for part in range(3):
        audit = Audit()
        for n in range(1000):
            audit.drop(f"refused by the chat template ({part} {n})")
            audit.note(f"ended before a turn {part} {n}")
        whole.merge(audit)
    for counts in (whole.dropped, whole.noted):
        assert counts.total() == 3000
        assert len(counts) == MAX_REASONS + 1


# Overlap with evaluation prompts


@pytest.mark.parametrize(
    ("prompt", "text", "found"),
    [
        (LONG, f"Well: {LONG.upper()}, and so on", True),  # whatever the case and the punctuation
        (LONG, LONG.removesuffix(" fourteen"), True),  # thirteen words of fourteen
        (LONG, LONG.removeprefix("one two ").replace("three", "3"), False),
        ("one two three four five six", f"{LONG}", True),  # short: the whole prompt
        ("one two three four six five", f"{LONG}", False),
        ("one two three", LONG, False),  # very short: a whole turn only
        ("one two three", "One, two, three!", True),
        (
            "\u4f60\u597d\u5417\u6211\u5f88\u597d",
            "x\u4f60\u597d\u5417\u6211\u5f88\u597d\u3002",
            True,
        ),
        ("???", "???", True),
        ("???", "!!!", False),
    ],
)
def test_a_prompt_is_found_by_its_runs_of_words(prompt, text, found):
    audit = audit_of("something else", text, against={"p": [prompt]})
    assert audit.overlap.conversations == int(found)
    assert audit.overlap.examples == ["r1"] * found
    some, _ = audit.overlap.prompts(audit.prompts)
    assert some == ["p"] * found


def test_a_prompt_mostly_held_is_told_from_one_touched():
    shares = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
    audit = audit_of(shares[:29], against={"long": [shares], "short": [shares[:25]]})
    some, most = audit.overlap.prompts(audit.prompts)
    assert (some, most) == (["long", "short"], ["short"])


def test_answers_are_searched_and_system_turns_are_not():
    prompts = EvaluationPrompts({"p": [LONG]})
    audit = Audit(prompts)
    audit.see([{"role": "system", "content": LONG}, *user("x")], "a")
    assert audit.overlap.conversations == 0
    audit.see(user("x", LONG), "b")
    assert audit.overlap.examples == ["b"]


@pytest.mark.parametrize("prompt", [LONG, "one two three"])
def test_rows_that_came_tokenised_are_searched_and_in_no_count_of_turns(prompt):
    template = ChatTemplate(chat_tokenizer())
    names = {"category": "c", "max_length": 1000, "audit": Audit()}
    given = [
        Conversation(name, "c", (), *template.rows(user(text), row_id=name, **names))
        for name, text in (("held", prompt), ("other", "something else"))
    ]
    renderer = Renderer(template, 1000, 261, Audit(EvaluationPrompts({"p": [prompt]})))
    audit = renderer(given).audit
    assert audit.overlap.examples == ["held"]
    assert (audit.conversations, audit.turns.total()) == (2, 0)


def test_words_ignore_case_and_punctuation():
    assert words_of("It's 3 o'clock, \u00c9t\u00e9!") == [
        "it",
        "s",
        "3",
        "o",
        "clock",
        "\u00e9t\u00e9",
    ]


def test_suites_and_held_out_rows_are_both_searched_for(tmp_path):
    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"prompt": LONG, "id": "s"}) + "\n")
    template = ChatTemplate(chat_tokenizer())
    (held,) = template.rows(
        user("what is the colour of the sky"),
        row_id="h",
        category="c",
        max_length=1000,
        audit=Audit(),
    )
    writer = RowsWriter(tmp_path / "rows", RowsMeta("f", template.hash, {}))
    writer.add(held)
    writer.finish("", {})
    audit = new_audit(AuditConfig([str(suite), str(tmp_path / "rows")]), template)
    for text in (LONG, "what is the colour of the sky today", "unrelated words are here too"):
        audit.see(user(text), text[:4])
    overlap = figures(audit)["evaluation_overlap"]
    assert (overlap["prompts"], overlap["prompts_mostly_held"], overlap["conversations"]) == (
        2,
        2,
        2,
    )
    assert overlap["prompts_named"] == [f"{suite}#s", f"{tmp_path / 'rows'}#h"]


def test_a_suite_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="audit.against=.*none.jsonl: no such file"):
        new_audit(AuditConfig([str(tmp_path / "none.jsonl")]), ChatTemplate(chat_tokenizer()))


# Pages


def test_the_pages_hold_the_figures(tmp_path):
    audit = audit_of("hello", "<|im_end|>", against={"p": ["hello"]})
    told = write_audit(tmp_path, audit, chat_tokenizer(), source="kept 2 of 3 rows")
    assert json.loads((tmp_path / "audit.json").read_text()) == figures(audit, "kept 2 of 3 rows")
    page = (tmp_path / "audit.md").read_text()
    assert "source: kept 2 of 3 rows" in page
    assert "## Dropped" in page
    assert "with the special token &#60;&#124;im&#95;end&#124;&#62; inside a turn | 1 |" in page
    assert told == short(figures(audit, "kept 2 of 3 rows"))
    assert "evaluation prompts in training: 1 of 1 in part, 1 by four fifths or more" in told


def test_an_audit_of_nothing_can_be_written(tmp_path):
    write_audit(tmp_path, Audit(), chat_tokenizer())
    assert json.loads((tmp_path / "audit.json").read_text())["rows"] == 0
    assert "0 rows from 0 conversations" in markdown(figures(Audit()))


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>"])
def test_a_row_that_holds_a_script_is_inert_in_the_page(tmp_path, hostile):
    template = ChatTemplate(chat_tokenizer())
    audit = Audit()
    template.rows(
        user(hostile, hostile), row_id=hostile, category=hostile, max_length=999, audit=audit
    )
    audit.dropped[hostile] += 1
    write_audit(tmp_path, audit, template.tokenizer, source=hostile)
    page = (tmp_path / "audit.html").read_text()
    assert hostile[:4] not in page
    escaped = hostile.replace("<", "&lt;").replace(">", "&gt;")
    assert f"<mark>{escaped}&lt;|im_end|&gt;</mark>" in page
    assert hostile[:4] not in (tmp_path / "audit.md").read_text()


def test_prepare_writes_the_audit_and_shows_rows(tmp_path, capsys):
    chats = tmp_path / "chats.jsonl"
    lines = [json.dumps({"messages": user(f"hello {n}"), "id": f"c{n}"}) for n in range(3)]
    chats.write_text("\n".join([*lines, "{"]) + "\n")
    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"prompt": "Hello 2"}) + "\n")
    out = tmp_path / "rows"
    target = saved(save_target(tmp_path / "target"))
    options = [f"data.path={chats}", f"audit.against=[{suite}]", "show=2", f"out={out}"]
    command("prepare", *target, *options)
    shown = capsys.readouterr().out
    assert "c0 (other): 4 of" in shown
    assert "hello 0" in shown
    assert "[[yes<|im_end|>]]" in shown
    assert "c2" not in shown
    found = json.loads((out / "audit.json").read_text())
    assert found["rows"] == 3
    assert found["evaluation_overlap"]["examples"] == ["c2"]
    assert "not valid JSON" in found["source"]
    assert {"audit.md", "audit.html"} <= {path.name for path in Path(out).iterdir()}
