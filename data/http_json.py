"""JSON over HTTP with timeouts and bounded retries; nothing beyond the standard library."""

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger(__name__)
PASSING = (408, 425, 429)
"""Statuses, beside 500 and above, that another try may cure."""
LONGEST_WAIT = 30.0


def is_address(url: str) -> bool:
    """Whether a text is the address of a server, such as http://host:8000."""
    return urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)


class HttpRefusal(ValueError):
    """The server answered that it will not do what was asked; another try would not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _TryAgain(Exception):
    """One try failed in a way that may pass."""


class HttpClient:
    """Talks to one server; one client may be shared by threads.

    A request that fails in a way that may pass (no connection, a dropped one, a time-out, status
    429 or 500 and above) is tried `retries` more times, after 1, 2, 4, ... seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        retries: int,
        key: str | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        assert is_address(url), f"{url}: who configures a server checks its address"
        # Users copy the address with /v1 from a client's settings, where it belongs.
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout, self.retries, self._wait = timeout, retries, wait
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        local = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
        # A proxy for the outside world cannot see this machine's own servers.
        handlers = [urllib.request.ProxyHandler({})] if local else []
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str) -> Any:
        """Return the JSON of a page. Raises as `post` does."""
        return self._request(path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send JSON and return the JSON that comes back.

        Raises HttpRefusal (a ValueError) when the server refuses, and ConnectionError when no try
        came through.
        """
        return self._request(path, json.dumps(body).encode())

    def _request(self, path: str, body: bytes | None) -> Any:
        for number in range(self.retries + 1):
            if number:
                self._wait(min(2.0 ** (number - 1), LONGEST_WAIT))
            try:
                return self._once(path, body)
            except _TryAgain as failure:
                reason = str(failure)
                log.warning("%s%s: try %d failed: %s", self.url, path, number + 1, reason)
        raise ConnectionError(
            f"{self.url}{path}: no answer in {self.retries + 1} tries, the last one: {reason}; "
            "see to the server and run the same command again, what was finished is kept"
        )

    def _once(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(self.url + path, data=body, headers=self._headers)
        try:
            with self._opener.open(request, timeout=self.timeout) as reply:
                content = reply.read()
        except urllib.error.HTTPError as error:
            told = f"status {error.code}: {_message(error)}"
            if error.code >= 500 or error.code in PASSING:
                raise _TryAgain(told) from error
            raise HttpRefusal(error.code, f"{self.url}{path}: {told}") from error
        except TimeoutError as error:
            raise _TryAgain(f"no reply within {self.timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise _TryAgain(str(getattr(error, "reason", error)) or repr(error)) from error
        try:
            return json.loads(content)
        except ValueError as error:
            raise HttpRefusal(
                200, f"{self.url}{path}: the reply is not JSON; is this an OpenAI-compatible server"
            ) from error


def _message(error: urllib.error.HTTPError) -> str:
    """Return what the server says about an error, however it wraps it, in one short line."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        text = ""
    try:
        told = json.loads(text)
        told = told.get("error", told) if isinstance(told, dict) else told
        text = str(told.get("message", told) if isinstance(told, dict) else told)
    except ValueError:
        pass
    return " ".join(text.split())[:300] or error.reason
