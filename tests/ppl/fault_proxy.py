"""An honest HTTP proxy in front of a server, real or fake, that plants one fault.

It forwards everything as it is, but for what its fault changes. ``none`` is every fault's clean
twin: the same proxy, changing nothing.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from fake_vllm import _Server, log_probs

Change = Callable[["Proxy", str, bytes, bytes, int], tuple[bytes, int]]
"""Of a proxy, a path, the request's body, the answer's body and its code."""

SCORES = "/v1/completions"
TIMEOUT_S = 300.0


def _edit(change: Callable[[dict[str, Any], int], None]) -> Change:
    """Make a fault that changes the choice of every scored answer; told its number."""

    def of(proxy: Proxy, path: str, _asked: bytes, answer: bytes, code: int) -> tuple[bytes, int]:
        if path != SCORES or code != 200:
            return answer, code
        body = json.loads(answer)
        change(body["choices"][0], proxy.number)
        return json.dumps(body).encode(), code

    return of


def _values(choice: dict[str, Any]) -> list[Any]:
    return [next(iter(row.values())) for row in choice["prompt_logprobs"][1:]]


def _set(choice: dict[str, Any], row: int, value: Any) -> None:
    _values(choice)[row]["logprob"] = value


def _shift_rows(choice: dict[str, Any], _: int) -> None:
    rows = choice["prompt_logprobs"]
    choice["prompt_logprobs"] = [None, *rows[2:], rows[1]]


def _shift_values(choice: dict[str, Any], _: int) -> None:
    values = [v["logprob"] for v in _values(choice)]
    for entry, value in zip(_values(choice), [values[-1], *values[:-1]], strict=True):
        entry["logprob"] = value


def _drop_row(choice: dict[str, Any], _: int) -> None:
    del choice["prompt_logprobs"][-1]


def _other_ids(choice: dict[str, Any], _: int) -> None:
    choice["prompt_token_ids"] = [*choice["prompt_token_ids"][:-1], 7]


def _round(choice: dict[str, Any], _: int) -> None:
    for value in _values(choice):
        value["logprob"] = round(value["logprob"], 4)


def _round_to_float32(choice: dict[str, Any], _: int) -> None:
    import numpy as np

    for value in _values(choice):
        value["logprob"] = float(np.float32(round(value["logprob"], 4)))


def _sixteen_bits(choice: dict[str, Any], _: int) -> None:
    import numpy as np

    for value in _values(choice):
        bits = np.float32(value["logprob"]).view(np.uint32) & np.uint32(0xFFFF0000)
        value["logprob"] = float(bits.view(np.float32))


def _constant(choice: dict[str, Any], _: int) -> None:
    for value in _values(choice):
        value["logprob"] = -1.0


def _repeated(
    proxy: Proxy, path: str, _asked: bytes, answer: bytes, code: int
) -> tuple[bytes, int]:
    """Return the ids and keys of this request with the values of the first."""
    if path != SCORES or code != 200:
        return answer, code
    body = json.loads(answer)
    found = _values(body["choices"][0])
    proxy.kept = proxy.kept or json.dumps([v["logprob"] for v in found]).encode()
    kept = json.loads(proxy.kept)
    for i, value in enumerate(found):
        value["logprob"] = kept[i % len(kept)]
    return json.dumps(body).encode(), code


def _one_text_of_others(
    _: Proxy, path: str, asked: bytes, answer: bytes, code: int
) -> tuple[bytes, int]:
    """Score the text that begins with 1 from other ids, under the ids and keys that were sent."""
    if path != SCORES or code != 200:
        return answer, code
    ids = json.loads(asked)["prompt"]
    body = json.loads(answer)
    if ids[0] == ord("1"):
        others = log_probs([i + 1 for i in ids])
        for value, other in zip(_values(body["choices"][0]), others, strict=True):
            value["logprob"] = float(other)
    return json.dumps(body).encode(), code


def _ranked(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows whose own token isn't among the two best that were asked for."""
    return [row for row in choice["prompt_logprobs"][1:] if row is not None and len(row) == 3]


