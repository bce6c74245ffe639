"""What the benchmark client sends: requests of their own, or sessions that share a long prefix.

The client is given blocks of ``BLOCK`` tokens by number, and draws the same ids for the same number
in every launch. A request of its own has blocks that no other has. Turn ``t`` of session ``s`` is

    prefix, the new blocks of (s, 0), (s, 1), ... (s, t)

so all sessions share the prefix, and a session's turn holds its earlier ones. Turns are sent in the
order (0, 0), (1, 0), ... (S - 1, 0), (0, 1), ...: at most ``concurrency`` at a time, and each as
one of those before it is done. What the server answered is no part of the next turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppl.errors import PplError

BLOCK = 16
"""Tokens that the client draws from one seed; a prompt is a list of such seeds."""


@dataclass(frozen=True)
class Load:
    """What the client sends at one level of concurrency.

    Attributes
    ----------
    input_tokens, output_tokens : of each request; of a session the tokens of its last turn.
    requests : of each run; ``concurrency`` of them at a time.
    repeats : runs in a launch, each after a warm-up.
    sessions : 0 where every request is its own; else ``requests`` is ``sessions * turns``.
    shared_tokens : of the prefix that all sessions share.
    turns, turn_tokens : of a session, and the tokens that each turn adds.

    """

    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int
    repeats: int
    sessions: int = 0
    shared_tokens: int = 0
    turns: int = 0
    turn_tokens: int = 0


@dataclass(frozen=True)
class Sessions:
    """What sessions are asked for; ``sessions`` is the level's concurrency where it is None."""

    shared_tokens: int
    turns: int
    turn_tokens: int
    sessions: int | None = None


def levels(
    concurrency: Sequence[int],
    *,
    repeats: int,
    output_tokens: int,
    input_tokens: int = 0,
    requests: int = 0,
    sessions: Sessions | None = None,
) -> list[Load]:
    """Return a load for each level of concurrency, rising.

    Parameters
    ----------
    input_tokens, requests : where every request is its own.

    Raises
    ------
    PplError : no level, or sessions that can't be sent so.

    """
    rising = sorted(set(concurrency))
    if not rising or rising[0] < 1:
        raise PplError("--concurrency: expected positive numbers, such as 1,8,70")
    if sessions is None:
        return [Load(input_tokens, output_tokens, requests, level, repeats) for level in rising]
    _check(sessions, rising[-1])
    made = []
    for level in rising:
        count = sessions.sessions or level
        made.append(
            Load(
                input_tokens=sessions.shared_tokens + sessions.turns * sessions.turn_tokens,
                output_tokens=output_tokens,
                requests=count * sessions.turns,
                concurrency=level,
                repeats=repeats,
                sessions=count,
                shared_tokens=sessions.shared_tokens,
                turns=sessions.turns,
                turn_tokens=sessions.turn_tokens,
            )
        )
    return made


def _check(sessions: Sessions, most: int) -> None:
    for name in ("shared_tokens", "turn_tokens"):
        value = getattr(sessions, name)
        if value < BLOCK or value % BLOCK:
            option = f"--{name.replace('_', '-')}"
            raise PplError(f"{option} {value}: expected a positive multiple of {BLOCK}")
    if sessions.turns < 1:
        raise PplError(f"--turns {sessions.turns}: expected at least 1")
    if sessions.sessions is not None and sessions.sessions < most:
        raise PplError(
            f"--sessions {sessions.sessions}: {most} requests at a time need as many sessions"
        )


def trace(load: Load, folder: Path) -> tuple[Path, Path]:
    """Write the requests and those of the warm-up, as block numbers: the same for every launch.

    The warm-up's requests have the sessions' prefix and nothing else of theirs, or nothing that any
    other request has: after it a run finds the prefix in the cache, and no turn.

    Returns
    -------
    The two files; the second has ``warm_requests(load)`` requests.

    """
    lines = _turns(load) if load.sessions else _own(load)
    made = []
    for name, some in (("requests", lines[: load.requests]), ("warm", lines[load.requests :])):
        path = folder / f"{name}-{load.concurrency}.jsonl"
        path.write_text("\n".join(map(json.dumps, some)) + "\n", encoding="utf-8")
        made.append(path)
    return made[0], made[1]


def warm_requests(load: Load) -> int:
    """Return how many requests the warm-up has."""
    return max(2, load.concurrency)


def _line(tokens: int, load: Load, blocks: Sequence[int]) -> dict[str, object]:
    return {
        "timestamp": 0,
        "input_length": tokens,
        "output_length": load.output_tokens,
        "hash_ids": list(blocks),
    }


def _own(load: Load) -> list[dict[str, object]]:
    blocks = -(-load.input_tokens // BLOCK)
    return [
        _line(load.input_tokens, load, range(request * blocks, (request + 1) * blocks))
        for request in range(load.requests + warm_requests(load))
    ]


def _turns(load: Load) -> list[dict[str, object]]:
    prefix, blocks = load.shared_tokens // BLOCK, load.turn_tokens // BLOCK
    made = []
    for turn in range(load.turns):
        for session in range(load.sessions):
            start = prefix + session * load.turns * blocks
            own = range(start, start + (turn + 1) * blocks)
            tokens = load.shared_tokens + (turn + 1) * load.turn_tokens
            made.append(_line(tokens, load, [*range(prefix), *own]))
    beyond = prefix + load.sessions * load.turns * blocks
    for request in range(warm_requests(load)):
        start = beyond + request * blocks
        own = range(start, start + blocks)
        made.append(_line(load.shared_tokens + load.turn_tokens, load, [*range(prefix), *own]))
    return made


def tokenizer(model: Path, folder: Path) -> Path:
    """Return the model's tokenizer, or a stand-in that only knows how many ids the model has.

    The client wants one to draw ids from; the requests are ids, so nothing is tokenized.
    """
    if not (model / "config.json").is_file() or (model / "tokenizer_config.json").is_file():
        return model
    from tokenizers import Tokenizer, models

    size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    place = folder / "tokenizer"
    place.mkdir(exist_ok=True)
    words = {f"t{i}": i for i in range(size)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(  # noqa: S106 - a word, not a secret
        str(place / "tokenizer.json")
    )
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    return place
