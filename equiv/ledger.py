"""The ledger: declared divergences, enforced both ways.

Each ``[[divergence]]`` of ``ledger.toml`` names a pair, candidates, the cases and elements in which
the bytes may differ, the versions in which they do, the bytes themselves, a reason and a
reference. A difference that no entry covers fails the run. An entry that applies to the run (its
candidate, device and versions are there, and cases that meet its predicate ran) and was never
seen fails it too: a ledger doesn't keep what is no longer true.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from equiv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

KINDS = ("bytes", "crash", "raised", "last_error", "hang")
"""What a declared divergence looks like: other bytes, or one of the findings of that name."""

PACKAGES = ("torch", "triton", "vllm", "python", "numpy")
"""What ``versions`` may speak of: the keys of ``equiv.environment.versions``."""

AGAINST = ("reference", "oracle")


@dataclass(frozen=True)
class Entry:
    """One declared divergence.

    Attributes
    ----------
    id : short name, shown in reports.
    pair, candidates : to which it applies; the candidate ``"stock"`` with ``against = "oracle"`` is
        the reference itself, departing from the model.
    devices : device types, ``"cpu"`` or ``"cuda"``.
    versions : package to specifier, e.g. ``{"torch": ">=2.11,<2.12"}``; all must hold.
    kind : one of ``KINDS``.
    against : what the candidate is compared with.
    case : values of the point that it is limited to, e.g. ``{"fp8": [1]}``.
    alignment : ``"any"``, ``"aligned"`` or ``"misaligned"``.
    element : class of the input element (``pair.classes``) for ``bytes``.
    expected, actual : bytes allowed on either side, or the name of a model of the pair
        (``pair.models``) that gives the actual byte.
    variant : name of a variant of the pair (``pair.variants``): whole outputs, whose bytes the
        actual ones must be. For bytes that don't follow from one input element.
    modes : calling modes that it is limited to (``equiv.modes``); all where empty.
    reason, reference : why, and where it is written up. Both mandatory.

    """

    id: str
    pair: str
    candidates: tuple[str, ...]
    devices: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    kind: str
    against: str
    case: tuple[tuple[str, tuple[int | str, ...]], ...]
    alignment: str
    element: str | None
    expected: tuple[int, ...] | None
    actual: tuple[int, ...] | str | None
    reason: str
    reference: str
    variant: str | None = None
    modes: tuple[str, ...] = ()

    def applies(self, pair: str, candidate: str, device: str, versions: Mapping[str, str]) -> bool:
        """Whether it speaks of this pair, candidate, device type and set of versions."""
        if pair != self.pair or candidate not in self.candidates:
            return False
        if device.partition(":")[0] not in self.devices:
            return False
        for package, specifier in self.versions:
            version = versions.get(package)
            if version is None:
                return False
            if not SpecifierSet(specifier, prereleases=True).contains(
                Version(version.partition("+")[0])
            ):
                return False
        return True

    def covers_case(self, point: Mapping[str, Any], *, aligned: bool, mode: str = "eager") -> bool:
        """Whether it speaks of this point, alignment and calling mode."""
        if self.modes and mode not in self.modes:
            return False
        if self.alignment != "any" and (self.alignment == "aligned") != aligned:
            return False
        return all(point.get(name) in values for name, values in self.case)


def applying(
    entries: Sequence[Entry], pair: str, candidate: str, device: str, versions: Mapping[str, str]
) -> tuple[Entry, ...]:
    """Return the entries that speak of a candidate, or of the reference against the oracle."""
    return tuple(
        e
        for e in entries
        if e.applies(pair, candidate, device, versions)
        or (e.against == "oracle" and e.applies(pair, "stock", device, versions))
    )


def elements_covered(
    entries: Sequence[Entry],
    classes: Mapping[str, Any],
    models: Mapping[str, Any],
    source_bits: NDArray[Any],
    source_dtype: str,
    expected: NDArray[Any],
    actual: NDArray[Any],
) -> list[tuple[Entry, NDArray[np.bool_]]]:
    """Say which of the differing elements each entry declares.

    Parameters
    ----------
    entries : that apply to the case, of kind ``bytes``.
    source_bits, expected, actual : flat arrays of equal length, one element for each difference:
        the input's bits, and the output's bits on either side.

    Returns
    -------
    One mask for each entry that covers anything; an element counts for the first one only.

    """
    left = np.ones(len(source_bits), dtype=bool)
    found = []
    for entry in entries:
        if entry.variant is not None:  # of whole outputs: ``variant_covered``
            continue
        mask = left.copy()
        if entry.element is not None:
            mask &= np.asarray(classes[entry.element](source_bits, source_dtype), dtype=bool)
        if entry.expected is not None:
            mask &= np.isin(expected, entry.expected)
        if isinstance(entry.actual, str):
            mask &= actual == models[entry.actual](source_bits, source_dtype)
        elif entry.actual is not None:
            mask &= np.isin(actual, entry.actual)
        if mask.any():
            found.append((entry, mask))
            left &= ~mask
    return found


def variant_covered(
    entry: Entry,
    made: NDArray[Any] | None,
    expected: NDArray[Any],
    actual: NDArray[Any],
    mask: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Say which of the differing elements are the ones of an entry's variant.

    Parameters
    ----------
    made : the variant's output, or None where it speaks of others; where it is masked
        (``numpy.ma``) any bytes will do, as after a race.
    expected, actual, mask : the output on either side, and where the two differ.

    Returns
    -------
    The part of ``mask`` whose actual elements are ``made``'s, or masked there.

    """
    if made is None:
        return np.zeros_like(mask)
    same = np.ma.getdata(made) == actual  # type: ignore[no-untyped-call]
    free = np.ma.getmaskarray(made)  # type: ignore[no-untyped-call]
    covered: NDArray[np.bool_] = mask & (same | free)
    if entry.expected is not None:
        covered &= np.isin(expected, entry.expected)
    return covered


