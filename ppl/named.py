"""What a model's folder tells before a server is started with it, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

from kvroute import serve
from ppl.errors import PplError
from ppl.model import CONFIG, widened
from ppl.model import folder as own_folder

WIDEN = "python -m ppl.model.widen"
HEADS = 96
"""Of the model that is proposed, where so many can be had: as many as Kimi-K3 has."""
OURS = ("deepseek_v2", "kimi_linear")
"""What ``ppl.model.widen`` takes, by ``model_type``; its other sizes it checks itself."""
CUDA_ONLY = ("kimi_linear", "kimi_k3")
"""Whose layers vLLM computes on CUDA alone, by ``model_type``."""


def model_type(model: str) -> str | None:
    """Return the ``model_type`` of a model in a folder; None where no folder tells it."""
    try:
        facts = json.loads((Path(model) / CONFIG).read_text(encoding="utf-8"))
        return str(facts.get("text_config", facts)["model_type"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def served_as_small(model: str | None) -> bool:
    """Whether a model is served with what the small one is: it, or one that was widened here."""
    return model is None or widened(Path(model))


def check(model: str, *, tp: int, device: str) -> None:
    """Refuse a model that no server of ``tp`` ranks could serve here.

    Raises
    ------
    PplError : no such folder, a model for GPUs alone, or heads that the ranks can't share; where
        ``ppl.model`` has a remedy, with the command that makes it.

    """
    folder = Path(model)
    local = model.startswith(("/", ".")) or "/" not in model
    if local and not folder.is_dir():
        raise PplError(
            f"--model {model}: no such folder; one of {HEADS} heads is made by: "
            f"{WIDEN} --heads {HEADS} --out {model} (of Kimi-K3's kind: with --model K3, a folder "
            "that python -m ppl.model.train --stage k3 made)"
        )
    kind = model_type(model)
    if device == "cpu" and kind in CUDA_ONLY:
        raise PplError(
            f"--model {model}: vLLM computes the layers of {kind} on CUDA alone; without a GPU "
            f"widen the small model: {WIDEN} --out FOLDER, then --model FOLDER"
        )
    heads = serve.heads_of(model)
    if kind not in OURS or heads is None or tp < 1 or heads % tp == 0:
        return
    more = HEADS if HEADS % math.lcm(heads, tp) == 0 else math.lcm(heads, tp)
    own = folder.resolve() == own_folder().resolve()
    of = "" if own else f" --model {model}"
    raise PplError(
        f"--tp {tp}: {'the small model' if own else f'--model {model}'} has {heads} heads, and "
        f"every rank takes as many as another; make one of {more}: {WIDEN}{of} --heads {more} "
        "--out FOLDER, then --model FOLDER"
    )
