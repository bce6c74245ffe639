"""The ledger: what it declares, and that a damaged one is refused in one clear line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equiv import ledger
from equiv.errors import ExitCode, UsageError
from equiv.ledger import Entry, check_names, elements_covered
from equiv.pairs import load_pair

PAIR = load_pair("kvpack")

GOOD: dict[str, Any] = {
    "id": "D9",
    "pair": "kvpack",
    "candidates": ["triton", "vllm"],
    "devices": ["cuda"],
    "versions": {"torch": ">=2.11,<2.13", "vllm": "==0.33.0"},
    "kind": "bytes",
    "case": {"fp8": [1], "dtype": ["bf16", "fp16"]},
    "alignment": "aligned",
    "element": "overflow",
    "expected": ["7f", "ff"],
    "actual": ["7e", "fe"],
    "reason": "torch doesn't saturate",
    "reference": "docs/ledger.md",
}


def toml(value: Any) -> str:
    """Write a value as TOML; of what is tested here only tables differ from JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def table(**changes: Any) -> str:
    """One [[divergence]] table: the good one, with some fields changed, or left out where None."""
    fields = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}
    return "[[divergence]]\n" + "".join(f"{k} = {toml(v)}\n" for k, v in fields.items())


def load(tmp_path: Path, text: str | bytes) -> tuple[Entry, ...]:
    path = tmp_path / "ledger.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ledger.load(path)


def entry(tmp_path: Path, **changes: Any) -> Entry:
    (found,) = load(tmp_path, table(**changes))
    return found


def refused(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(UsageError) as e:
        load(tmp_path, text)
    assert e.value.exit_code == ExitCode.USAGE
    assert len(str(e.value).splitlines()) == 1
    return str(e.value)


def test_an_entry_is_read_whole(tmp_path: Path) -> None:
    found = entry(tmp_path)
    assert found == Entry(
        id="D9",
        pair="kvpack",
        candidates=("triton", "vllm"),
        devices=("cuda",),
        versions=(("torch", ">=2.11,<2.13"), ("vllm", "==0.33.0")),
        kind="bytes",
        against="reference",
        case=(("fp8", (1,)), ("dtype", ("bf16", "fp16"))),
        alignment="aligned",
        element="overflow",
        expected=(0x7F, 0xFF),
        actual=(0x7E, 0xFE),
        reason="torch doesn't saturate",
        reference="docs/ledger.md",
    )
    check_names([found], PAIR)


def test_an_empty_ledger_declares_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, "# nothing\n") == ()


def test_what_ships_is_sound() -> None:
    entries = ledger.load()
    for e in entries:
        pair = load_pair(e.pair)
        check_names(entries, pair)
        assert set(e.candidates) <= set(pair.candidates)
        assert set(e.devices) <= {"cpu", "cuda"}
        assert {name for name, _ in e.case} <= {*pair.dims, *pair.axes}
        assert ("stock" in e.candidates) == (e.against == "oracle")
        for name, values in e.case:
            assert set(values) <= set(pair.axes.get(name, values))


def anchors(text: str) -> set[str]:
    """What GitHub lets one link to in a Markdown file: its headings, and ids set by hand."""
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
    return slugs | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def test_what_ships_is_written_up() -> None:
    root = Path(ledger.__file__).resolve().parents[1]
    local = [e.reference.partition("#") for e in ledger.load() if "://" not in e.reference]
    if not all((root / file).is_file() for file, _, _ in local):
        pytest.skip("the ledger's documents aren't here")
    for file, _, anchor in local:
        assert not anchor or anchor in anchors((root / file).read_text(encoding="utf-8"))


MALFORMED: dict[str, tuple[str | bytes, str]] = {
    "not TOML": ("[[divergence", "isn't valid TOML"),
    "not text": (b"\xff\xfe\x00", "can't read the ledger"),
    "a table too many": ("[other]\n", "must hold [[divergence]] tables alone, found other"),
    "no array": ("[divergence]\n", "must hold [[divergence]] tables alone, found dict"),
    "no table": ("divergence = [1]\n", "entry 1: expected a table, got int"),
    "an unknown field": (table(colour="red"), "(D9): unknown fields colour"),
    "no id": (table(id=None), "entry 1 (no id): lacks id"),
    "no reason": (table(reason=None), "(D9): lacks reason"),
    "an empty reference": (table(reference=""), "(D9): lacks reference"),
    "no candidates": (table(candidates=[]), "(D9): lacks candidates"),
    "candidates as a word": (table(candidates="vllm"), "candidates must be a list of strings"),
    "devices as numbers": (table(devices=[0]), "devices must be a list of strings"),
    "an unknown kind": (table(kind="odd"), "kind is 'odd', expected one of bytes, crash"),
    "an unknown alignment": (table(alignment="odd"), "alignment is 'odd', expected one of any"),
    "an unknown against": (table(against="luck"), "against is 'luck', expected one of reference"),
    "case as a list": (table(case=["fp8"]), "case must be a table"),
    "versions as a word": (table(versions="torch"), "versions must be a table"),
    "a bad specifier": (table(versions={"torch": "2.11"}), "'2.11' is no version specifier"),
    "a number for a version": (table(versions={"torch": 2.11}), "is no version specifier"),
    "bytes that aren't hex": (table(expected=["zz"]), "expected must be a list of hex strings"),
    "bytes as numbers": (table(actual=[127]), "actual must be a list of hex strings"),
    "bytes as a number": (table(actual=127), "actual must be a list of hex strings"),
    "an id twice": (table() + table(), "has several entries called D9"),
}


