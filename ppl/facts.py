"""What a run knows beside its scores: servers, launches, failures; as it is kept and shown.

``run.json`` in the folder of the results holds them while a run goes on, so that the same command
continues it, and ``ppl compare`` knows what was amiss. ``ppl.json`` repeats them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from equiv import seal
from equiv.files import write_whole
from ppl.errors import PplError
from ppl.plan import Configuration

Arm = Literal["stock", "fused"]
ARMS: tuple[Arm, Arm] = ("stock", "fused")
NAME = "run.json"
EMULATED_BY = "fp8_prefill"
"""Fact of a server that emulates fp8 prefill: the name of its backend."""

SHARED = "share_gpu"
"""Fact of a server whose ranks share GPUs (``kvroute.shared``): how many of each.

A list of what each rank tells where they differ."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerFacts(_Frozen):
    """One server, as its preflight found it.

    Attributes
    ----------
    url : without a password.
    settings : the arguments that matter, by vLLM's own names; from ``/server_info`` in dev mode.
    settings_sha256 : of its whole configuration but ports, hosts and cache sizes; None without dev
        mode.
    stated : names of settings that nobody could check: they are what the user said.
    channel, route, switches, facts : as in ``ppl.observe.Snapshot``.
    versions : vLLM's and torch's, as the server tells them.
    environment : facts on its machine, where dev mode tells them.
    untouched : whether vLLM's loop is the wheel's own; None where nobody could look.

    """

    arm: Arm
    url: str
    launched: bool
    model: str
    max_model_len: int
    settings: dict[str, JsonValue]
    settings_sha256: str | None
    stated: tuple[str, ...] = ()
    channel: str | None
    route: str | None
    switches: tuple[str, ...] = ()
    facts: dict[str, JsonValue] = {}
    versions: dict[str, str]
    environment: dict[str, JsonValue] = {}
    untouched: bool | None = None


class Instance(_Frozen):
    """One server process that was scored on.

    Attributes
    ----------
    number : counts the processes of one arm and launch.
    why : ``planned``, or what became of the one before.
    identity : what tells this process from another: worker pids, start.
    pid, created_s : of a server of our own; start in seconds since 1970.
    up_s : seconds until it was healthy.

    """

    arm: Arm
    launch: int
    number: int
    why: str
    identity: dict[str, JsonValue] = {}
    pid: int | None = None
    created_s: float | None = None
    up_s: float | None = None
    stopped: bool = False


class Failure(_Frozen):
    """A request whose answer must not be scored; ``repeat`` is 0 in a burst."""

    text: str
    arm: Arm
    launch: int
    repeat: int
    reason: str


class TextFacts(_Frozen):
    """One text as it was cut; ``sha256`` is of the whole document as UTF-8."""

    text: str
    title: str
    source: str
    sha256: str
    tokens: int
    ids_sha256: str


class Burst(_Frozen):
    """The concurrency arm: all texts at once, compared like the rest, over launches.

    Every token counts as exposed: where the scheduler cuts depends on arrival times.

    Attributes
    ----------
    bursts : of each launch.
    margin_nats : stated, or from the noise floor.
    floor_nats : standard error of the mean difference from stock's own bursts.
    within_nats, across_nats : least and greatest mean |d| a token of two bursts, of one arm (A/A)
        and of both (A/B).
    strays : results far from the same text alone (``ppl.of_burst``), in words.

    """

    word: str
    reasons: tuple[str, ...]
    launches: int
    bursts: int = 1
    identical_texts: int
    texts: int
    mean_nats: float | None = None
    interval_nats: tuple[float, float] | None = None
    margin_nats: float | None = None
    floor_nats: float | None = None
    within_nats: tuple[float, float] | None = None
    across_nats: tuple[float, float] | None = None
    strays: tuple[str, ...] = ()


class Timing(_Frozen):
    """Seconds of one session of a run: on the servers' answers, and on everything in between."""

    scored_tokens: int
    requests_s: float
    wall_s: float


class RunFacts(_Frozen):
    """Everything that ``ppl.json`` says of a run but its scores.

    Attributes
    ----------
    asked : what the command asked for; a command that asks for something else doesn't continue it.
    command : as it was typed, without passwords in addresses.
    method : how log-probs were asked for.
    tokenizer : where ids come from.
    amiss : what makes the verdict INVALID whatever the scores say.
    retries : requests sent again, by what failed.

    """

    schema_name: Literal["bytegate.ppl.run"] = Field(default="bytegate.ppl.run", alias="schema")
    schema_version: Literal[1] = 1
    asked: dict[str, JsonValue]
    command: str = ""
    claim: Literal["identical", "equivalent"]
    margin_nats: float | None
    environment: dict[str, JsonValue] = {}
    servers: list[ServerFacts] = []
    configuration: Configuration | None = None
    method: str | None = None
    tokenizer: str | None = None
    texts: list[TextFacts] = []
    order: str = ""
    instances: list[Instance] = []
    failures: list[Failure] = []
    amiss: list[str] = []
    warnings: list[str] = []
    not_covered: list[str] = []
    retries: dict[str, int] = {}
    timing: list[Timing] = []
    burst: Burst | None = None
    content_sha256: str = ""
    """Digest of ``run.json`` (``equiv.seal``), in the file alone; empty before there was one."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True
    )

    @property
    def emulates_fp8(self) -> bool:
        """Whether its servers emulated fp8 prefill (``ppl.emulation``), as asked or as seen."""
        seen = any(server.facts.get(EMULATED_BY) for server in self.servers)
        return bool(self.asked.get("emulate_fp8_prefill")) or seen

    @property
    def shares_gpu(self) -> bool:
        """Whether ranks of its servers shared a GPU (``ppl.sharing``)."""
        return any(server.facts.get(SHARED) for server in self.servers)

    def reasons(self) -> list[str]:
        """Return all that makes the run invalid."""
        return [
            *self.amiss,
            *(
                f"text {f.text}, {f.arm} launch {f.launch} repeat {f.repeat}: {f.reason}"
                for f in self.failures
            ),
        ]


def write(folder: Path, facts: RunFacts) -> None:
    """Write ``run.json``, durably and whole or not at all."""
    try:
        write_whole(folder / NAME, seal.sealed(facts.model_dump_json()).encode())
    except OSError as e:
        raise PplError(f"can't write to {folder}: {e.strerror}") from None


def read(folder: Path) -> RunFacts | None:
    """Read ``run.json``; None where a folder has none.

    Raises
    ------
    PplError : it is damaged.

    """
    path = folder / NAME
    try:
        data = path.read_bytes()
        made = RunFacts.model_validate_json(data)
        damage = seal.broken(seal.loads(data))
    except FileNotFoundError:
        return None
    except ValidationError as e:
        one = e.errors()[0]
        where = ".".join(str(x) for x in one["loc"])
        raise PplError(f"{path} is damaged: {where}: {one['msg']}") from None
    except ValueError as e:
        raise PplError(f"{path} is damaged: {e}") from None
    except OSError as e:
        raise PplError(f"can't read {path}: {e.strerror}") from None
    if damage:
        raise PplError(f"{path} is damaged: {damage}")
    return made.model_copy(update={"content_sha256": ""})


def differences(stored: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Say in which points a command asks for something else than what is stored."""
    return [
        f"{name} (stored {_short(stored.get(name))}, asked {_short(asked.get(name))})"
        for name in sorted(set(stored) | set(asked))
        if stored.get(name) != asked.get(name)
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - of a line
