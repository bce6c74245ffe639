"""The few questions that a test asks a server: log-probs of a prompt, and its ranks' counts."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

TIMEOUT_S = 300.0


def log_probs(url: str, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the log-probability of ``ids[1:]``, each given what precedes it; float32 ``[n - 1]``.

    ``/v1/completions`` with ``prompt_logprobs=0``: floats in JSON are lossless for float32.
    """
    body = {
        "model": _get(url, "/v1/models")["data"][0]["id"],
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }
    choice = _post(url, "/v1/completions", body)["choices"][0]
    if choice["prompt_token_ids"] != list(ids):
        raise ValueError("the server answered for other token ids than it was sent")
    entries = [next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"][1:]]
    return np.array(entries, dtype=np.float32)


def generate(url: str, ids: Sequence[int], count: int) -> list[int]:
    """Return ``count`` greedily generated ids."""
    body = {
        "model": _get(url, "/v1/models")["data"][0]["id"],
        "prompt": list(ids),
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    found: list[int] = _post(url, "/v1/completions", body)["choices"][0]["token_ids"]
    return found


def ranks(url: str) -> list[dict[str, Any]]:
    """Return every rank's tally, by rank."""
    found = _post(url, "/collective_rpc", {"method": "bytegate_route"})["results"]
    return sorted(found, key=lambda tally: tally["rank"])


def untouched(url: str) -> list[dict[str, Any]]:
    """Return every rank's report on vLLM's own code (``kvroute.untouched``)."""
    found: list[dict[str, Any]] = _post(url, "/collective_rpc", {"method": "bytegate_untouched"})[
        "results"
    ]
    return found


def metrics(url: str) -> dict[str, float]:
    """Return the server's ``bytegate_*`` metrics, by name and labels."""
    with urllib.request.urlopen(url + "/metrics", timeout=TIMEOUT_S) as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("bytegate_")]
    return {name: float(value) for name, value in pairs}


def _get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=TIMEOUT_S) as answer:  # noqa: S310
        return json.load(answer)


def _post(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(  # noqa: S310
        url + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
        return json.load(answer)
