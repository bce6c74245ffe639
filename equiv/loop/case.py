"""Cases of the loop: pure values from which caches, metadata and queries follow.

The line has seven fields, split by ``/``, and no character that a shell would change::

    loop/PACK/DEVICE/LANE/POINT/REQUESTS/SEED

    loop/fused/cpu/ragged/D=2,rank=1,I=1,page=16,H=2,ws=96,.../3+545.1+0/17

- PACK: ``fused`` or ``module:function``.
- POINT: the fields of ``LoopCase`` that are single values.
- REQUESTS: ``query+context`` tokens of each request, in batch order, split by ``.``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from equiv.errors import UsageError

DIMS = {"small": (32, 16, 8, 16), "real": (512, 128, 64, 128)}
"""Latent, nope, rope and value columns. Small ones run four times as many cases."""

DTYPES = ("fp32", "bf16", "fp16")
SCALES = ("1", "0.07", "3.7")
CACHES = ("auto", "fp8")
PROJECTIONS = ("plain", "fp8")
LANES = ("edges", "ragged", "fp8", "real", "strides", "gloo", "engine", "nccl")
"""All lanes, in the order in which they run."""
VLLM_ROWS = 65_536
"""Workspace rows that vLLM takes at most for itself; a context chunk has as many tokens."""
MAX_TOKENS = 1 << 20
"""Context tokens, and query tokens, of a case above which it is refused as a typing mistake."""
MAX_RANKS, MAX_HEADS, MAX_COLUMNS = 64, 256, 1024
"""Ranks, heads and padding columns above which it is, too."""
SCALE_RANGE = (1e-6, 1e6)
"""Scales of a cache that float32 and fp8 can carry."""


@dataclass(frozen=True)
class LoopCase:
    """One case. Equal cases give equal bytes on one machine.

    Attributes
    ----------
    ranks, rank : size of the context-parallel group (D), and the rank whose loop runs.
    interleave, page : I and the cache's page, in tokens; I divides the page.
    heads : heads a rank (H).
    workspace : rows of the chunked-prefill workspace, a multiple of ``lcm(page, D * I)``.
    requests : ``(query, context)`` tokens of each request.
    dims : a key of ``DIMS``.
    dtype : of model, query and workspace.
    cache : ``auto``, the model's dtype, or ``fp8``.
    fp8 : 1 forces an fp8 query, and with it fp8 keys and values.
    k_scale : the cache's scale, as written.
    proj : ``plain``, or ``fp8``: a projection with an fp8 weight, which under fp8 prefill takes
        fp8 rows and refuses others.
    pad : columns by which the prefill backend pads its output's heads; not 0, a continuation is
        declared refused.

    """

    lane: str
    ranks: int
    rank: int
    interleave: int
    page: int
    heads: int
    workspace: int
    requests: tuple[tuple[int, int], ...]
    dims: str = "small"
    dtype: str = "fp32"
    cache: str = "auto"
    fp8: int = 0
    k_scale: str = "1"
    proj: str = "plain"
    pad: int = 0
    seed: int = 0
    pack: str = "fused"
    device: str = "cpu"

    def with_(self, **changes: object) -> LoopCase:
        """Return a copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def alignment(self) -> int:
        """Return ``lcm(page, D * I)``, of which the workspace is a multiple."""
        return math.lcm(self.page, self.ranks * self.interleave)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Return the context tokens of each request."""
        return tuple(context for _, context in self.requests)

    def __str__(self) -> str:
        """Return the one-line form that ``parse`` reads."""
        point = ",".join(f"{short}={getattr(self, name)}" for short, name in _POINT.items())
        requests = ".".join(f"{query}+{context}" for query, context in self.requests)
        head = ("loop", self.pack, self.device, self.lane)
        return "/".join((*head, point, requests, str(self.seed)))


_POINT = {
    "D": "ranks",
    "rank": "rank",
    "I": "interleave",
    "page": "page",
    "H": "heads",
    "ws": "workspace",
    "dims": "dims",
    "dtype": "dtype",
    "cache": "cache",
    "fp8": "fp8",
    "kscale": "k_scale",
    "proj": "proj",
    "pad": "pad",
}
_CHOICES = {"dims": tuple(DIMS), "dtype": DTYPES, "cache": CACHES, "proj": PROJECTIONS}
_FIELDS = 7


def parse(line: str) -> LoopCase:
    """Read a case from its one-line form.

    Raises
    ------
    UsageError
        With the field that can't be read, or the values that don't go together.

    """
    parts = line.strip().split("/")
    if len(parts) != _FIELDS or parts[0] != "loop":
        raise UsageError(
            f"can't read the case {line!r}: expected {_FIELDS} fields split by '/' "
            "(loop/PACK/DEVICE/LANE/POINT/REQUESTS/SEED); copy the line that a report printed",
        )
    _, pack, device, lane, point, requests, seed = parts
    try:
        values = _values(point)
        fields = {name: _read(name, values[short]) for short, name in _POINT.items()}
        batch = tuple(_request(entry) for entry in requests.split("."))
        case = LoopCase(
            lane=lane,
            requests=batch,
            seed=int(seed),
            pack=pack,
            device=device,
            **fields,  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise UsageError(
            f"can't read the case {line!r}: {error}; copy the line that a report printed",
        ) from None
    check(case)
    return case


def check(case: LoopCase) -> None:
    """Raise ``UsageError`` unless the case's values go together."""
    wrong = [
        message
        for holds, message in (
            (case.lane in LANES, f"the lane must be one of {', '.join(LANES)}"),
            (case.seed >= 0, "the seed must not be negative"),
            (case.page > 0, "page must be positive"),
            (case.ranks > 1, "D must be above 1"),
            (case.ranks <= MAX_RANKS, f"more than {MAX_RANKS} ranks"),
            (case.heads <= MAX_HEADS, f"more than {MAX_HEADS} heads"),
            (case.pad <= MAX_COLUMNS, f"more than {MAX_COLUMNS} columns of padding"),
            (case.workspace <= MAX_TOKENS, f"more than {MAX_TOKENS} workspace rows"),
            (0 <= case.rank < case.ranks, "rank must lie in 0..D-1"),
            (
                case.interleave >= 1 and case.page % max(case.interleave, 1) == 0,
                "I must divide page",
            ),
            (case.workspace > 0, "ws must be positive"),
            (case.workspace % max(case.alignment, 1) == 0, "lcm(page, D*I) must divide ws"),
            (case.heads > 0 and case.pad >= 0, "H must be positive, pad not negative"),
            (all(q > 0 and c >= 0 for q, c in case.requests), "a request needs query tokens"),
            (any(case.contexts), "no request has a context: the loop would not run"),
            (sum(case.contexts) <= MAX_TOKENS, f"more than {MAX_TOKENS} context tokens"),
            (
                sum(query for query, _ in case.requests) <= MAX_TOKENS,
                f"more than {MAX_TOKENS} query tokens",
            ),
            (case.dtype != "fp32" or not case.fp8, "fp8 prefill needs a 16-bit model"),
        )
        if not holds
    ]
    if wrong:
        raise UsageError(f"the case {case} can't exist: {'; '.join(wrong)}")


def _values(point: str) -> dict[str, str]:
    entries = [entry.partition("=") for entry in point.split(",")]
    if sorted(name for name, _, _ in entries) != sorted(_POINT):
        raise ValueError(f"fields {', '.join(_POINT)} expected, each once")
    return {name: value for name, _, value in entries}


def _read(name: str, text: str) -> int | str:
    if name == "k_scale":
        low, high = SCALE_RANGE
        if not low <= float(text) <= high:
            raise ValueError(f"k_scale {text}: expected a number from {low:g} to {high:g}")
        return text
    if name in _CHOICES:
        if text not in _CHOICES[name]:
            raise ValueError(f"{name} {text!r}: expected one of {', '.join(_CHOICES[name])}")
        return text
    return int(text)


def _request(entry: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+\+\d+", entry):
        raise ValueError(f"request {entry!r}: expected query+context")
    query, context = entry.split("+")
    return int(query), int(context)