@pytest.mark.parametrize(("text", "words"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_ledger_is_one_clear_line(
    tmp_path: Path, text: str | bytes, words: str
) -> None:
    message = refused(tmp_path, text)
    assert words in message
    assert "ledger.toml" in message


def test_the_second_entry_is_named_by_its_place(tmp_path: Path) -> None:
    assert "entry 2 (D10)" in refused(tmp_path, table() + table(id="D10", reason=None))


def test_no_file_and_a_folder_are_one_clear_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UsageError, match=r"can't read the ledger .*; give --ledger"):
            ledger.load(path)


@given(
    st.sampled_from(sorted(GOOD)),
    st.recursive(
        st.one_of(
            st.integers(-9, 999), st.booleans(), st.from_regex(r"[ -~]{0,6}", fullmatch=True)
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), inner, max_size=2),
        ),
        max_leaves=4,
    ),
)
def test_any_value_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.toml"
    path.write_text(table(**{name: value}), encoding="utf-8")
    try:
        (found,) = ledger.load(path)
    except UsageError as e:
        assert len(str(e).splitlines()) == 1  # noqa: PT017 - both ends are allowed
    else:
        assert found.kind in ledger.KINDS


# Each is read as if it said something, and then declares nothing, or something else.
SLIPS = {
    "bytes as one word": table(expected="7f"),
    "a device that doesn't exist": table(devices=["gpu"]),
    "a package that no version is known of": table(versions={"troch": ">=2.11"}),
    "an id that isn't a word": table(id=["D9"]),
    "an element that isn't a word": table(element=3),
}


@pytest.mark.parametrize("text", SLIPS.values(), ids=SLIPS)
def test_what_declares_nothing_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        load(tmp_path, text)


