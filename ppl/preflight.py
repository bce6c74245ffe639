"""What two servers must be before anything is scored, and what of it nobody could check.

In dev mode ``/server_info`` tells the whole configuration. Elsewhere the arguments that matter are
what ``/v1/models`` and ``/metrics`` show, and what the user states after ``--``; what the counters
of each request then show decides whether it was true.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equiv.environment import shortened
from kvroute.faults import LOOP_TITLES
from ppl import emulation, pynccl, sharing
from ppl.errors import BadAnswer, PplError
from ppl.facts import Arm, ServerFacts
from ppl.observe import Channel, Snapshot, find_channel, observe
from ppl.plan import Configuration
from ppl.transport import Endpoint

SETTINGS = {
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "long_prefill_token_threshold": "scheduler_config.long_prefill_token_threshold",
    "block_size": "cache_config.block_size",
    "cache_dtype": "cache_config.cache_dtype",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "decode_context_parallel_size": "parallel_config.decode_context_parallel_size",
    "cp_kv_cache_interleave_size": "parallel_config.cp_kv_cache_interleave_size",
    "max_model_len": "model_config.max_model_len",
    "dtype": "model_config.dtype",
    "quantization": "model_config.quantization",
    "seed": "model_config.seed",
    "logprobs_mode": "model_config.logprobs_mode",
    "generation_config": "model_config.generation_config",
    "enforce_eager": "model_config.enforce_eager",
    "speculative_config": "speculative_config",
}
"""The arguments that matter, by name, and where ``/server_info`` has them."""

NEEDED = {
    "max_num_batched_tokens": None,
    "decode_context_parallel_size": 1,
    "cp_kv_cache_interleave_size": 1,
    "block_size": 16,
    "max_num_seqs": 256,
}
"""What the plan is made from, and vLLM's default where it has one for every machine."""

OWN = re.compile(
    r"(^|[._])(ports?|hosts?|ip|addr|instance_id|num_gpu_blocks|kv_cache_size_tokens)\b"
    r"|port_list$|kv_cache_max_concurrency$|_PORT$|_HOST$|_HOST_IP$|_DIR$|_PATH$"
    r"|_BUFFER_NAME$|_(CACHE|CONFIG)_ROOT$|_ASSETS_CACHE$|_INSTANCE_ID$|(^|[._])download_dir$"
    r"|VLLM_K3_DCP_FUSED_KV_PACK"
)
"""Names in which servers of one configuration differ: addresses, folders, cache sizes, switches."""

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies in memory, in a text that tells no more of it: another in each process."""

MACHINE = (
    *("torch_version", "vllm_version", "python_version", "cuda_runtime_version"),
    *("nvidia_driver_version", "nvidia_gpu_models", "os"),
)
"""Of ``/server_info``'s system_env: what must be equal, and is told."""


@dataclass(frozen=True)
class Checked:
    """A server's facts, the first snapshot, and what was found.

    Attributes
    ----------
    model : its name, for requests.
    whole : its whole configuration, flattened; empty without dev mode.
    amiss, not_covered : by name.

    """

    facts: ServerFacts
    model: str
    channel: Channel | None
    snapshot: Snapshot
    whole: dict[str, Any]
    amiss: list[str]
    not_covered: list[str]


