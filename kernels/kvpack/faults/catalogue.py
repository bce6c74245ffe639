"""The list of planted faults and of harmless variants."""

from __future__ import annotations

from kvpack.spec import Fault

FAULTS: tuple[Fault, ...] = ()
HARMLESS: tuple[Fault, ...] = ()