@dataclass
class Seen:
    """How often an entry was met in a run."""

    elements: int = 0
    cases: int = 0
    eligible_cases: int = 0
    patterns: dict[str, set[int]] = field(default_factory=dict)
    """Distinct input patterns by ``"dtype position"``, e.g. ``"bf16 k.nope"``."""


def _bytes_of(where: str, value: Any) -> tuple[int, ...]:
    wanted = f"{where} must be a list of hex strings such as ['7f', 'ff'], not {value!r}"
    if not isinstance(value, list):
        raise UsageError(wanted)
    try:
        return tuple(int(x, 16) for x in value)
    except (TypeError, ValueError):
        raise UsageError(wanted) from None


_FIELDS = {
    "id",
    "pair",
    "candidates",
    "devices",
    "versions",
    "kind",
    "against",
    "case",
    "alignment",
    "element",
    "expected",
    "actual",
    "reason",
    "reference",
    "variant",
    "modes",
}
_MANDATORY = ("id", "pair", "candidates", "devices", "kind", "reason", "reference")


CHOICES = {
    "kind": KINDS,
    "against": AGAINST,
    "alignment": ("any", "aligned", "misaligned"),
}
"""Fields that take one of a few words; the first is the default."""


def _entry(raw: Any, where: str) -> Entry:
    if not isinstance(raw, dict):
        raise UsageError(f"{where}: expected a table, got {type(raw).__name__}")
    unknown = sorted(set(raw) - _FIELDS)
    missing = [f for f in _MANDATORY if not raw.get(f)]
    if unknown or missing:
        what = f"unknown fields {', '.join(unknown)}" if unknown else f"lacks {', '.join(missing)}"
        raise UsageError(f"{where} ({raw.get('id', 'no id')}): {what}")
    where = f"{where} ({raw['id']})"
    try:
        _words(raw)
        _versions(raw.get("versions", {}))
        return _checked(raw)
    except UsageError as e:
        raise UsageError(f"{where}: {e}") from None


def _words(raw: dict[str, Any]) -> None:
    """Check the fields that hold words and lists of words."""
    for name, allowed in CHOICES.items():
        value = raw.get(name, allowed[0])
        if value not in allowed:
            raise UsageError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")
    for name in ("candidates", "devices", "modes"):
        value = raw.get(name, [])
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise UsageError(f"{name} must be a list of strings")
    unknown = sorted(set(raw["devices"]) - {"cpu", "cuda"})
    if unknown:
        raise UsageError(f"devices must be cpu or cuda, not {', '.join(unknown)}")
    for name in ("id", "pair", "element", "reason", "reference", "variant"):
        if not isinstance(raw.get(name, ""), str):
            raise UsageError(f"{name} must be a string, not {raw[name]!r}")


