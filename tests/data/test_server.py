"""Answers from a server: the same rows as from our own engine, or a clear refusal."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chat_server import SLOW, ChatServer, serving
from fixtures_chat import CHATML, IM_END, chat_tokenizer
from models import target_of
from training import CHAT_VOCAB, chat_target, talking_target

from headstart.data.answering import Answer, Ask, EngineBackend
from headstart.data.generate import generate
from headstart.data.generate_config import GenerateConfig
from headstart.data.http_json import HttpClient, HttpRefusal
from headstart.data.rows import read_rows
from headstart.data.server import ServerBackend, ServerConfig
from headstart.data.source import DataConfig
from headstart.data.template import ChatTemplate, TokenRow
from headstart.eval.engine.sampling import SamplingConfig
from headstart.heads.target import Target

PROBES = 3
"""Completions that a server is asked for before the first answer."""


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with serving(talking_target()) as chat:
        yield chat


def backend(
    chat: ChatServer,
    target: Target | None = None,
    *,
    timeout: float = 30.0,
    retries: int = 2,
    in_flight: int = 4,
    model: str | None = None,
    **sampling: Any,
) -> ServerBackend:
    target = target or talking_target()
    template = ChatTemplate(target.tokenizer)
    return ServerBackend(
        HttpClient(chat.url, timeout=timeout, retries=retries, wait=lambda seconds: None),
        target,
        template,
        sampling=SamplingConfig(**sampling),
        stop_ids=template.stop_ids(target.stop_ids),
        in_flight=in_flight,
        model=model,
    )


def asks(count: int = 6, limit: int = 12, temperature: float = 0.0) -> list[Ask]:
    template = ChatTemplate(chat_tokenizer())
    prompts = (template.prompt_ids([{"role": "user", "content": f"q{n}"}]) for n in range(count))
    return [Ask(f"p{n}", tuple(ids), limit, temperature) for n, ids in enumerate(prompts)]


def by_id(answers: Iterator[Answer]) -> dict[str, Answer]:
    found = list(answers)
    assert len({a.prompt_id for a in found}) == len(found)
    return {answer.prompt_id: answer for answer in found}


def ours(asked: list[Ask]) -> dict[str, Answer]:
    """Answer with our own engine."""
    target = talking_target()
    stop_ids = ChatTemplate(target.tokenizer).stop_ids(target.stop_ids)
    engine = EngineBackend(target, sampling=SamplingConfig(), stop_ids=stop_ids, batch_size=4)
    return by_id(engine.answers(asked))


def rows_of(
    directory: Path, path: Path, *, url: str | None = None, new: int = 40, **config: Any
) -> list[TokenRow]:
    generate(
        talking_target(),
        data=DataConfig(path=str(path), num_prompts=None, split="all", max_length=400),
        sampling=SamplingConfig(),
        config=GenerateConfig(max_new_tokens=new, server=ServerConfig(url=url), **config),
        directory=directory,
    )
    return list(read_rows(directory)[0])


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A file of conversations of one, two and three questions."""
    path = tmp_path / "chats.jsonl"
    rows = [
        {"id": f"c{n}", "turns": [f"question {n}.{t}" for t in range(n % 3 + 1)]} for n in range(9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# The same rows


@pytest.mark.parametrize("options", [{}, {"keeps_stop": False}, {"gives_ids": False}], ids=str)
def test_rows_from_a_server_are_those_from_our_own_engine(tmp_path, chats, options):
    with serving(talking_target(), **options) as chat:
        served = rows_of(tmp_path / "served", chats, url=chat.url, new=6)
    made = rows_of(tmp_path / "made", chats, new=6)
    assert served == made
    assert {row.stop_reason for row in made} == {"stop", "length"}
    assert any(answers_in(row) > 1 for row in made)


def answers_in(row: TokenRow) -> int:
    """Count the runs of supervised tokens."""
    return sum(b > a for a, b in pairwise([0, *row.loss_mask]))


def test_prompts_go_out_as_ids_and_nothing_is_left_to_the_servers_defaults(server):
    """vLLM takes what a request leaves open from the model's generation_config.json."""
    asked = asks(1, temperature=0.7)
    list(backend(server, temperature=0.7, seed=3, top_p=0.9).answers(asked))
    body = server.asked[PROBES]
    assert body["prompt"] == list(asked[0].token_ids)
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, -1)
    assert (body["min_p"], body["repetition_penalty"]) == (0.0, 1.0)
    assert body["max_tokens"] == 12
    assert body["stop_token_ids"] == [2, IM_END]
    assert body["return_token_ids"] is True
    assert body["skip_special_tokens"] is False


def test_every_prompt_has_a_seed_of_its_own_that_follows_the_runs(server):
    seeds = []
    for seed in (0, 0, 1):
        server.asked.clear()
        list(backend(server, seed=seed).answers(asks(4)))
        seeds.append({tuple(b["prompt"]): b["seed"] for b in server.asked[PROBES:]})
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0].values())) == 4


