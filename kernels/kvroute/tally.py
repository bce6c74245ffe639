"""What a rank did, counted: the evidence that a route was taken.

One process has one tally. It is readable through ``/collective_rpc`` (``kvroute.extension``),
as a file, and, where Prometheus runs in its multi-process mode, on the server's ``/metrics``.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = "bytegate.route/1"
"""Name and version of the evidence's form."""
_FLUSH_S = 1.0  # the file may lag this far behind a count


class Tally:
    """Counts of one rank.

    Attributes
    ----------
    layers : decided layers by route.
    calls : calls of vLLM's context-parallel loop.
    chunks : context chunks in those calls.
    continuations : chunks that start inside a context, merged by log-sum-exp.
    empty : requests without context in those calls.
    context_tokens : rows of context, summed over chunks: what a pack would see.
    compared, unequal : calls run both ways on the route ``both``, and those whose bytes differed.
    fp8_calls : calls whose queries were fp8: the fp8 branch of the tail.
    upcasts : attention calls whose fp8 operands were converted first (``kvroute.fp8``).
    packs : packs by kind, ``"bfloat16"`` or ``"bfloat16>float8_e4m3fn"``.
    pack_rows : tokens packed.

    """

    def __init__(self) -> None:
        self.layers: Counter[str] = Counter()
        self.calls = 0
        self.chunks = 0
        self.continuations = 0
        self.empty = 0
        self.context_tokens = 0
        self.compared = 0
        self.unequal = 0
        self.fp8_calls = 0
        self.upcasts = 0
        self.packs: Counter[str] = Counter()
        self.pack_rows = 0
        self.facts: dict[str, Any] = {}
        self._folder: Path | None = None
        self._timer: threading.Timer | None = None
        self._metrics: Any = None

    def note(self, **facts: Any) -> None:
        """Keep facts about the run: route, switch, pack, gather, workspace, versions."""
        self.facts.update(facts)

    def count_loop(
        self, *, chunks: int, continuations: int, empty: int, tokens: int, fp8: bool = False
    ) -> None:
        """Count one call of the loop."""
        self.calls += 1
        self.fp8_calls += fp8
        self.chunks += chunks
        self.continuations += continuations
        self.empty += empty
        self.context_tokens += tokens
        self._changed(calls=1, chunks=chunks, continuations=continuations, context_tokens=tokens)

    def count_compared(self, *, equal: bool) -> None:
        """Count one call that ran both ways."""
        self.compared += 1
        self.unequal += not equal

    def count_upcast(self) -> None:
        """Count one attention call on fp8 operands that were converted first."""
        self.upcasts += 1

    def count_pack(self, kind: str, rows: int) -> None:
        """Count one pack of ``rows`` tokens."""
        self.packs[kind] += 1
        self.pack_rows += rows
        self._changed(packs=1, pack_rows=rows)

    def snapshot(self) -> dict[str, Any]:
        """Everything counted so far, as plain JSON values."""
        found = {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "layers": dict(self.layers),
            "calls": self.calls,
            "chunks": self.chunks,
            "continuations": self.continuations,
            "empty": self.empty,
            "context_tokens": self.context_tokens,
            "compared": self.compared,
            "unequal": self.unequal,
            "fp8_calls": self.fp8_calls,
            "upcasts": self.upcasts,
            "packs": dict(self.packs),
            "pack_rows": self.pack_rows,
            **self.facts,
        }
        plain: dict[str, Any] = json.loads(json.dumps(found))  # torch's version is no plain str
        return plain

    def keep_in(self, folder: Path) -> None:
        """Write the tally to ``folder``, a second after a count and when the process ends.

        vLLM kills workers that are slow to stop, so the file doesn't wait for the end.
        """
        if self._folder is None:
            atexit.register(self.write)
        self._folder = folder

    def publish(self) -> bool:
        """Serve the counts as Prometheus counters; ``False`` where that can't be seen by anybody.

        Workers aren't the process that answers ``/metrics``, so it takes the client's
        multi-process mode: ``PROMETHEUS_MULTIPROC_DIR`` set to an empty folder before the
        server starts.
        """
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return False
        from kvroute.metrics import Metrics

        self._metrics = Metrics(self.facts)
        return True

    def write(self) -> None:
        """Write the file now, in one step, so that a reader never sees half of it.

        A process that built no layer, as the API server, has nothing to tell and writes none.
        """
        if self._folder is None or "rank" not in self.facts:
            return
        rank = self.facts["rank"]
        path = self._folder / f"route-{rank}-{os.getpid()}.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(self.snapshot(), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def _changed(self, **amounts: int) -> None:
        if self._metrics is not None:
            self._metrics.add(amounts)
        if self._folder is not None and self._timer is None:
            self._timer = threading.Timer(_FLUSH_S, self._flush)
            self._timer.daemon = True
            self._timer.start()

    def _flush(self) -> None:
        self._timer = None
        self.write()


TALLY = Tally()
"""This process's tally."""
