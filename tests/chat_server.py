"""A small OpenAI-compatible server on this machine, answering from a tiny target.

It can be told to misbehave: `faults` are used up by the next completions, one each.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import NoDrafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.heads.target import Target

SLOW = 2.0
"""Seconds that a slow reply takes."""


class ChatServer:
    """What the server serves, what it was asked, and how it misbehaves."""

    def __init__(
        self,
        target: Target,
        *,
        name: str | None = None,
        gives_ids: bool = True,
        keeps_stop: bool = True,
        tokenizes: str = "chat",
        context: int | None = None,
    ) -> None:
        self.target, self.name = target, name or target.name
        self.gives_ids, self.keeps_stop, self.tokenizes = gives_ids, keeps_stop, tokenizes
        self.context = context
        self.faults: deque[str] = deque()
        self.reply: Callable[[dict[str, Any]], Any] | None = None
        """Makes the reply to a completion request in place of the target."""
        self.asked: list[dict[str, Any]] = []
        """Bodies of the completion requests, in order."""
        self.keys: list[str | None] = []
        self.delay = 0.0
        """Seconds every completion takes."""
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        self.url = ""

    def models(self) -> dict[str, Any]:
        model = {"id": self.name, "object": "model"}
        return {"data": [model | ({"max_model_len": self.context} if self.context else {})]}

    def tokens(self, body: dict[str, Any]) -> list[int] | None:
        """Tokenise as asked; None where this server cannot."""
        if "messages" in body and self.tokenizes == "chat":
            tokenizer = self.target.tokenizer  # not our own rendering: a server has a clock
            return list(
                tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)[
                    "input_ids"
                ]
            )
        if "prompt" in body and self.tokenizes != "no":
            encode = self.target.tokenizer.encode
            return encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        return None

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer with the target."""
        sampling = SamplingConfig(temperature=body["temperature"], seed=body["seed"])
        request = Request("asked", tuple(body["prompt"]), body["max_tokens"])
        with self.lock:
            (done,) = decode(
                self.target,
                NoDrafter(),
                [request],
                sampling=sampling,
                stop_ids=body["stop_token_ids"],
            )
        ids, choice = done.token_ids, {"index": 0, "finish_reason": done.stop_reason}
        stopped = done.stop_reason == "stop"
        shown = ids[:-1] if stopped else ids
        choice["text"] = self.target.tokenizer.decode(shown, skip_special_tokens=False)
        if self.gives_ids:
            choice["token_ids"] = ids if self.keeps_stop else shown
            choice["prompt_token_ids"] = body["prompt"]
        if stopped:
            choice["stop_reason"] = ids[-1]
        return {"choices": [choice], "usage": {"completion_tokens": len(ids)}}


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self._send(200 if known else 404, self.server.chat.models() if known else {})

    def do_POST(self) -> None:
        chat: ChatServer = self.server.chat
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            tokens = chat.tokens(body)
            self._send(*((404, {}) if tokens is None else (200, {"tokens": tokens})))
        elif self.path == "/v1/completions":
            self._complete(chat, body)
        else:
            self._send(404, {})

    def _complete(self, chat: ChatServer, body: dict[str, Any]) -> None:
        with chat.lock:
            chat.asked.append(body)
            chat.keys.append(self.headers["Authorization"])
            fault = chat.faults.popleft() if chat.faults else ""
            chat.under_way += 1
            chat.most_under_way = max(chat.most_under_way, chat.under_way)
        time.sleep(SLOW if fault == "slow" else chat.delay)
        answered = not (fault == "drop" or fault.isdigit())
        reply = (chat.reply or chat.completion)(body) if answered else None
        with chat.lock:
            chat.under_way -= 1
        if fault == "drop":
            self.close_connection = True
        elif fault.isdigit():
            self._send(int(fault), {"error": {"message": f"told to say {fault}"}})
        else:
            self._send(200, reply, promised=10 if fault == "cut" else 0)

    def _send(self, status: int, value: Any, *, promised: int = 0) -> None:
        content = json.dumps(value).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) + promised))
            self.end_headers()
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has given up on a slow reply


@contextmanager
def serving(target: Target, **options: Any) -> Iterator[ChatServer]:
    """Serve a target on a free port for the length of a block."""
    chat = ChatServer(target, **options)
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    http.daemon_threads, http.chat = True, chat
    chat.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield chat
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