def test_as_many_requests_are_under_way_as_asked_for_and_no_more(server):
    server.delay = 0.05
    assert len(by_id(backend(server, in_flight=3).answers(asks(9)))) == 9
    assert server.most_under_way == 3


# Trouble on the way


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop", "cut", "slow"])
def test_a_request_that_fails_for_a_passing_reason_is_tried_again(server, fault):
    back = backend(server, timeout=SLOW / 2 if fault == "slow" else 30.0)
    server.faults.extend([fault, "", fault])
    assert by_id(back.answers(asks())) == ours(asks())
    assert len(server.asked) == PROBES + 6 + 2


def test_waits_grow_and_end(server):
    waits: list[float] = []
    client = HttpClient(server.url, timeout=5, retries=7, wait=waits.append)
    server.faults.extend(["500"] * 8)
    with pytest.raises(ConnectionError, match="no answer in 8 tries, the last one: status 500"):
        client.post("/v1/completions", {})
    assert waits == [1, 2, 4, 8, 16, 30, 30]


def test_a_refusal_is_not_tried_again(server):
    back = backend(server)
    server.faults.append("400")
    with pytest.raises(HttpRefusal, match="/v1/completions: status 400: told to say 400"):
        list(back.answers(asks(1)))
    assert len(server.asked) == PROBES + 1


def test_answers_that_came_before_a_failure_are_handed_out(server):
    back = backend(server, retries=0, in_flight=2)
    server.faults.extend(["", "", "", "500"])
    had = []
    with pytest.raises(ConnectionError):
        collect(back.answers(asks(9)), had)
    assert 3 <= len(had) <= 4
    assert len(server.asked) <= PROBES + 5


def collect(answers: Iterator[Answer], had: list[Answer]) -> None:
    for answer in answers:
        had.append(answer)


def test_a_run_that_lost_its_server_goes_on_where_it_stopped(tmp_path, chats):
    with serving(talking_target()) as chat:
        chat.faults.extend([""] * (PROBES + 5) + ["400"])
        with pytest.raises(HttpRefusal):
            rows_of(tmp_path / "rows", chats, url=chat.url, batch_size=1)
        assert len(chat.asked) == PROBES + 6
        chat.asked.clear()
        resumed = rows_of(tmp_path / "rows", chats, url=chat.url, batch_size=1)
        asked = len(chat.asked) - PROBES
    assert resumed == rows_of(tmp_path / "whole", chats)
    assert asked + 5 == len((tmp_path / "rows" / "answers.jsonl").read_text().splitlines())


def test_a_finished_set_needs_no_server(tmp_path, chats):
    with serving(talking_target()) as chat:
        first = rows_of(tmp_path / "rows", chats, url=chat.url)
    assert rows_of(tmp_path / "rows", chats, url=chat.url) == first


def test_a_server_that_is_not_there_is_named():
    client = HttpClient("http://127.0.0.1:9", timeout=5, retries=1, wait=lambda seconds: None)
    with pytest.raises(ConnectionError, match="127.0.0.1:9/v1/models: no answer in 2 tries"):
        client.get("/v1/models")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(url):
    told = f"generate.server.url={url}: not an address; expected something like http://host"
    with pytest.raises(ValueError, match=re.escape(told)):
        ServerConfig(url=url)


def test_an_address_may_end_in_v1(server):
    client = HttpClient(f"{server.url}/v1/", timeout=5, retries=0)
    assert client.get("/v1/models")["data"][0]["id"] == "tiny-talking"