def _swap_best(choice: dict[str, Any], _: int) -> None:
    """Have the second best token first, and the first second: no score moves."""
    for row in _ranked(choice)[::50]:
        own, first, second = row
        found = list(row.values())
        row.clear()
        row |= {own: found[0], second: found[1], first: found[2]}


def _first_is_not_best(choice: dict[str, Any], n: int) -> None:
    for row in _ranked(choice)[:1] if n > 6 else ():
        first, second = list(row.values())[1:]
        first["logprob"], second["logprob"] = second["logprob"], first["logprob"]


def _best_is(name: str, value: Any) -> Callable[[dict[str, Any], int], None]:
    """Give a best token of one row another log-prob, or another id."""

    def change(choice: dict[str, Any], n: int) -> None:
        for row in _ranked(choice)[:1] if n > 6 else ():
            second = list(row)[2]
            entry = row.pop(second)
            row[value if name == "id" else second] = entry | ({} if name == "id" else {name: value})

    return change


def _no_ranks(choice: dict[str, Any], n: int) -> None:
    for row in _ranked(choice) if n > 6 else ():
        del row[list(row)[1]]


def _only_calls(_: Proxy, path: str, _asked: bytes, answer: bytes, code: int) -> tuple[bytes, int]:
    if path == "/metrics":
        hidden = (b"bytegate_pack", b"bytegate_ch", b"bytegate_co", b"vllm:request_success")
        answer = b"\n".join(x for x in answer.split(b"\n") if not x.startswith(hidden))
    return answer, code


def _one_rank(_: Proxy, path: str, _asked: bytes, answer: bytes, code: int) -> tuple[bytes, int]:
    if path == "/metrics":
        answer = b"\n".join(x for x in answer.split(b"\n") if b'rank="1"' not in x)
    return answer, code


def _never_the_same(
    proxy: Proxy, path: str, asked: bytes, answer: bytes, code: int
) -> tuple[bytes, int]:
    """Have other workers after each request for the text that begins with 1."""
    if path == SCORES and json.loads(asked)["prompt"][0] == ord("1"):
        proxy.kept += b"."
    if path == "/collective_rpc":
        body = json.loads(answer)
        for tally in body["results"]:
            if "pid" in tally:
                tally["pid"] += len(proxy.kept)
        answer = json.dumps(body).encode()
    return answer, code


def _null_row(choice: dict[str, Any], _: int) -> None:
    choice["prompt_logprobs"][40] = None


def _no_log_probs(choice: dict[str, Any], _: int) -> None:
    choice["prompt_logprobs"] = None


def _small_bias(choice: dict[str, Any], _: int) -> None:
    import numpy as np

    for i, value in enumerate(_values(choice)):
        if i >= 512:
            value["logprob"] = float(np.float32(min(value["logprob"] - 3e-4, 0)))


def _one_in(n: int) -> Change:
    def of(proxy: Proxy, path: str, _asked: bytes, answer: bytes, code: int) -> tuple[bytes, int]:
        if path == SCORES and proxy.number % n == 0:
            return b'{"error": {"message": "dropped by the proxy"}}', 500
        return answer, code

    return of


def _stale(proxy: Proxy, path: str, _asked: bytes, answer: bytes, code: int) -> tuple[bytes, int]:
    """Answer everything with the first answer."""
    if path != SCORES:
        return answer, code
    proxy.kept = proxy.kept or answer
    return proxy.kept, code


def _prefix_cache(
    _: Proxy, path: str, _asked: bytes, answer: bytes, code: int
) -> tuple[bytes, int]:
    text = answer.decode()
    if path == "/metrics":
        text = text.replace('enable_prefix_caching="False"', 'enable_prefix_caching="True"')
    elif path.startswith("/server_info"):
        text = text.replace('"enable_prefix_caching": false', '"enable_prefix_caching": true')
        text = text.replace('"enable_prefix_caching":false', '"enable_prefix_caching":true')
    return text.encode(), code


