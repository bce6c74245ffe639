"""The policy: what a merge needs, from a short TOML file whose defaults are the packaged one's."""

from __future__ import annotations

import hashlib
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from equiv.errors import UsageError

Devices = Literal["any", "cpu", "gpu", "both", "no"]
Profile = Literal["dev", "gate", "nightly"]
Observed = Literal[
    "which route ran",
    "context chunks and packs",
    "scheduler chunks",
    "cached tokens",
    "preemptions",
]
"""What servers can be asked to have shown; a route that nothing shows is invalid in any case."""
PROFILES = ("dev", "gate", "nightly")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Kernel(_Part):
    """The kernel layer: the pair, who must have run, and which declared differences are taken."""

    required: Devices
    pair: str = Field(min_length=1)
    candidates: tuple[str, ...]
    profile: Profile
    lanes: tuple[str, ...] = Field(min_length=1)
    ledger: tuple[str, ...]


class Loop(_Part):
    """The loop layer."""

    required: Devices
    pack: str = Field(min_length=1)
    profile: Profile
    lanes: tuple[str, ...] = Field(min_length=1)
    cpu_lanes: tuple[str, ...]


class Faults(_Part):
    """The planted faults of both layers."""

    kernel: Devices
    loop: Devices
    clean_cases: int = Field(ge=0)


class Servers(_Part):
    """The server layer; ``arguments`` are handed to ``bytegate ppl run``."""

    required: Devices
    route: str = Field(min_length=1)
    claim: Literal["identical", "equivalent"]
    margin_nats: float = Field(gt=0)
    texts: int = Field(ge=1)
    exposed_tokens: int = Field(ge=1)
    observed: tuple[Observed, ...]
    arrays: bool
    arguments: tuple[str, ...]


class Policy(_Part):
    """``gate.toml``; what each key means stands beside it in the packaged file."""

    schema_version: Literal[1]
    missing_gpu: Literal["reported", "refused"]
    clean_tree: bool
    kernel: Kernel
    loop: Loop
    faults: Faults
    servers: Servers

    @field_validator("loop")
    @classmethod
    def _known_loop_lanes(cls, value: Loop) -> Loop:
        from equiv.loop.case import LANES

        unknown = [x for x in (*value.lanes, *value.cpu_lanes) if x not in LANES]
        if unknown:
            raise ValueError(f"unknown lane {unknown[0]!r}: expected {', '.join(LANES)}")
        return value

    @field_validator("kernel")
    @classmethod
    def _known_lanes(cls, value: Kernel) -> Kernel:
        from equiv.domain import LANE_NAMES

        unknown = [x for x in value.lanes if x not in LANE_NAMES]
        if unknown:
            raise ValueError(f"unknown lane {unknown[0]!r}: expected {', '.join(LANE_NAMES)}")
        return value

    def sha256(self) -> str:
        """Return the digest of every key's value."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def requires(self, layer: str) -> Devices:
        """Return on which devices a layer is required, a GPU that must not be missing included.

        Parameters
        ----------
        layer : a key of ``equiv.gate.collect.LAYERS``.

        """
        asked: dict[str, Devices] = {
            "kernel": self.kernel.required,
            "kernel_faults": self.faults.kernel,
            "loop": self.loop.required,
            "loop_faults": self.faults.loop,
            "servers": self.servers.required,
        }
        found = asked[layer]
        if self.missing_gpu == "reported" or found in {"no", "gpu", "both"}:
            return found
        return "both" if found == "cpu" else "gpu"

    def needing_gpu(self) -> Policy:
        """Return the policy under which a missing GPU is refused."""
        return self.model_copy(update={"missing_gpu": "refused"})


def packaged() -> str:
    """Return the text of the default policy."""
    return resources.files("equiv.gate").joinpath("gate.toml").read_text(encoding="utf-8")


def load(path: Path | None = None) -> Policy:
    """Read a policy; what it leaves out is the packaged one's.

    Raises
    ------
    UsageError : unreadable, not TOML, an unknown key, or a value that can't be.

    """
    values = tomllib.loads(packaged())
    name = "the packaged policy"
    if path is not None:
        name = f"the policy {path}"
        try:
            own = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise UsageError(
                f"can't read {name}: {getattr(e, 'strerror', None) or e}; "
                "`bytegate gate policy` prints one to start from"
            ) from None
        values = _over(values, own)
    try:
        return Policy.model_validate(_tuples(values))
    except ValidationError as e:
        one = e.errors()[0]
        where = ".".join(str(x) for x in one["loc"]) or "it"
        more = f" (and {e.error_count() - 1} more)" if e.error_count() > 1 else ""
        what = one["msg"].removeprefix("Value error, ")
        if one["type"] == "extra_forbidden":
            what = "there is no such key"
        raise UsageError(
            f"{name}: {where}: {what}{more}; `bytegate gate policy` prints every key"
        ) from None


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Lay one policy's tables over another's."""
    merged = dict(below)
    for key, value in above.items():
        known = below.get(key)
        merged[key] = (
            _over(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
        )
    return merged


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(value) if isinstance(value, list) else value