def test_a_key_is_read_from_the_environment_and_sent(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    config = ServerConfig(url=server.url, key_variable="MY_KEY")
    config.client().post("/v1/completions", asks_body())
    assert server.keys == ["Bearer secret"]
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match="key_variable=MY_KEY: no such environment variable"):
        config.client()


def asks_body() -> dict[str, Any]:
    return {"prompt": [5], "max_tokens": 1, "temperature": 0, "seed": 0, "stop_token_ids": []}


def test_ctrl_c_does_not_wait_for_a_server_that_answers_nothing(server, tmp_path):
    code = (
        "from test_server import asks, backend\n"
        "from types import SimpleNamespace\n"
        f"back = backend(SimpleNamespace(url={server.url!r}), timeout=300.0)\n"
        "input()\n"
        "list(back.answers(asks(2)))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": path}
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(run, env=environment, **pipes)
    wait_until(lambda: len(server.asked) == PROBES)
    server.delay = 120.0
    process.stdin.write(b"\n")
    process.stdin.flush()
    wait_until(lambda: len(server.asked) > PROBES)
    process.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate(timeout=30)[1]


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


# Another model, another template


def test_a_server_whose_answers_cannot_be_compared_is_refused(server):
    server.reply = lambda body: reply("\ufffd")
    with pytest.raises(ValueError, match="no answer of model tiny-talking could be compared"):
        backend(server)


def test_another_model_under_the_targets_name_is_refused():
    with serving(talking_target(seed=1)) as chat:
        with pytest.raises(ValueError, match="model tiny-talking is not the target .*nats"):
            backend(chat)


def test_a_model_of_another_name_is_refused_with_what_is_served():
    with serving(talking_target(), name="other/model") as chat:
        with pytest.raises(ValueError, match="serves other/model; the target is tiny-talking"):
            backend(chat)
        assert backend(chat, model="other/model").model == "other/model"
        with pytest.raises(ValueError, match="generate.server.model=mine: .* serves other/model"):
            backend(chat, model="mine")


def test_another_chat_template_is_refused_with_both_renderings():
    shouting = CHATML.replace("'<|im_start|>'", "'<|im_start|>!'")
    target = target_of(talking_target().model, chat_tokenizer(shouting), name="tiny-talking")
    with serving(target) as chat:
        with pytest.raises(ValueError, match="renders a chat as '<|im_start|>!user.*the target as"):
            backend(chat)


def test_a_template_that_writes_todays_date_is_not_compared_and_the_tokenizer_is(caplog):
    caplog.set_level("INFO")
    dated = "{{ strftime_now('%d %b %Y') }}" + CHATML
    target, other = (
        target_of(talking_target().model, chat_tokenizer(dated, merges=merges), name="tiny-talking")
        for merges in ((), (("u", "s"),))
    )
    with serving(target) as chat:
        backend(chat, target=target)
        assert "writes today's date and is not compared" in caplog.text
        with pytest.raises(ValueError, match="serve the target with its own tokenizer"):
            backend(chat, target=other)


def test_another_tokenizer_is_noticed_where_only_text_is_tokenised():
    target = target_of(
        talking_target().model, chat_tokenizer(merges=(("a", "n"),)), name="tiny-talking"
    )
    with serving(target, tokenizes="text") as chat:
        with pytest.raises(ValueError, match="serve the target with its own tokenizer"):
            backend(chat)


@pytest.mark.parametrize("tokenizes", ["text", "no"])
def test_a_server_that_tokenises_no_chats_is_compared_by_what_it_can(tokenizes):
    with serving(talking_target(), tokenizes=tokenizes) as chat:
        assert by_id(backend(chat).answers(asks())) == ours(asks())


def test_a_server_that_changes_prompts_is_refused(server):
    server.reply = lambda body: reply("ok", prompt_token_ids=[1, *body["prompt"]])
    with pytest.raises(ValueError, match="probe 1 was sent as .* tokens, the server read"):
        backend(server)


def test_a_token_outside_the_vocabulary_is_another_model(server):
    back = backend(server)
    server.reply = lambda body: reply("ok", token_ids=[CHAT_VOCAB])
    with pytest.raises(ValueError, match="token 261 is outside the vocabulary of tiny-talking"):
        list(back.answers(asks(1)))


def test_what_is_no_openai_server_is_told(server):
    back = backend(server)
    server.reply = lambda body: {"detail": "moved"}
    with pytest.raises(RuntimeError, match="prompt p0 ended with finish_reason=None; "):
        list(back.answers(asks(1)))


