"""The texts of a run: fetched, read, and cut by the tokens of the model under test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppl.errors import BadAnswer, PplError
from ppl.facts import TextFacts
from ppl.options import Options
from ppl.transport import Endpoint
from texts import cut as cutting
from texts import fetch, manifest, sources
from texts.cut import Tokenizer
from texts.errors import TextError

BYTES = "UTF-8 bytes"
SAMPLE = "The quick brown fox; naïve café, 千里之行。 def f(x): return x**2\n"
"""What both servers' tokenizers are asked for, to see that they agree."""


@dataclass(frozen=True)
class Input:
    """One text as token ids."""

    facts: TextFacts
    ids: tuple[int, ...]

    @property
    def name(self) -> str:
        """The text's id."""
        return self.facts.text


def documents(
    options: Options, say: Callable[[str], None]
) -> tuple[list[sources.Document], list[str]]:
    """Fetch and read texts; returns them, and a warning for each that was left out.

    Raises
    ------
    TextError : one can't be had, and the run may not go on without it.

    """
    known = manifest.builtin()
    specs = options.texts or tuple(t.id for t in known.default() if options.full or not t.long)
    builtin = known.choose(tuple(s for s in specs if any(t.id == s for t in known.text)))

    def report(what: str, had: int, whole: int) -> None:
        if had >= whole:
            say(f"fetched {what}: {whole / 1e6:.1f} MB")

    done = fetch.fetch(known, builtin, without_broken=options.without_broken, report=report)
    left = dict(done.left_out)
    found = _read(
        [s for s in specs if s not in left], known, left, without_broken=options.without_broken
    )
    warnings = [f"WITHOUT text {name}: {why}" for name, why in left.items()]
    if not found:
        raise PplError("no texts: there is nothing to score")
    return found, warnings


def _read(
    specs: Sequence[str], known: manifest.Manifest, left: dict[str, str], *, without_broken: bool
) -> list[sources.Document]:
    """Read texts; what can't be read goes into ``left`` where the run may go on without it."""
    if not without_broken:
        return list(sources.documents(specs, known))
    found: list[sources.Document] = []
    for spec in specs:
        try:
            mine = list(sources.documents([spec], known))
        except TextError as e:
            left[spec] = str(e)
            continue
        names = {d.id for d in found}
        found += [d for d in mine if d.id not in names]
        left |= {d.id: "another text is called so" for d in mine if d.id in names}
    return found


def of_server(endpoint: Endpoint, model: str) -> Tokenizer | None:
    """Return the server's own tokenizer; None where it has none."""

    def ids(text: str) -> Sequence[int]:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        answer = endpoint.post("/tokenize", body)
        if not isinstance(answer, dict) or not isinstance(answer.get("tokens"), list):
            raise BadAnswer("/tokenize gives no tokens")
        found: list[int] = answer["tokens"]
        return found

    try:
        ids(SAMPLE)
    except BadAnswer:
        return None
    return ids


def tokenizer(
    endpoints: Sequence[tuple[Endpoint, str]], folder: str | None
) -> tuple[Tokenizer, str, list[str]]:
    """Return how texts become ids, what that is called, and what is amiss between the servers."""
    found = [of_server(endpoint, model) for endpoint, model in endpoints]
    if found and found[0] is not None:
        samples = [list(t(SAMPLE)) if t is not None else None for t in found]
        unlike = any(s != samples[0] for s in samples)
        amiss = ["the arms' tokenizers give other ids for the same text"] if unlike else []
        return found[0], "the server's /tokenize", amiss
    local = _local(folder)
    if local is not None:
        return local, "the model's tokenizer files", []
    return cutting.utf8_bytes, BYTES, []


def _local(folder: str | None) -> Tokenizer | None:
    from pathlib import Path

    if folder is None or not list(Path(folder).glob("tokenizer*")):
        return None
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise PplError("the model has a tokenizer that needs transformers: install it") from None
    loaded = AutoTokenizer.from_pretrained(folder)

    def ids(text: str) -> Sequence[int]:
        found: list[int] = loaded.encode(text, add_special_tokens=False)
        return found

    return ids


def cut(
    found: Sequence[sources.Document], tokenize: Tokenizer, least: int, most: int
) -> list[Input]:
    """Cut documents; a long one to 100,000 tokens and more where texts are taken at full length."""
    made = []
    for d in found:
        long = d.long and least >= cutting.LEAST
        low, high = (cutting.LONG_LEAST, cutting.LONG_MOST) if long else (least, most)
        done = cutting.cut(d.id, d.text, tokenize, least=low, most=high)
        facts = TextFacts(
            text=d.id,
            title=d.title,
            source=d.source,
            sha256=d.sha256,
            tokens=len(done.ids),
            ids_sha256=done.ids_sha256,
        )
        made.append(Input(facts, done.ids))
    _apart(made)
    return made


def _apart(made: Sequence[Input]) -> None:
    """Refuse a text that is another's beginning: statistics take texts as independent.

    Raises
    ------
    PplError : one is.

    """
    ordered = sorted(made, key=lambda i: i.ids)
    for one, following in itertools.pairwise(ordered):
        if following.ids[: len(one.ids)] == one.ids:
            raise PplError(
                f"texts {one.name} and {following.name} are the same text, which would count "
                "twice: leave one of them out"
            )
