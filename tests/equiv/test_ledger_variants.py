"""Entries whose bytes are a variant's of whole outputs, and entries of some calling modes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsmla.faults.kernel import Insert
from equiv import ledger
from equiv.errors import UsageError
from equiv.ledger import Entry
from equiv.pairs import load_pair
from equiv.result import Result
from k3common import model
from k3decode.faults.kernel import Decode

Here = Callable[..., Result]
WORDS = "dsmla/own/cpu/shapes/T=5,H=2,dtype={},slots=scattered,rope=gptj/-/bits.0/eager/-"
EARLY = (
    "k3decode/own/cpu/modes/T=5,H=2,dtype=bf16,cache={},slots=scattered,scales={},rope=gptj"
    "/-/bits.0/{}/-"
)


def words(latent: Tensor, rope: Tensor) -> Tensor:
    """Make entries as vLLM's cache op does of fp16."""
    latent, rope = (x.contiguous().view(torch.int16) for x in (latent, rope))
    bits = (x.numpy().view(np.uint16) for x in (latent, rope))
    return torch.from_numpy(model.ds_entries_of_words(*bits))


def words_but_one(latent: Tensor, rope: Tensor) -> Tensor:
    made = words(latent, rope)
    made[-1, 7] ^= 0x40
    return made


def nobody(slot_mapping: Tensor) -> Tensor:
    """Store no token."""
    return torch.zeros_like(slot_mapping, dtype=torch.bool)


def mixed(kv_c: Tensor, rope: Tensor, kind: str) -> Tensor:
    """Make entries that are neither the right ones nor what was there, as a race may."""
    del kind
    return torch.cat((kv_c, rope), dim=-1).view(torch.int16).bitwise_not().view(kv_c.dtype)


def elsewhere(slot: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Give the entries places that aren't theirs."""
    block, position = slot // cache.shape[1], slot % cache.shape[1]
    return block, (position + 1) % cache.shape[1]


class Shifted(Decode):
    """A query that is wrong as well."""

    def __call__(self, *args: Any) -> Tensor:
        made = super().__call__(*args)
        made.view(torch.uint8)[0, 0, 0] ^= 1
        return made


def shipped(name: str) -> Entry:
    """Return an entry of the ledger, made to speak of a function on a CPU."""
    (found,) = (e for e in ledger.load() if e.id == name)
    return Entry(**{**vars(found), "candidates": ("own",), "devices": ("cpu",)})


def test_a_variants_bytes_are_declared_and_others_aren_t(run_here: Here) -> None:
    pair, entry = load_pair("dsmla"), shipped("dsmla-words")
    line = WORDS.format("fp16")
    found = run_here(Insert(entries=words), line, pair=pair, entries=[entry])
    assert (found.status, [h.entry for h in found.ledger]) == ("declared", ["dsmla-words"])
    assert found.ledger[0].elements > 0
    assert run_here(Insert(entries=words), line, pair=pair).status == "divergence"
    other = run_here(Insert(entries=words_but_one), line, pair=pair, entries=[entry])
    assert other.status == "divergence"
    assert other.detail.startswith("kv_cache: 1 bytes in 1 of ")
    clean = run_here(Insert(), line, pair=pair, entries=[entry])
    assert (clean.status, clean.eligible) == ("equal", ("dsmla-words",))


def test_a_variant_holds_where_its_entry_does(run_here: Here) -> None:
    entry = Entry(**{**vars(shipped("dsmla-words")), "case": (("dtype", ("bf16",)),)})
    line, pair = WORDS.format("fp16"), load_pair("dsmla")
    found = run_here(Insert(entries=words), line, pair=pair, entries=[entry])
    assert (found.status, found.eligible) == ("divergence", ())


@pytest.mark.parametrize(("cache", "scales"), [("auto", "one"), ("fp8", "power")])
def test_an_entry_of_a_mode_covers_that_mode_alone(run_here: Here, cache: str, scales: str) -> None:
    pair, early = load_pair("k3decode"), shipped("k3decode-early")
    assert early.modes == ("producer",)  # which needs a GPU: another one stands for it here
    entry = Entry(**{**vars(early), "modes": ("repeat",)})
    repeat, eager = (EARLY.format(cache, scales, m) for m in ("repeat", "eager"))
    lost = Decode(stored=nobody)
    found = run_here(lost, repeat, pair=pair, entries=[entry])
    assert (found.status, {h.entry for h in found.ledger}) == ("declared", {"k3decode-early"})
    assert found.eligible == ("k3decode-early",)
    found = run_here(lost, eager, pair=pair, entries=[entry])
    assert (found.status, found.eligible) == ("divergence", ())
    found = run_here(Shifted(stored=nobody), repeat, pair=pair, entries=[entry])
    assert found.status == "divergence"
    assert found.detail.startswith("mqa_q: ")


def test_a_race_leaves_any_bytes_in_an_entrys_place_and_nowhere_else(run_here: Here) -> None:
    pair = load_pair("k3decode")
    entry = Entry(**{**vars(shipped("k3decode-early")), "modes": ("repeat",)})
    line = EARLY.format("auto", "one", "repeat")
    found = run_here(Decode(entries=mixed), line, pair=pair, entries=[entry])
    assert (found.status, {h.entry for h in found.ledger}) == ("declared", {"k3decode-early"})
    found = run_here(Decode(place=elsewhere), line, pair=pair, entries=[entry])
    assert found.status == "divergence"
    assert found.detail.startswith("kv_cache: ")


VALID = {
    "id": '"X"',
    "pair": '"dsmla"',
    "candidates": '["vllm"]',
    "devices": '["cuda"]',
    "kind": '"bytes"',
    "reason": '"r"',
    "reference": '"d"',
    "variant": '"scale_of_words"',
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": '"crash"'}, "variant gives the bytes of whole outputs: not for kind 'crash'"),
        ({"actual": '["7f"]'}, "variant gives the bytes of whole outputs: not with actual"),
        ({"element": '"nan"'}, "variant gives the bytes of whole outputs: not with element"),
        ({"variant": "3"}, "variant must be a string, not 3"),
        ({"variant": '"none"'}, "unknown variant 'none'; pair dsmla has scale_of_words"),
        ({"modes": '"eager"'}, "modes must be a list of strings"),
        ({"modes": '["slowly"]'}, "unknown mode 'slowly'; pair dsmla has eager, "),
    ],
)
def test_a_wrong_entry_is_refused(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    def load(fields: dict[str, str]) -> None:
        lines = "".join(f"{k} = {v}\n" for k, v in fields.items())
        path = tmp_path / "ledger.toml"
        path.write_text(f"[[divergence]]\n{lines}", encoding="utf-8")
        ledger.check_names(ledger.load(path), load_pair("dsmla"))

    load(VALID)
    with pytest.raises(UsageError) as e:
        load({**VALID, **changes})
    assert said in str(e.value)
    assert len(str(e.value).splitlines()) == 1
