"""Answers from an OpenAI-compatible server (vLLM, SGLang, ...) that serves the target.

Prompts go out as token ids and answers come back as token ids where the server can, so nothing is
tokenised twice. Before the first answer the server is compared with the target; see
server_checks.py.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import Any

from headstart.data.answering import Answer, Ask, at_temperature
from headstart.data.http_json import HttpClient, is_address
from headstart.data.server_checks import (
    check_answers,
    check_prompt,
    check_template,
    name_of_target,
    probes,
    served_models,
)
from headstart.data.template import ChatTemplate
from headstart.eval.engine.sampling import SamplingConfig
from headstart.heads.target import Target


@dataclass
class ServerConfig:
    """A server that answers in place of our own engine."""

    url: str | None = None
    """Address of an OpenAI-compatible server of the target, http://host:8000; null: our engine."""
    model: str | None = None
    """The server's name for the target; null: the target's own path or its last part."""
    timeout: float = 600.0
    """Seconds that a reply may take."""
    retries: int = 5
    """Further tries of a request that failed for a reason that may pass."""
    key_variable: str | None = None
    """Environment variable that holds the server's API key; null sends none."""

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"generate.server.timeout={self.timeout}: need more than 0 seconds")
        if self.url is not None and not is_address(self.url):
            raise ValueError(
                f"generate.server.url={self.url}: not an address; expected something like "
                "http://host:8000"
            )
        if self.retries < 0:
            raise ValueError(f"generate.server.retries={self.retries}: need at least 0")

    def client(self) -> HttpClient:
        """Return a client of the server. Raises ValueError for a missing key or a bad address."""
        key = None
        if self.key_variable is not None:
            key = os.environ.get(self.key_variable)
            if not key:
                raise ValueError(
                    f"generate.server.key_variable={self.key_variable}: no such environment "
                    "variable; export the key under that name"
                )
        assert self.url is not None, "no server was configured"
        return HttpClient(self.url, timeout=self.timeout, retries=self.retries, key=key)


