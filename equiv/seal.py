"""The digest that an evidence file carries of itself: damage shows, whoever reads it.

It is taken over the JSON's values in one canonical form, without the field that holds it, so
indentation and the order of keys don't count. It guards against corruption, not against forgery:
whoever edits a file on purpose can seal it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FIELD = "content_sha256"
"""The field that holds the digest."""


def loads(data: str | bytes) -> Any:
    """Read JSON in which no object has a key twice.

    Raises
    ------
    ValueError : it is no JSON, which has no NaN either; or a key stands twice: then readers differ
        on what it says.

    """
    return json.loads(data, object_pairs_hook=_once, parse_constant=_no_number)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"an object has the key {key!r} twice")
        made[key] = value
    return made


def digest_of(raw: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object's values, its own digest left out."""
    rest = {name: value for name, value in raw.items() if name != FIELD}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(text: str) -> str:
    """Return a JSON object's text with its digest in it, indented by one."""
    raw = json.loads(text)
    raw[FIELD] = digest_of(raw)
    return json.dumps(raw, indent=1, allow_nan=False) + "\n"


def broken(raw: Mapping[str, Any]) -> str:
    """Say how an object departs from the digest that it carries; empty where it doesn't.

    Evidence of before there were digests has an empty one, and passes here.
    """
    stated = raw.get(FIELD, "")
    if not stated or stated == digest_of(raw):
        return ""
    return (
        f"its content isn't what was written: {FIELD} is {str(stated)[:12]}..., and the content's "
        f"is {digest_of(raw)[:12]}..."
    )