def _cached_tokens(
    _: Proxy, path: str, _asked: bytes, answer: bytes, code: int
) -> tuple[bytes, int]:
    if path != SCORES or code != 200:
        return answer, code
    body = json.loads(answer)
    body["usage"]["prompt_tokens_details"] = {"cached_tokens": 16}
    return json.dumps(body).encode(), code


def _no_dev_mode(_: Proxy, path: str, _asked: bytes, answer: bytes, code: int) -> tuple[bytes, int]:
    closed = path.startswith(("/server_info", "/collective_rpc"))
    return (b'{"detail": "Not Found"}', 404) if closed else (answer, code)


def _busy_once(
    proxy: Proxy, path: str, _asked: bytes, answer: bytes, code: int
) -> tuple[bytes, int]:
    if path == SCORES and not proxy.kept:
        proxy.kept = b"said"
        return b"busy", 503
    return answer, code


FAULTS: dict[str, Change] = {
    "none": lambda _p, _path, _asked, answer, code: (answer, code),
    "shift rows": _edit(_shift_rows),
    "shift values": _edit(_shift_values),
    "short": _edit(_drop_row),
    "-9999.0": _edit(lambda choice, n: _set(choice, 60, -9999.0) if n % 3 == 0 else None),
    "NaN": _edit(lambda choice, n: _set(choice, 60, float("nan")) if n % 3 == 0 else None),
    "null": _edit(lambda choice, n: _set(choice, 60, None) if n % 3 == 0 else None),
    "null row": _edit(_null_row),
    "no log-probs": _edit(_no_log_probs),
    "other ids": _edit(_other_ids),
    "best tokens swapped": _edit(_swap_best),
    "first isn't best": _edit(_first_is_not_best),
    "best tokens lacking": _edit(_no_ranks),
    "best is NaN": _edit(_best_is("logprob", float("nan"))),
    "best is infinite": _edit(_best_is("logprob", float("-inf"))),
    "best is no id": _edit(_best_is("id", str(2**40))),
    "best is negative": _edit(_best_is("id", "-7")),
    "best is a list": _edit(_best_is("logprob", [])),
    "one text of other ids": _one_text_of_others,
    "rounded": _edit(_round),
    "rounded to float32": _edit(_round_to_float32),
    "16 bits": _edit(_sixteen_bits),
    "constant": _edit(_constant),
    "repeated": _repeated,
    "only calls": _only_calls,
    "one rank": _one_rank,
    "never the same": _never_the_same,
    "bias": _edit(_small_bias),
    "one in 5 fails": _one_in(5),
    "stale": _stale,
    "prefix cache": _prefix_cache,
    "cached tokens": _cached_tokens,
    "busy once": _busy_once,
    "no dev mode": _no_dev_mode,
}


class Proxy:
    """A running proxy; ``number`` counts scored requests."""

    def __init__(self, upstream: str, fault: str = "none") -> None:
        self.upstream = upstream
        self.change = FAULTS[fault]
        self.number = 0
        self.kept = b""
        self.server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
            """Log nothing."""

        def forward(self, data: bytes | None) -> None:
            kept = ("Content-Type", "Authorization")
            headers = {k: v for k, v in self.headers.items() if k in kept}
            asked = urllib.request.Request(  # noqa: S310 - an address of the test's
                proxy.upstream + self.path, data, headers
            )
            try:
                with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:  # noqa: S310
                    body, code = answer.read(), answer.status
            except urllib.error.HTTPError as e:
                body, code = e.read(), e.code
            except OSError:
                self.close_connection = True
                return
            if self.path == SCORES:
                proxy.number += 1
            body, code = proxy.change(proxy, self.path, data or b"", body, code)
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.forward(None)

        def do_POST(self) -> None:
            self.forward(self.rfile.read(int(self.headers["Content-Length"])))

    return Handler
