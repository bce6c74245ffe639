"""The entry point ``vllm.general_plugins``: called in every process of vLLM's, perhaps twice."""

from __future__ import annotations

import os
from typing import Any

from kvroute.decide import fired_switch
from kvroute.errors import RouteError
from kvroute.settings import Settings, resolve

_applied: list[str] = []


def activate() -> None:
    """Do what the environment asks, once a process; without a variable of ours, nothing.

    The order matters: what the CPU lacks comes first, then patches and faults, which may change
    the stand-ins too, then the gate, which decides when layers are built.

    Raises
    ------
    RouteError
        For a setting that can't be carried out. vLLM doesn't catch it: a server that can't take
        its route must not start.

    """
    if _applied:
        return
    settings = Settings.read(os.environ)
    if settings == Settings() and fired_switch(os.environ) is None:
        return
    _applied.extend(apply(settings))


def apply(settings: Settings) -> list[str]:
    """Carry out ``settings`` in this process; the names of what was done, in order.

    Raises
    ------
    RouteError
        See ``activate``.

    """
    from kvroute import switch
    from kvroute.tally import TALLY

    done = ["switch"]
    if settings.cpu_dcp:
        from kvroute import cpu

        done += cpu.apply_all()
    if settings.share_gpu:
        from kvroute import shared

        done += shared.install()
    if settings.workspace_rows is not None:
        from kvroute.workspace import force_rows

        force_rows(settings.workspace_rows)
        done.append(f"workspace={settings.workspace_rows}")
    if settings.emulate_fp8:
        from kvroute import fp8

        done += fp8.install()
    done += [_call(patch) for patch in _patches(settings)]
    switch.install(settings)
    if settings.evidence is not None:
        TALLY.keep_in(settings.evidence)
    TALLY.note(requested=settings.route, applied=done)
    return done


def _patches(settings: Settings) -> list[str]:
    wanted = list(settings.patches)
    if settings.route is not None and settings.route.startswith("fault:"):
        from kvroute.faults import patch_of

        patch = patch_of(settings.route.removeprefix("fault:"))
        if patch is not None:
            wanted.append(patch)
    return wanted


def _call(spec: str) -> str:
    function: Any = resolve(spec)
    try:
        function()
    except RouteError:
        raise
    except Exception as error:
        raise RouteError(f"{spec}: the patch failed ({error!r})") from error
    return spec