def check(
    arm: Arm,
    endpoint: Endpoint,
    *,
    launched: bool,
    wanted: str | None,
    stated: Mapping[str, Any],
    emulate_fp8: bool = False,
    share_gpu: bool = False,
) -> Checked:
    """Look at one server.

    Parameters
    ----------
    wanted : the route that this arm must run; None: any but stock.
    stated : settings that the user states, by vLLM's names.
    emulate_fp8 : whether it must emulate fp8 prefill; otherwise it must not.
    share_gpu : whether it was started so that its ranks share GPUs where there are too few.

    Raises
    ------
    PplError : it isn't a vLLM server, or doesn't answer.

    """
    version = endpoint.get("/version")
    models = endpoint.get("/v1/models")
    try:
        said = {"vllm": str(version["version"])}
        model = models["data"][0]
        name, longest = str(model["id"]), int(model["max_model_len"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise PplError(
            f"{endpoint.url}: /version and /v1/models don't answer as vLLM does; expected the "
            "address of a vLLM server without a path, and an API key where it wants one"
        ) from None
    if endpoint.page("/health") is None:
        raise PplError(f"{endpoint.url}: /health says that the server isn't well")
    channel = find_channel(endpoint)
    snapshot = observe(endpoint, channel)
    info = endpoint.get("/server_info?config_format=json") or {}
    whole = flat(info.get("vllm_config")) if isinstance(info.get("vllm_config"), dict) else {}
    machine = {k: v for k, v in (info.get("system_env") or {}).items() if k in MACHINE}
    said |= {"torch": str(machine["torch_version"])} if machine.get("torch_version") else {}
    settings, trusted, amiss, open_ = _settings(arm, whole, snapshot, longest, stated)
    if whole:
        whole |= flat({"env": info.get("vllm_env") or {}}) | flat({"machine": machine})
        whole = {k: v for k, v in whole.items() if not OWN.search(k)}
    wrong = [*_route(snapshot, wanted), *_ranks(snapshot, settings)]
    wrong += [*emulation.amiss(snapshot, asked=emulate_fp8), *sharing.amiss(snapshot)]
    amiss += [f"{arm}: {x}" for x in wrong]
    open_ += _blanks(arm, snapshot, whole)
    open_ += sharing.open_(arm, snapshot.facts, asked=share_gpu)
    if pynccl.off(snapshot, whole):
        open_.append(pynccl.open_(arm, snapshot.facts))
    untouched, problem = _untouched(endpoint, channel)
    if untouched is None:
        open_.append(f"{arm}: that vLLM's own loop is unchanged ({problem})")
    elif not untouched and not str(wanted or snapshot.route).startswith("fault:"):
        amiss.append(f"{arm}: vLLM's own loop was changed: {problem}")
    facts = ServerFacts(
        arm=arm,
        url=endpoint.url,
        launched=launched,
        model=shortened(name),
        max_model_len=longest,
        settings=settings,
        settings_sha256=_digest(whole) if whole else None,
        stated=tuple(trusted),
        channel=channel,
        route=snapshot.route,
        switches=snapshot.switches,
        facts=snapshot.facts,
        versions=said,
        environment={k: shortened(str(v)) for k, v in machine.items()},
        untouched=untouched,
    )
    return Checked(facts, name, channel, snapshot, whole, amiss, open_)


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries: ``{"a": {"b": 1}}`` to ``{"a.b": 1}``."""
    if isinstance(value, str):
        return {name: ADDRESS.sub("", value)}
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{name}.{key}" if name else str(key))
    return found if value else {name: {}}


def _digest(whole: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()


def _settings(
    arm: Arm, whole: Mapping[str, Any], snapshot: Snapshot, longest: int, stated: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str], list[str], list[str]]:
    """Return settings, names of those that are merely stated, what is amiss, what is open."""
    seen: dict[str, Any] = {"max_model_len": longest}
    if snapshot.cache:
        cache = snapshot.cache
        seen["enable_prefix_caching"] = cache.get("enable_prefix_caching") == "True"
        seen |= {"cache_dtype": cache.get("cache_dtype")} if "cache_dtype" in cache else {}
        seen |= {"block_size": int(cache["block_size"])} if "block_size" in cache else {}
    if snapshot.facts.get("dcp"):
        seen["decode_context_parallel_size"] = int(snapshot.facts["dcp"])
    for name, place in SETTINGS.items():
        if place in whole:
            seen[name] = whole[place]
        elif any(k.startswith(f"{place}.") for k in whole):
            seen[name] = "set"
    amiss = [
        f"{arm}: {name} is {seen[name]}, and {value} was stated"
        for name, value in stated.items()
        if name in seen and str(seen[name]) != str(value)
    ]
    trusted = sorted(set(stated) - set(seen))
    settings = {**{k: stated[k] for k in trusted}, **seen}
    if settings.get("enable_prefix_caching"):
        amiss.append(f"{arm}: prefix caching is on: start it with --no-enable-prefix-caching")
    if settings.get("speculative_config") or snapshot.speculative:
        amiss.append(f"{arm}: speculative decoding is on, which has corrupted prompt log-probs")
    if settings.get("logprobs_mode", "raw_logprobs") != "raw_logprobs":
        amiss.append(f"{arm}: logprobs_mode is {settings['logprobs_mode']}, expected raw_logprobs")
    open_ = [f"{arm}: {name} is what was stated" for name in trusted]
    if "enable_prefix_caching" not in settings:
        open_.append(f"{arm}: whether prefix caching is off")
    return settings, trusted, amiss, open_


def _route(snapshot: Snapshot, wanted: str | None) -> list[str]:
    """Say what is wrong with the route that a server tells."""
    if snapshot.channel is None or not snapshot.routes:
        told = "neither /collective_rpc nor bytegate_* on /metrics tells it"
        return [f"its route is unproven: {told}; start it as docs/route.md says"]
    if len(snapshot.routes) > 1:
        return [f"its ranks run several routes: {', '.join(snapshot.routes)}"]
    route = snapshot.routes[0]
    if wanted is None:
        wrong = [f"it runs the route {route}, expected another"] if route == "stock" else []
    else:
        wrong = [f"it runs the route {route}, expected {wanted}"] if route != wanted else []
    return wrong


def _ranks(snapshot: Snapshot, settings: Mapping[str, Any]) -> list[str]:
    """Say that some ranks tell no counters, where the server's own settings say how many it has."""
    sizes = [settings.get(f"{kind}_parallel_size", 1) for kind in ("pipeline", "data")]
    # Decode context parallelism is within tensor parallelism: it has no ranks of its own.
    tensor = settings.get("tensor_parallel_size", settings.get("decode_context_parallel_size"))
    if tensor is None or sizes[1] != 1 or not snapshot.ranks:
        return []
    wanted = int(str(tensor)) * int(str(sizes[0]))
    found = len(snapshot.ranks)
    enough = found == wanted or (found > wanted and "tensor_parallel_size" not in settings)
    return [] if enough else [f"{found} of its {wanted} ranks tell their counters"]


def _blanks(arm: Arm, snapshot: Snapshot, whole: Mapping[str, Any]) -> list[str]:
    blanks = []
    if snapshot.facts.get("decode_tokens") is None:
        blanks.append(f"{arm}: up to how many tokens of a text's tail run as decode: assumed 1")
    if not whole:
        blanks.append(f"{arm}: its whole configuration (/server_info needs dev mode)")
    if snapshot.channel == "metrics":
        hidden = "which gather ran, whether ranks shared a GPU, and rows of context"
        blanks.append(f"{arm}: {hidden} (/collective_rpc tells them)")
    return blanks


def _untouched(endpoint: Endpoint, channel: Channel | None) -> tuple[bool | None, str]:
    if channel != "collective_rpc":
        return None, "only /collective_rpc can ask"
    try:
        answer = endpoint.post("/collective_rpc", {"method": "bytegate_untouched"})
        reports = answer["results"]
        whole = all(r["untouched"] for r in reports) and bool(reports)
        problems = [p for r in reports for p in r["problems"]]
    except (BadAnswer, KeyError, TypeError):
        return None, "the server can't tell"
    return whole, str(problems[0]) if problems else ""


def compare(stock: Checked, fused: Checked) -> tuple[list[str], list[str]]:
    """Return what is amiss between the arms, and what nobody could check."""
    amiss, open_ = [], []
    a, b = stock.facts, fused.facts
    if a.url == b.url:
        amiss.append(f"both arms are one address, {a.url}")
    if a.route is not None and a.route == b.route:
        amiss.append(f"both servers run the same route, {a.route}")
    if b.route == "stock" and a.route not in {None, "stock"}:
        amiss.append(f"the arms are swapped: the stock one runs {a.route}, the fused one stock")
    for what, x, y in (
        ("model", a.model, b.model),
        ("versions", a.versions, b.versions),
    ):
        if x != y:
            amiss.append(f"{what} differ: stock {x}, fused {y}")
    amiss += [*emulation.between(a, b), *pynccl.between(a, b), *sharing.between(a, b)]
    if not (stock.whole and fused.whole):
        names = sorted(set(a.settings) & set(b.settings))
        open_.append(f"that all else of the configuration is equal: {', '.join(names)} are")
    shown = [f"{n} ({_word(x)} and {_word(y)})" for n, x, y in unlike(stock, fused)]
    if shown:
        more = f", and {len(shown) - 5} more" if len(shown) > 5 else ""  # noqa: PLR2004 - of a line
        amiss.append(f"the arms' configurations differ: {', '.join(shown[:5])}{more}")
    return amiss, open_


def unlike(one: Checked, other: Checked) -> list[tuple[str, Any, Any]]:
    """Return settings that differ, with both values: of the whole configuration where both tell it.

    Elsewhere of the arguments that matter and that both tell.
    """
    if one.whole and other.whole:
        a, b = one.whole, other.whole
        names = set(a) | set(b)
    else:
        a, b = one.facts.settings, other.facts.settings
        names = set(a) & set(b)
    return [(n, a.get(n), b.get(n)) for n in sorted(names) if a.get(n) != b.get(n)]


def _word(value: Any) -> str:
    return shortened(str(value))[:40]


def configuration(facts: ServerFacts, workspace_rows: int | None) -> Configuration:
    """Return what the plan is made from.

    Up to how many tokens run as decode only ``/collective_rpc`` tells; elsewhere it counts as 1,
    which ``check`` names as not covered, and counters of a text with such a tail show where that is
    wrong.

    Raises
    ------
    PplError : nobody says what it needs.

    """
    found: dict[str, Any] = {}
    for name, default in NEEDED.items():
        value = facts.settings.get(name, default)
        if value is None:
            raise PplError(
                f"{facts.url} doesn't tell its --{name.replace('_', '-')} (dev mode is off): state "
                f"it after --, as in -- --{name.replace('_', '-')} 16384"
            )
        found[name] = int(str(value))
    decode: Any = facts.facts.get("decode_tokens")
    return Configuration(
        budget=found["max_num_batched_tokens"],
        page=found["block_size"],
        ranks=found["decode_context_parallel_size"],
        interleave=found["cp_kv_cache_interleave_size"],
        max_model_len=facts.max_model_len,
        max_num_seqs=found["max_num_seqs"],
        workspace_rows=workspace_rows,
        decode_tokens=1 if decode is None else int(decode),
    )


def packs(route: str | None) -> bool:
    """Whether a route packs: a fault that is a patch of the loop leaves the stock statements."""
    if route is None or route in {"stock", "untouched"}:
        return False
    return route.removeprefix("fault:") not in LOOP_TITLES