# -- names that the pair must have --------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"element": "sunny"}, "unknown element class 'sunny'; pair kvpack has"),
        ({"actual": "sunny"}, "unknown model 'sunny'; pair kvpack has"),
    ],
)
def test_names_are_checked(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as e:
        check_names([entry(tmp_path, **changes)], PAIR)
    assert "D9" in str(e.value)


def test_names_of_other_pairs_are_left_alone(tmp_path: Path) -> None:
    check_names([entry(tmp_path, pair="other", element="sunny")], PAIR)


@pytest.mark.parametrize(
    "changes",
    [{"case": {"fp_8": [1]}}, {"case": {"dtype": ["bfloat16"]}}, {"candidates": ["vlm"]}],
    ids=["axis", "value", "candidate"],
)
def test_a_predicate_that_no_case_meets_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = entry(tmp_path, **changes)
    with pytest.raises(UsageError):
        check_names([found], PAIR)


# -- to which run an entry applies --------------------------------------------------

VERSIONS = {"torch": "2.11.0+cu130", "vllm": "0.33.0"}


@pytest.mark.parametrize(
    ("pair", "candidate", "device", "versions", "applies"),
    [
        ("kvpack", "vllm", "cuda", VERSIONS, True),
        ("kvpack", "triton", "cuda:1", VERSIONS, True),
        ("other", "vllm", "cuda", VERSIONS, False),
        ("kvpack", "inductor", "cuda", VERSIONS, False),
        ("kvpack", "vllm", "cpu", VERSIONS, False),
        ("kvpack", "vllm", "cuda", {**VERSIONS, "torch": "2.12.1"}, True),
        ("kvpack", "vllm", "cuda", {**VERSIONS, "torch": "2.13.0+cpu"}, False),
        ("kvpack", "vllm", "cuda", {**VERSIONS, "torch": "2.10.9"}, False),
        ("kvpack", "vllm", "cuda", {**VERSIONS, "vllm": "0.33.1"}, False),
        ("kvpack", "vllm", "cuda", {"torch": "2.11.0"}, False),
    ],
)
def test_applies(
    tmp_path: Path,
    pair: str,
    candidate: str,
    device: str,
    versions: dict[str, str],
    *,
    applies: bool,
) -> None:
    assert entry(tmp_path).applies(pair, candidate, device, versions) is applies


def test_a_pre_release_counts_for_its_range(tmp_path: Path) -> None:
    found = entry(tmp_path, versions={"torch": ">=2.11,<2.13"})
    assert found.applies("kvpack", "vllm", "cuda", {"torch": "2.12.0a0+git1234"})


@pytest.mark.parametrize(
    ("point", "aligned", "covers"),
    [
        ({"fp8": 1, "dtype": "bf16"}, True, True),
        ({"fp8": 1, "dtype": "fp16", "T": 3}, True, True),
        ({"fp8": 0, "dtype": "bf16"}, True, False),
        ({"fp8": 1, "dtype": "fp32"}, True, False),
        ({"fp8": 1}, True, False),
        ({"fp8": 1, "dtype": "bf16"}, False, False),
    ],
)
def test_covers_case(tmp_path: Path, point: dict[str, Any], *, aligned: bool, covers: bool) -> None:
    assert entry(tmp_path).covers_case(point, aligned=aligned) is covers
    opposite = entry(tmp_path, alignment="misaligned")
    assert opposite.covers_case(point, aligned=not aligned) is covers
    assert entry(tmp_path, alignment="any", case=None).covers_case(point, aligned=aligned)


# -- which elements it declares -----------------------------------------------------


def odd(bits: np.ndarray, dtype: str) -> np.ndarray:
    assert dtype == "bf16"
    return np.asarray(bits % 2 == 1)


def half(bits: np.ndarray, dtype: str) -> np.ndarray:
    assert dtype == "bf16"
    return (bits >> 1).astype(np.uint8)


def covered(entries: list[Entry], *elements: tuple[int, int, int]) -> dict[str, list[bool]]:
    """Ask for elements given as (source, expected, actual)."""
    source = np.array([e[0] for e in elements], np.uint16)
    expected = np.array([e[1] for e in elements], np.uint8)
    actual = np.array([e[2] for e in elements], np.uint8)
    classes, models = {"odd": odd}, {"half": half}
    found = elements_covered(entries, classes, models, source, "bf16", expected, actual)
    return {e.id: mask.tolist() for e, mask in found}


def test_class_and_both_bytes_must_fit(tmp_path: Path) -> None:
    found = entry(tmp_path, element="odd")
    elements = [(1, 0x7F, 0x7E), (1, 0xFF, 0x7E), (2, 0x7F, 0x7E), (1, 0x7E, 0x7E), (1, 0x7F, 0)]
    assert covered([found], *elements) == {"D9": [True, True, False, False, False]}


def test_a_model_gives_the_actual_byte(tmp_path: Path) -> None:
    found = entry(tmp_path, element=None, expected=None, actual="half")
    assert covered([found], (8, 0, 4), (8, 0, 5), (9, 0, 4)) == {"D9": [True, False, True]}


def test_an_entry_without_conditions_covers_everything(tmp_path: Path) -> None:
    found = entry(tmp_path, element=None, expected=None, actual=None)
    assert covered([found], (8, 0, 4), (1, 2, 3)) == {"D9": [True, True]}


def test_an_element_counts_for_the_first_entry_alone(tmp_path: Path) -> None:
    first = entry(tmp_path, element="odd", expected=None, actual=None)
    second = entry(tmp_path, id="D10", element=None, expected=None, actual=None)
    third = entry(tmp_path, id="D11", element=None, expected=None, actual=None)
    found = covered([first, second, third], (1, 0, 0), (2, 0, 0), (3, 0, 0))
    assert found == {"D9": [True, False, True], "D10": [False, True, False]}


def test_nothing_covers_nothing(tmp_path: Path) -> None:
    assert covered([], (1, 2, 3)) == {}
    assert covered([entry(tmp_path, element="odd")], (2, 0x7F, 0x7E)) == {}
    assert covered([entry(tmp_path, element="odd")]) == {}


def test_a_pair_may_say_where_the_bytes_of_what_it_writes_come_from() -> None:
    # k3quant-nan is met in the cache too, which is an operand: its layout has to place it.
    pair = load_pair("k3quant")
    point = {"T": 3, "H": 2, "dtype": "bf16", "slots": "padded", "scales": "odd", "rope": "gptj"}
    ids = {o.name: np.full(o.shape, i) for i, o in enumerate(pair.operands(point))}
    names = [o.name for o in pair.operands(point)]
    cache = pair.layout(ids, point)["kv_cache"]
    found = {names[i]: int((cache == i).sum()) for i in np.unique(cache)}
    assert found == {"kv_c": 2 * 512, "k_pe": 2 * 64, "kv_cache": 62 * 576}
