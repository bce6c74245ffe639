"""What ``bytegate ppl run`` was asked for, checked before anything starts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equiv.files import sha256
from ppl.errors import PplError
from ppl.verdict import Claim, check_margin
from texts.cut import LEAST, LONG_LEAST, MOST
from texts.index import shown

CLAIMS = ("identical", "equivalent")
SMALL_MODEL_ARGUMENTS = ("--max-num-batched-tokens", "512")
SMALL_WORKSPACE = 1024
"""Rows; at TP2 x DCP2 a context of more than 1,024 tokens then takes a continuation."""
FULL_ARGUMENTS = ("--max-num-batched-tokens", "2048", "--max-model-len", str(LONG_LEAST + 8192))
"""Of the small model under ``--full``; its workspace is then vLLM's own, 65,536 rows."""
GPU_ARGUMENTS = (
    *("--max-num-batched-tokens", "2048", "--max-model-len", "131072"),
    *("--kv-cache-memory-bytes", "4G", "--gpu-memory-utilization", "0.25"),
)
"""Of the small model on a GPU. FLASH_ATTN_MLA runs up to 512 tokens as decode, so a step has more;
memory is stated, so that two servers start side by side on the same devices."""
GPU_FULL_ARGUMENTS = ("--max-num-batched-tokens", "16384", *GPU_ARGUMENTS[2:])
GPU_WORKSPACE = 4096
"""Rows; at TP2 x DCP2 a context of more than 4,096 tokens then takes a continuation."""
CHUNKS = (3.7, 4.1)
"""Scheduler chunks that a text spans where it isn't taken at full length: four, at any draw."""


@dataclass(frozen=True)
class Options:
    """A run.

    Attributes
    ----------
    stock, fused : addresses of servers that are there; empty: launch both.
    model : folder or name; None: the small model.
    arguments : vLLM's own, for both servers; of servers that are there, what the user states.
    route : of the fused arm.
    tp, dcp, workspace : as of ``bytegate serve``.
    emulate_fp8 : both servers emulate fp8 prefill (``ppl.emulation``).
    share_gpu : ranks share GPUs where there are fewer of these (``ppl.sharing``).
    one_at_a_time : launch the arms one after the other.
    texts : specifications as of ``texts.sources``; empty: the built-in ten.
    full : 30,000 to 36,000 tokens a text, and a long one.
    tokens : least and most tokens of a text; None: by ``full`` and the scheduler's budget.
    repeats : within the first launch.
    launches : of each arm; servers that are there count as launched when they are seen anew.
    burst : also score all texts at once.
    top1 : also store each row's arg-max and its margin over the second best.
    bursts : of each launch, where ``burst`` is asked for.
    key_variable : environment variable that holds the API key.
    command : what a person would type to ask for it again.

    """

    stock: str = ""
    fused: str = ""
    model: str | None = None
    arguments: tuple[str, ...] = ()
    route: str = "fused"
    tp: int = 2
    dcp: int = 2
    workspace: int | None = None
    emulate_fp8: bool = False
    share_gpu: bool = False
    one_at_a_time: bool = False
    texts: tuple[str, ...] = ()
    without_broken: bool = False
    full: bool = False
    tokens: tuple[int, int] | None = None
    repeats: int = 2
    launches: int = 2
    burst: bool = False
    bursts: int = 3
    top1: bool = False
    claim: Claim = "identical"
    margin: float | None = None
    key_variable: str = ""
    timeout_s: float = 1800.0
    out: Path = Path("out/ppl")
    command: str = ""

    @property
    def attached(self) -> bool:
        """Whether the servers are there already."""
        return bool(self.stock)

    def key(self) -> str | None:
        """Return the API key.

        Raises
        ------
        PplError : the variable isn't set.

        """
        if not self.key_variable:
            return None
        value = os.environ.get(self.key_variable, "")
        if not value:
            raise PplError(f"--api-key-env {self.key_variable}: this variable isn't set")
        if not (value.isascii() and value.isprintable() and " " not in value):
            # The HTTP client would repeat it in its error.
            raise PplError(
                f"--api-key-env {self.key_variable}: its value has a blank, a line end or another "
                "character that no header takes"
            )
        return value


def check(options: Options) -> Options:
    """Return options that can work.

    Raises
    ------
    PplError : they can't.

    """
    o = options
    _check_servers(o)
    if o.claim not in CLAIMS:
        raise PplError(f"claim {o.claim!r}: expected identical or equivalent")
    if o.margin is not None:
        check_margin(o.margin)
    if o.repeats < 1 or o.launches < 1:
        raise PplError("--repeats and --launches: expected at least 1")
    if o.bursts < 1:
        raise PplError(f"--bursts {o.bursts}: expected at least 1")
    if o.tokens is not None and not 1 < o.tokens[0] <= o.tokens[1]:
        raise PplError(f"--tokens {o.tokens[0]}-{o.tokens[1]}: expected LEAST-MOST, at least 2")
    o.key()
    return o


def _check_servers(o: Options) -> None:
    if bool(o.stock) != bool(o.fused):
        raise PplError("--stock and --fused belong together: give both addresses, or neither")
    for name, url in (("--stock", o.stock), ("--fused", o.fused)):
        if url and not url.startswith(("http://", "https://")):
            raise PplError(f"{name} {shown(url)}: expected http://HOST:PORT")
    if o.attached and o.model is not None:
        raise PplError("--model launches servers, and --stock and --fused name some: give one")
    if o.attached and o.share_gpu:
        raise PplError("--share-gpu launches servers, and --stock and --fused name some")
    if o.attached and o.one_at_a_time:
        raise PplError("--one-at-a-time launches servers, and --stock and --fused name some")
    if o.attached and o.stock.rstrip("/") == o.fused.rstrip("/"):
        raise PplError(f"--stock and --fused are the same address, {shown(o.stock)}")


def lengths(options: Options, budget: int) -> tuple[int, int]:
    """Return least and most tokens of a text, for servers with this ``max_num_batched_tokens``."""
    if options.tokens is not None:
        return options.tokens
    least, most = (round(chunks * budget) for chunks in CHUNKS)
    return (LEAST, MOST) if options.full or least >= LEAST else (least, most)


def stated(arguments: Sequence[str]) -> dict[str, Any]:
    """Read vLLM's arguments as settings: ``--a-b 1``, ``--a-b=1``, ``--no-a`` and ``--a``."""
    found: dict[str, Any] = {}
    words = [w for given in arguments for w in given.split("=", 1)]
    for i, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name = word.removeprefix("--").replace("-", "_")
        following = words[i + 1] if i + 1 < len(words) else "--"
        if not following.startswith("--"):
            found[name] = int(following) if following.isdecimal() else following
        elif name.startswith("no_"):
            found[name.removeprefix("no_")] = False
        else:
            found[name] = True
    short = {"tp": "tensor_parallel_size", "dcp": "decode_context_parallel_size"}
    return {short.get(name, name): value for name, value in found.items()}


def model_identity(model: str) -> str:
    """Return a model's name; of a local folder its last part and the SHA-256 of its contents."""
    from ppl import model as small

    folder = Path(model)
    if folder.resolve() == small.folder().resolve():  # code lies beside these weights
        return f"{small.NAME} sha256:{small.sha256()}"
    if not folder.is_dir():
        return model
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        whole.update(f"{path.relative_to(folder).as_posix()}\0{sha256(path)}\n".encode())
    return f"{folder.name} sha256:{whole.hexdigest()}"


def default_model() -> Path:
    """Return the folder of the model that is served where none is named."""
    from ppl import model

    return model.folder()