class ServerBackend:
    """Answers asks through a server, `in_flight` at a time.

    Raises ValueError when the server does not serve this target with this chat template, and
    ConnectionError when it cannot be reached.
    """

    def __init__(
        self,
        client: HttpClient,
        target: Target,
        template: ChatTemplate,
        *,
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        in_flight: int,
        model: str | None = None,
    ) -> None:
        self.client, self.target, self.template = client, target, template
        self.sampling, self.stop_ids, self.in_flight = sampling, list(stop_ids), in_flight
        served = served_models(client)
        self.model = name_of_target(client.url, served, target.name, model)
        self.context: int | None = served[self.model].get("max_model_len")
        """Tokens that the server takes, prompt and answer together; None where it does not say."""
        check_template(client, self.model, template)
        check_answers(
            client.url, self.model, target, [(p, self._answer(p)) for p in probes(template)]
        )

    def answers(self, asks: Sequence[Ask]) -> Iterator[Answer]:
        """Answer every ask; answers come in the order they finish.

        After a failure nothing more is sent; what is under way is waited for and handed out first.
        """
        failure: Exception | None = None
        todo: SimpleQueue[Ask | None] = SimpleQueue()
        done: SimpleQueue[Answer | Exception] = SimpleQueue()

        def work() -> None:
            while (ask := todo.get()) is not None:
                try:
                    done.put(self._answer(ask))
                except Exception as error:  # raised again by whoever takes the answers
                    done.put(error)

        waiting, threads = iter(asks), min(self.in_flight, len(asks))
        for _ in range(threads):  # daemons: Ctrl-C does not wait for a server's replies
            Thread(target=work, daemon=True).start()
        running = 0
        try:
            for ask in islice(waiting, threads):
                todo.put(ask)
                running += 1
            while running:
                answer = done.get()
                running -= 1
                if isinstance(answer, Exception):
                    failure = failure or answer
                    continue
                for ask in islice(waiting, 0 if failure else 1):
                    todo.put(ask)
                    running += 1
                yield answer
        finally:
            for _ in range(threads):
                todo.put(None)
        if failure is not None:
            raise failure

    def _answer(self, ask: Ask) -> Answer:
        limit = ask.max_new_tokens
        if self.context is not None:
            limit = min(limit, self.context - len(ask.token_ids))
        if limit < 1:
            reason = f"with a prompt that fills the server's context of {self.context} tokens"
            return Answer(ask.prompt_id, [], "context", reason)
        sampling = at_temperature(self.sampling, ask.temperature)
        body = {
            "model": self.model,
            "prompt": list(ask.token_ids),
            "max_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # Said although neutral: vLLM takes what is left open from generation_config.json.
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": _seed(sampling.seed, ask.prompt_id),
            "stop_token_ids": self.stop_ids,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        reply = self.client.post("/v1/completions", body)
        answer = self._read(reply, ask, limit)
        if any(not 0 <= token < self.target.shape.vocab_size for token in answer.token_ids):
            raise ValueError(
                f"{self.client.url}: token {max(answer.token_ids)} is outside the vocabulary of "
                f"{self.target.name}; serve the target, or set target.path to what is served"
            )
        return answer

    def _read(self, reply: Any, ask: Ask, limit: int) -> Answer:
        """Turn a reply into what our own engine would have returned."""
        try:
            choice = reply["choices"][0]
            text, reason = choice["text"], choice["finish_reason"]
        except (KeyError, IndexError, TypeError):
            reason = None
        if reason not in ("stop", "length"):
            raise RuntimeError(
                f"{self.client.url}: prompt {ask.prompt_id} ended with finish_reason={reason!r}; "
                "expected stop or length; run the same command again, what was finished is kept"
            )
        check_prompt(self.client.url, choice, ask)
        # vLLM and SGLang call the same things by two names.
        ids = choice.get("token_ids") or choice.get("response_token_ids")
        named = (choice.get("stop_reason"), choice.get("matched_stop"))
        told = next((name for name in named if name is not None), None)  # 0 is a token
        if isinstance(told, int) and told not in self.stop_ids:
            reason = f"ended by token {told}, which ends no answer of the target"
            return Answer(ask.prompt_id, [], "stop", reason)
        if ids is None:
            ids, unusable = self._encode(text, reason, reply.get("usage") or {})
            if unusable:
                return Answer(ask.prompt_id, [], reason, unusable)
        ids, reason = self._closed(ids, reason, told, limit)
        return Answer(ask.prompt_id, ids, reason, "" if ids else "with an empty answer")

    def _encode(self, text: str, reason: str, usage: dict[str, int]) -> tuple[list[int], str]:
        """Tokenise an answer again, and say why it cannot stand for what was sampled, if so.

        Servers count the stop token or leave it out, so an answer that stopped may count one more.
        """
        tokenizer = self.template.tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "\ufffd" in text or tokenizer.decode(ids, skip_special_tokens=False) != text:
            return [], "whose text does not tokenise back to itself"
        counted = usage.get("completion_tokens", len(ids))
        if counted - len(ids) not in ((0, 1) if reason == "stop" else (0,)):
            return [], "whose text tokenises into another number of tokens than were sampled"
        return ids, ""

    def _closed(
        self, ids: list[int], reason: str, told: int | str | None, limit: int
    ) -> tuple[list[int], str]:
        """End an answer with its stop token exactly when the model stopped."""
        first = next((place for place, token in enumerate(ids) if token in self.stop_ids), None)
        if first is not None:
            return ids[: first + 1], "stop"
        if reason == "stop":
            # Left out by the server. Where it does not tell which token it was, it is taken for
            # the end of turn, with which the template closes an answer.
            ids = [*ids, told if isinstance(told, int) else self.template.end_of_turn_id]
        return (ids, reason) if len(ids) <= limit else (ids[:limit], "length")


def _seed(seed: int, prompt_id: str) -> int:
    """Return a seed of 31 bits for one answer, so that servers that honour it repeat themselves."""
    digest = hashlib.blake2b(json.dumps([seed, prompt_id]).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
