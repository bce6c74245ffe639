"""One server's address: requests, and retries where the transport failed and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pydantic_core
import stamina

from ppl.errors import BadAnswer, Unreachable
from texts.index import shown

ATTEMPTS = 5
FIRST_WAIT_S, MOST_WAIT_S = 0.2, 5.0
CONNECT_S = 10.0
AGAIN = frozenset({429, 502, 503, 504})
"""Codes by which something between client and engine says that the request didn't get through."""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
OK = 200
WORDS = 200
"""Characters of a server's own message that are repeated."""


class _Again(Exception):
    """A code of ``AGAIN``."""


def no_retry_logs() -> None:
    """Keep stamina from logging: retries are counted, and told in the evidence."""
    stamina.instrumentation.set_on_retry_hooks([])


class Endpoint:
    """A server's HTTP interface.

    Parameters
    ----------
    url : without a path; a password in it is never shown.
    key : sent as a bearer token; never stored or shown.
    timeout_s : for the answer to one request.
    alive : whether a retry can help; a server of our own that has ended won't answer again.

    Attributes
    ----------
    retries : requests sent again, by what failed.

    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 1800.0,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.url = shown(url.rstrip("/"))
        self.retries: dict[str, int] = {}
        self._alive = alive
        self._why = ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx2.Client(
                base_url=url.rstrip("/"),
                headers=headers,
                timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S),
                # A proxy of the environment's is for the network outside.
                trust_env=httpx2.URL(url).host not in LOOPBACK,
            )
        except (httpx2.InvalidURL, ValueError) as e:
            raise BadAnswer(f"{self.url}: expected http://HOST:PORT ({e})") from None

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        before_again: Callable[[], None] = lambda: None,
    ) -> httpx2.Response:
        """Send a request and return the answer, whatever its code.

        Parameters
        ----------
        method, path, body : as HTTP has them; the body is sent as JSON.
        before_again : called before each retry.

        Raises
        ------
        Unreachable : after every retry.

        """
        try:
            for attempt in stamina.retry_context(
                on=self._mendable,
                attempts=ATTEMPTS,
                wait_initial=FIRST_WAIT_S,
                wait_max=MOST_WAIT_S,
                timeout=None,
            ):
                with attempt:
                    if attempt.num > 1:
                        self.retries[self._why] = self.retries.get(self._why, 0) + 1
                        before_again()
                    return self._once(method, path, body)
        except (httpx2.HTTPError, httpx2.InvalidURL, _Again) as e:
            words = f"{type(e).__name__.strip('_')}: {e}"[:WORDS]
            raise Unreachable(self.url, path, words) from None
        raise AssertionError

    def _mendable(self, error: Exception) -> bool:
        if not isinstance(error, httpx2.TransportError | _Again) or not self._alive():
            return False
        self._why = str(error) if isinstance(error, _Again) else type(error).__name__
        return True

    def _once(self, method: str, path: str, body: Any) -> httpx2.Response:
        answer = self._client.request(method, path, json=body)
        if answer.status_code in AGAIN:
            raise _Again(f"HTTP {answer.status_code}")
        return answer

    def get(self, path: str) -> Any:
        """Return the JSON of a page; None where the server has no such page, or refuses it."""
        answer = self.send("GET", path)
        return parse(answer, path) if answer.status_code == OK else None

    def page(self, path: str) -> str | None:
        """Return the text of a page, or None."""
        answer = self.send("GET", path)
        return answer.text if answer.status_code == OK else None

    def post(self, path: str, body: Any) -> Any:
        """Return the JSON of an answer; None where the server refuses."""
        answer = self.send("POST", path, body)
        return parse(answer, path) if answer.status_code == OK else None


def parse(answer: httpx2.Response, path: str) -> Any:
    """Read JSON, NaN and infinities included: they are found and named later.

    Raises
    ------
    BadAnswer : it isn't JSON.

    """
    try:
        return pydantic_core.from_json(answer.content, allow_inf_nan=True, cache_strings="none")
    except ValueError as e:
        raise BadAnswer(f"{path} answered with what is no JSON ({str(e)[:WORDS]})") from None


def message(answer: httpx2.Response) -> str:
    """Return what a refusal says, in one short line."""
    try:
        found = pydantic_core.from_json(answer.content)
        text = found["error"]["message"] if "error" in found else found["message"]
    except (ValueError, KeyError, TypeError):
        text = answer.text
    return " ".join(str(text).split())[:WORDS]
