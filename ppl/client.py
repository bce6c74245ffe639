"""Scoring one text on one server: ids out, the same ids and one log-probability a token back.

Two ways, where the server has both shown equal bit for bit before either is used:

- ``/v1/completions`` with ``prompt_logprobs``: entry i + 1 is keyed by its token's id, so a row
  that belongs to another token is seen.
- ``/inference/v1/generate`` with ``prompt_logprob_token_ids``: float32 as it is, 15 times smaller.
"""

from __future__ import annotations

import base64
import binascii
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx2
import numpy as np
from numpy.typing import NDArray

from ppl.errors import BadAnswer
from ppl.store import MOST
from ppl.transport import OK, Endpoint, message, parse

Method = Literal["prompt_logprobs", "prompt_logprob_token_ids"]
Best = tuple[NDArray[np.int32], NDArray[np.float32]]
MOST_IDS = 2**31
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"


@dataclass(frozen=True)
class Scored:
    """One answer: float32 ``[tokens - 1]`` in nats, and the facts of the exchange.

    ``cached_tokens`` is None where the server doesn't tell it. ``best`` has the ids and
    log-probabilities of the best tokens, ``[tokens - 1, k]`` int32 and float32, best first, where
    k of them were asked for.
    """

    values: NDArray[np.float32]
    cached_tokens: int | None
    wall_s: float
    answer_bytes: int
    best: Best | None = None


def score(
    endpoint: Endpoint,
    model: str,
    ids: Sequence[int],
    method: Method = "prompt_logprobs",
    *,
    best: int = 0,
    before_again: Callable[[], None] = lambda: None,
) -> Scored:
    """Return the log-probability of ``ids[1:]``, each given all before it.

    Parameters
    ----------
    best : how many of the best tokens of each row to ask for as well, by ``prompt_logprobs`` alone;
        a server's ``--max-logprobs`` must allow them.

    Raises
    ------
    Unreachable : no answer, after every retry.
    BadAnswer : an answer that must not be scored, by what is wrong with it.

    """
    path, body = request(model, ids, method, best)
    began = time.perf_counter()
    answer = endpoint.send("POST", path, body, before_again=before_again)
    wall_s = time.perf_counter() - began
    if answer.status_code != OK:
        raise BadAnswer(f"refused with HTTP {answer.status_code}: {message(answer)}")
    values, cached, top = read(answer, ids, method, best)
    return Scored(values, cached, wall_s, len(answer.content), top)