# How answers end


def reply(text: str, reason: str = "stop", count: int | None = None, **more: Any) -> dict[str, Any]:
    usage = {} if count is None else {"completion_tokens": count}
    return {"choices": [{"text": text, "finish_reason": reason, **more}], "usage": usage}


def read(server: ChatServer, made: dict[str, Any], limit: int = 12) -> Answer:
    """Return what becomes of a reply."""
    back = backend(server)
    server.reply = lambda body: made
    (answer,) = back.answers(asks(1, limit))
    return answer


def ids(text: str) -> list[int]:
    return chat_tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("made", "want", "reason"),
    [
        (reply("", "length", token_ids=[70, 71]), [70, 71], "length"),
        (reply("ab", "length"), ids("ab"), "length"),
        (reply("", "stop", token_ids=[70, IM_END]), [70, IM_END], "stop"),
        (reply("", "stop", token_ids=[70]), [70, IM_END], "stop"),
        (reply("", "stop", token_ids=[70], stop_reason=2), [70, 2], "stop"),
        (reply("", "stop", token_ids=[70], stop_reason=None, matched_stop=2), [70, 2], "stop"),
        (reply("", "stop", response_token_ids=[70, 2]), [70, 2], "stop"),
        (reply("ab", "stop"), [*ids("ab"), IM_END], "stop"),
        (reply("", "length", token_ids=[70, IM_END, 71]), [70, IM_END], "stop"),
        (reply("", "stop", token_ids=list(range(70, 82))), list(range(70, 82)), "length"),
    ],
)
def test_p08_an_answer_ends_with_a_stop_token_exactly_when_the_model_stopped(
    server, made, want, reason
):
    assert read(server, made) == Answer("p0", want, reason)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (reply("ab\ufffd", "length"), "whose text does not tokenise back to itself"),
        (reply("abc", "length", 2), "another number of tokens than were sampled"),
        (reply("abc", "length", 4), "another number of tokens than were sampled"),
        (reply("abc", "stop", 5), "another number of tokens than were sampled"),
        (reply("", "length"), "with an empty answer"),
        (reply("", "stop", token_ids=[9], stop_reason=9), "ended by token 9, which ends no answer"),
    ],
)
def test_text_that_cannot_stand_for_the_sampled_tokens_is_unusable(server, made, why):
    answer = read(server, made)
    assert answer.token_ids == []
    assert why in answer.unusable


@pytest.mark.parametrize("count", [3, 4])
def test_a_stop_token_may_be_counted_or_not(server, count):
    assert read(server, reply("abc", "stop", count)).unusable == ""


def test_unusable_answers_are_dropped_counted_and_not_asked_again(tmp_path, chats):
    with serving(talking_target(), gives_ids=False) as chat:
        answered = chat.completion

        def odd(body: dict[str, Any]) -> dict[str, Any]:
            bad = len(chat.asked) in (PROBES + 1, PROBES + 2)
            return reply("\ufffd", "length") if bad else answered(body)

        chat.reply = odd
        first = rows_of(tmp_path / "rows", chats, url=chat.url, batch_size=1)
        count = len(chat.asked)
        summary = read_rows(tmp_path / "rows")[1].summary
        assert "dropped: 2 whose text does not tokenise back to itself" in summary
        assert len({row.row_id.split("-")[0] for row in first}) == 7
        assert rows_of(tmp_path / "rows", chats, url=chat.url, batch_size=1) == first
        assert len(chat.asked) == count


def test_the_servers_own_context_limits_answers():
    with serving(talking_target(), context=200) as chat:
        back = backend(chat)
        prompt = (*asks(1)[0].token_ids, *[70] * 200)
        list(back.answers([Ask("tight", prompt[:197], 12)]))
        assert chat.asked[-1]["max_tokens"] == 3
        (answer,) = back.answers([Ask("full", prompt[:200], 12)])
    assert answer.unusable == "with a prompt that fills the server's context of 200 tokens"


def test_random_bytes_are_no_text():
    """A target that emits any byte: its answers cannot be told from their text."""
    with serving(chat_target(), gives_ids=False) as chat:
        with pytest.raises(ValueError, match="the last whose text does not tokenise back"):
            backend(chat, chat_target())