def _versions(versions: Any) -> None:
    """Check the packages and specifiers of ``versions``."""
    if not isinstance(versions, dict):
        raise UsageError("versions must be a table")
    unknown = sorted(set(versions) - set(PACKAGES))
    if unknown:
        raise UsageError(
            f"versions of {', '.join(unknown)} aren't known; expected {', '.join(PACKAGES)}"
        )
    for specifier in versions.values():
        try:
            SpecifierSet(str(specifier))
        except InvalidSpecifier:
            raise UsageError(
                f"{specifier!r} is no version specifier such as '>=2.11,<2.12'"
            ) from None


def _checked(raw: dict[str, Any]) -> Entry:
    """Make the entry of a table whose words are in order."""
    case = raw.get("case", {})
    if not isinstance(case, dict):
        raise UsageError("case must be a table")
    actual, expected = raw.get("actual"), raw.get("expected")
    if raw.get("variant") is not None:
        beside = [n for n in ("element", "actual") if raw.get(n) is not None]
        if beside or raw["kind"] != "bytes":
            what = f"not with {beside[0]}" if beside else f"not for kind {raw['kind']!r}"
            raise UsageError(f"variant gives the bytes of whole outputs: {what}")
    if actual is not None and not isinstance(actual, str):
        actual = _bytes_of("actual", actual)
    return Entry(
        id=raw["id"],
        pair=raw["pair"],
        candidates=tuple(raw["candidates"]),
        devices=tuple(raw["devices"]),
        versions=tuple((str(k), str(v)) for k, v in raw.get("versions", {}).items()),
        kind=raw["kind"],
        against=raw.get("against", AGAINST[0]),
        case=tuple((k, tuple(v) if isinstance(v, list) else (v,)) for k, v in case.items()),
        alignment=raw.get("alignment", "any"),
        element=raw.get("element"),
        expected=None if expected is None else _bytes_of("expected", expected),
        actual=actual,
        reason=raw["reason"],
        reference=raw["reference"],
        variant=raw.get("variant"),
        modes=tuple(raw.get("modes", ())),
    )


def default_path() -> Path:
    """Return the ledger that ships with the suite."""
    return Path(str(resources.files("equiv").joinpath("ledger.toml")))


def load(path: Path | None = None) -> tuple[Entry, ...]:
    """Read a ledger.

    Raises
    ------
    UsageError : unreadable, not TOML, unknown or missing fields, doubled ids; names the entry.

    """
    path = path or default_path()
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        why = getattr(e, "strerror", None) or e
        raise UsageError(
            f"can't read the ledger {path}: {why}; give --ledger a TOML file"
        ) from None
    except tomllib.TOMLDecodeError as e:
        msg = f"the ledger {path} isn't valid TOML: {e}"
        raise UsageError(msg) from None
    unknown = sorted(set(raw) - {"divergence"})
    table = raw.get("divergence", [])
    if unknown or not isinstance(table, list):
        what = ", ".join(unknown) or type(table).__name__
        raise UsageError(f"the ledger {path} must hold [[divergence]] tables alone, found {what}")
    entries = tuple(_entry(r, f"the ledger {path}, entry {i + 1}") for i, r in enumerate(table))
    ids = [e.id for e in entries]
    doubled = sorted({i for i in ids if ids.count(i) > 1})
    if doubled:
        msg = f"the ledger {path} has several entries called {', '.join(doubled)}; ids must differ"
        raise UsageError(msg)
    return entries


def check_names(entries: Sequence[Entry], pair: Any) -> None:
    """Check that classes, models, variants and modes named by the ledger are there.

    Raises
    ------
    UsageError : with the entry and the known names.

    """
    from equiv.modes import MODES  # it imports what imports this module

    models, variants = pair.models, getattr(pair, "variants", {})
    axes = {**dict.fromkeys(pair.dims), **pair.axes}
    for e in entries:
        if e.pair != pair.name:
            continue
        for what, value, known in (
            ("element class", e.element, pair.classes),
            ("model", e.actual if isinstance(e.actual, str) else None, models),
            ("variant", e.variant, variants),
            *[("mode", m, MODES) for m in e.modes],
            *[("candidate", c, pair.candidates) for c in e.candidates if ":" not in c],
            *[("axis", a, axes) for a, _ in e.case],
            *[
                (f"value of {a}", v, axes[a])
                for a, values in e.case
                if axes.get(a) is not None
                for v in values
            ],
        ):
            if value is not None and value not in known:
                raise UsageError(
                    f"ledger entry {e.id}: unknown {what} {value!r}; "
                    f"pair {pair.name} has {', '.join(map(str, known)) or 'none'}"
                )