def request(
    model: str, ids: Sequence[int], method: Method, best: int = 0
) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request."""
    if method == "prompt_logprobs":
        return COMPLETIONS, {
            "model": model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": best,
            "return_token_ids": True,
        }
    return GENERATE, {
        "model": model,
        "token_ids": list(ids),
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprob_token_ids": [[i] for i in ids[1:]],
        },
        "return_token_ids": True,
    }


def read(
    answer: httpx2.Response, ids: Sequence[int], method: Method, best: int = 0
) -> tuple[NDArray[np.float32], int | None, Best | None]:
    """Return the values of an answer, its cached tokens and its best tokens, all checked."""
    body = parse(answer, COMPLETIONS if method == "prompt_logprobs" else GENERATE)
    try:
        choice = body["choices"][0]
        usage = body.get("usage") or {}
        if method == "prompt_logprobs":
            echoed, values = choice["prompt_token_ids"], choice["prompt_logprobs"]
        else:
            echoed, values = body["prompt_token_ids"], body["prompt_token_id_logprobs"]
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise BadAnswer(f"an answer of another form: {str(body)[:120]}") from None
    _same_ids(echoed, ids)
    if values is None:
        raise BadAnswer("no prompt log-probs (null): preempted, or the server doesn't give them")
    rows = _keyed(values, ids) if method == "prompt_logprobs" else _npy(values, ids)
    top = _best(values, ids, best, rows) if best else None
    return rows, None if cached is None else int(cached), top


def _same_ids(echoed: Any, ids: Sequence[int]) -> None:
    if echoed is None:
        raise BadAnswer("the server didn't return the token ids: return_token_ids is ignored")
    if echoed != list(ids):
        n = min(len(echoed), len(ids))
        row = next((i for i in range(n) if echoed[i] != ids[i]), n)
        raise BadAnswer(
            f"answered for other token ids than it was sent: {len(echoed):,} for {len(ids):,}, the "
            f"first that differs is number {row:,}"
        )


def _keyed(entries: list[Any], ids: Sequence[int]) -> NDArray[np.float32]:
    """Read rows keyed by token id: ``[null, {"id": {"logprob": x, ...}}, ...]``."""
    if len(entries) != len(ids):
        raise BadAnswer(
            f"short: {max(len(entries) - 1, 0):,} rows for {len(ids):,} tokens, expected one fewer"
        )
    if entries[0] is not None:
        raise BadAnswer("the first token has a log-prob: the rows are shifted, or made otherwise")
    try:
        found = [entry[str(i)]["logprob"] for entry, i in zip(entries[1:], ids[1:], strict=True)]
    except (KeyError, TypeError):
        raise BadAnswer(_what_is_wrong(entries, ids)) from None
    if None in found:
        raise BadAnswer(f"null in row {found.index(None):,}")
    try:
        wide = np.array(found, dtype=np.float64)
    except (ValueError, TypeError):
        raise BadAnswer("a log-prob that is no number") from None
    return _narrow(wide)


def _best(entries: list[Any], ids: Sequence[int], k: int, values: NDArray[np.float32]) -> Best:
    """Read the k best tokens of each row: an entry has them by rank, and its own token besides."""
    tokens, found = [], []
    for row, (entry, own) in enumerate(zip(entries[1:], ids[1:], strict=True)):
        ranked = [(t, x) for t, x in entry.items() if len(entry) == k or t != str(own)]
        try:
            ranked.sort(key=lambda pair: int(pair[1]["rank"]))
            if [x["rank"] for _, x in ranked] != list(range(1, k + 1)):
                raise BadAnswer(f"row {row:,} hasn't the {k} best tokens: the arg-max isn't given")
            tokens.append([int(t) for t, _ in ranked])
            found.append([float(x["logprob"]) for _, x in ranked])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BadAnswer(f"row {row:,} has best tokens of another form") from None
        if not all(0 <= t < MOST_IDS for t in tokens[-1]):
            raise BadAnswer(f"row {row:,} has a best token that is no id: {tokens[-1]}")
    narrow = _narrow(np.array(found, dtype=np.float64).reshape(-1, k))
    for bad, what in (
        (~np.isfinite(narrow).all(axis=1), "a best token's log-prob is NaN or infinite"),
        ((narrow > MOST).any(axis=1), "a best token's log-prob is above 0"),
        (
            (narrow[:, 1:] > narrow[:, :-1]).any(axis=1) | (values > narrow[:, 0]),
            "the token that is ranked first isn't the most probable one",
        ),
    ):
        if bad.any():
            raise BadAnswer(f"row {int(bad.argmax()):,}: {what}")
    return np.array(tokens, dtype=np.int32).reshape(-1, k), narrow


def _what_is_wrong(entries: list[Any], ids: Sequence[int]) -> str:
    for row in range(1, len(ids)):
        entry = entries[row]
        if entry is None:
            return f"null in row {row - 1:,}"
        if not isinstance(entry, dict) or not isinstance(entry.get(str(ids[row]), {}), dict):
            return f"row {row - 1:,} has another form: {str(entry)[:60]}"
        if str(ids[row]) in entry:
            continue
        for by in (-1, 1):
            fits = [
                isinstance(entries[r], dict) and str(ids[r + by]) in entries[r]
                for r in range(row, min(row + 20, len(ids) - 1))
            ]
            if fits and all(fits):
                return f"shifted by one token from row {row - 1:,} on"
        return f"row {row - 1:,} is of token {', '.join(list(entry)[:3])}, expected {ids[row]}"
    return "rows of another form"


def _npy(text: Any, ids: Sequence[int]) -> NDArray[np.float32]:
    """Read a base64 .npy of float32, ``[tokens - 1, 1]``."""
    try:
        data = base64.b64decode(text, validate=True)
        values = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, TypeError, binascii.Error, EOFError):
        raise BadAnswer("log-probs that are no .npy in base64") from None
    if values.dtype != np.float32 or values.shape != (len(ids) - 1, 1):
        raise BadAnswer(
            f"log-probs of shape {list(values.shape)} and {values.dtype}, expected "
            f"[{len(ids) - 1}, 1] of float32"
        )
    return np.ascontiguousarray(values[:, 0])


def _narrow(wide: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return float32, from which JSON was written, exactly: rounded digits would hide bits."""
    narrow = wide.astype(np.float32)
    moved = np.isfinite(wide) & (narrow.astype(np.float64) != wide)
    if moved.any():
        row = int(moved.reshape(len(moved), -1).any(axis=1).argmax())
        raise BadAnswer(
            f"row {row:,} is {wide[moved][0]!r}, no float32: something on the way rounds "
            "log-probs, which hides differences"
        )
    return narrow
