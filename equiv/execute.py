"""Run one case in this process: reference, oracle, and the candidate in both colours."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from equiv.arena import COLOURS, Arena, OutputArena, dense_pitches, same_bytes
from equiv.blame import line_of, origin, raised_by_call
from equiv.domain import Claim, claim_of
from equiv.dtypes import DTYPES
from equiv.fills import fill
from equiv.guards import (
    ServeAllocations,
    compiled_frames,
    global_state,
    poisoned_malloc,
    restore_state,
)
from equiv.judge import LARGE_BYTES, Judge
from equiv.modes import MODES
from equiv.result import DECLARED, EQUAL, REFUSED, UNDEFINED, LedgerHit, Result
from equiv.returned import facts_of, odd, type_of
from equiv.snapshots import integers, raw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from equiv.case import Case
    from equiv.ledger import Entry
    from equiv.pairs import OpPair
    from equiv.snapshots import Snapshot


class Found(Exception):
    """Ends a case with a finding.

    ``returned``: the candidate's call returned, so that this is no refusal of it.
    """

    def __init__(
        self, kind: str, detail: str, raised_in: str = "", *, returned: bool = False
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.raised_in = raised_in
        self.returned = returned


@dataclass(frozen=True)
class Loaded:
    """A candidate in this process.

    Attributes
    ----------
    guard : how its outputs are guarded: ``"dispatch"``, ``"out"`` or ``"malloc"``.
    executions : counts runs of the kernel proper, where that can be told.
    evidence : parts of names, one of which a profile of a call must show.
    state : torch's global state from before it was imported; None where that is no matter.

    """

    name: str
    kernel: Callable[..., Any]
    guard: str
    executions: Callable[[], int] | None = None
    evidence: tuple[str, ...] = ()
    state: Mapping[str, Any] | None = None


class Executor:
    """Runs cases of one pair and candidate on one device.

    Parameters
    ----------
    pair, loaded : what is compared.
    device : ``"cpu"`` or ``"cuda[:N]"``.
    entries : ledger entries that apply to this pair, candidate, device and versions.

    Attributes
    ----------
    spent : whether a case left CUDA or torch in a state that this process can't be rid of for
        certain, so that results of later cases would mean less.

    """

    spent = False

    def __init__(self, pair: OpPair, loaded: Loaded, device: str, entries: Sequence[Entry]) -> None:
        self.pair = pair
        self.loaded = loaded
        self.device = device
        self.entries = [e for e in entries if e.against == "reference"]
        self.oracle_entries = [e for e in entries if e.against == "oracle"]
        self._arenas: dict[str, tuple[Arena, OutputArena]] = {}
        self.calls = 0
        # From before the candidate's first call: what that one changes, every later one finds.
        self.state = dict(loaded.state or global_state())

    def run(self, case: Case) -> Result:
        """Run a case; every way in which the candidate can misbehave short of dying is a result."""
        start = time.perf_counter()
        claim = claim_of(self.pair, case)
        if claim.outcome == UNDEFINED:
            return Result(UNDEFINED)
        self.let_go()
        try:
            result = CaseRun(self, case, claim).result()
        finally:
            changed = [k for k, v in global_state().items() if v != self.state[k]]
            if changed:
                restore_state(self.state)
        if changed and not result.failed:
            detail = f"changed {', '.join(changed)}"
            result = replace(result, status="global_state", detail=detail)
        eligible = tuple(
            e.id
            for e in (*self.entries, *self.oracle_entries)
            if e.covers_case(claim.point, aligned=claim.aligned, mode=case.mode)
        )
        seconds = time.perf_counter() - start
        return replace(
            result,
            eligible=eligible,
            guard=self.loaded.guard,
            seconds=seconds,
            spent=self.spent,
        )

    def let_go(self) -> None:
        """Give back what the case before took of a GPU, where that was much.

        torch would keep it, in pieces that a larger case doesn't fit into.
        """
        used = [max(a.used, out.room) for a, out in self._arenas.values()]
        if self.device.startswith("cuda") and max(used, default=0) > LARGE_BYTES:
            self._arenas.clear()
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notice a candidate that torch compiles: a dispatch mode doesn't see what it allocates.

        From the next call on its outputs are poisoned through malloc alone.
        """
        before = compiled_frames()
        try:
            yield
        finally:
            if self.loaded.guard == "dispatch" and compiled_frames() > before:
                self.loaded = replace(self.loaded, guard="malloc")

    def arenas(self, device: str) -> tuple[Arena, OutputArena]:
        """Return this device's buffers, which are kept from case to case."""
        if device not in self._arenas:
            self._arenas[device] = (Arena(device), OutputArena(device))
        return self._arenas[device]


def another_device(device: str) -> str:
    """Return a GPU that isn't the current one: the first, or the second where that is it."""
    return "cuda:0" if int(device.partition(":")[2] or 0) else "cuda:1"


class CaseRun:
    """The state of one case while it runs."""

    def __init__(self, executor: Executor, case: Case, claim: Claim) -> None:
        self.x = executor
        self.pair = executor.pair
        self.case = case
        self.claim = claim
        self.point = claim.point
        other = case.mode == "second_device"
        device = another_device(executor.device) if other else executor.device
        self.arena, self.out = executor.arenas(device)
        self.outputs = {o.name: o for o in self.pair.outputs(self.point)}
        self.room = sum(
            int(np.prod(o.shape, dtype=np.int64)) * DTYPES[o.dtype].itemsize
            for o in self.outputs.values()
        )
        self.colour = COLOURS[0]
        self.guarded = True
        self.before_call: Callable[[], None] | None = None
        self.bytes_compared = 0
        self.layouts: set[str] = set()
        self.wrong_colours: list[int] = []
        self.wrong_bits: list[dict[str, NDArray[Any]]] = []
        self.met_declared = False
        self.declared: list[tuple[Snapshot, Snapshot]] = []
        self.storage: dict[str, NDArray[Any]] = {}
        self.bits: dict[str, NDArray[Any]] = {}
        self.expected: Snapshot = {}
        self.expected_pitches: dict[str, tuple[int, ...]] = {}

    # -- operands -------------------------------------------------------------------

    def elements(self, seed: int) -> dict[str, NDArray[Any]]:
        """Generate what is written to the arena, with the case's single elements set."""
        storage = {}
        for i, p in enumerate(self.arena.placed):
            storage[p.operand.name] = fill(self.case.fill.kind, p.storage_shape, p.dtype, seed, i)
        for p in self.arena.placed:
            for name, index, value in self.case.overrides:
                if name == p.operand.name:
                    logical = p.logical(storage[name])
                    logical[np.unravel_index(index, logical.shape)] = value
        return storage

    def load(self, storage: dict[str, NDArray[Any]], *, again: bool = False) -> None:
        """Put elements into the arena, in the current colour."""
        self.arena.paint(self.colour, storage, again=again)
        self.storage = storage
        self.bits = {p.operand.name: p.logical(storage[p.operand.name]) for p in self.arena.placed}

    def refresh(self) -> None:
        """Put back, before another call, what an earlier one may have written as it may."""
        if any(o.mutable for o in self.claim.operands):
            self.load(self.storage, again=True)

    # -- calls ----------------------------------------------------------------------

    def reference(self) -> Snapshot:
        """Run the stock ops on the operands as they lie in the arena."""
        self.put_back()
        try:
            outputs = self.pair.reference(self.arena.tensors(), self.point)
        except torch.OutOfMemoryError:
            raise  # it says nothing of the candidate
        except Exception as e:  # noqa: BLE001 - it is the result
            detail = f"{type(e).__name__}: {line_of(e)}"
            raise Found("reference_raised", detail, origin(e, "")) from None
        self.expected_pitches = {n: tuple(t.stride()) for n, t in outputs.items()}
        # What the reference allocated is ours alone; a view of an operand has to be copied.
        snapshot = {n: integers(t, copy=self.arena.holds(t)) for n, t in outputs.items()}
        for o in self.claim.operands:
            if o.mutable:
                snapshot[o.name] = integers(self.arena.tensors()[o.name])
        if any(o.mutable for o in self.claim.operands):
            self.arena.paint(self.colour, self.storage, again=True)
        return snapshot

    def call(self) -> dict[str, Any]:
        """Call the candidate once, its allocations served, and check what it gave back."""
        loaded = self.x.loaded
        self.out.begin(self.colour, self.room)
        out = None
        if loaded.guard == "out":
            out = {
                o.name: self.out.serve(o.shape, dense_pitches(o.shape), DTYPES[o.dtype].torch())
                for o in self.outputs.values()
            }
        self.x.calls += 1
        before = loaded.executions() if loaded.executions else 0
        tensors = self.arena.tensors()
        facts = {n: facts_of(t) for n, t in tensors.items()}
        if self.before_call is not None:
            self.before_call()
        try:
            with poisoned_malloc(self.colour), self.x.watched():
                if loaded.guard == "dispatch":
                    with ServeAllocations(self.out):
                        returned = self.pair.call(loaded.kernel, tensors, self.point, out)
                else:
                    returned = self.pair.call(loaded.kernel, tensors, self.point, out)
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            if isinstance(e, torch.OutOfMemoryError) and self.room > LARGE_BYTES:
                raise  # on what others left of a device; a small case's want is the candidate's own
            raise Found("raised", *raised_by_call(e, self.pair, loaded)) from None
        if loaded.executions and self.pair.rows(self.point) and loaded.executions() == before:
            raise Found("not_run", f"the call returned, but {loaded.name}'s own kernel didn't run")
        for name, t in tensors.items():
            if facts_of(t) != facts[name]:
                raise Found("input_changed", f"{name} was {facts[name]}, and is {facts_of(t)}")
        return self.checked(returned)

    def checked(self, returned: Mapping[str, Any]) -> dict[str, Any]:
        """Check type, shape, dtype and device of what was returned."""
        for name, o in self.outputs.items():
            t = returned.get(name)
            if not isinstance(t, torch.Tensor) or odd(t):
                got = ", ".join(f"{k}: {type_of(v)}" for k, v in returned.items())
                raise Found(
                    "wrong_type", f"expected {', '.join(self.outputs)} as tensors, got {got}"
                )
            if tuple(t.shape) != o.shape:
                raise Found("wrong_shape", f"{name} is {list(t.shape)}, expected {list(o.shape)}")
            if t.dtype != DTYPES[o.dtype].torch():
                raise Found(
                    "wrong_dtype", f"{name} is {t.dtype}, expected {DTYPES[o.dtype].torch()}"
                )
            if t.device != self.arena.buffer.device:
                raise Found(
                    "wrong_device", f"{name} is on {t.device}, expected {self.arena.buffer.device}"
                )
            if t.numel() and not (self.out.holds(t) or self.arena.holds(t)):
                self.guarded = False
            if t.numel() and tuple(t.stride()) != self.expected_pitches[name]:
                self.layouts.add(name)
        return dict(returned)

    def snapshot(self, outputs: Mapping[str, Any]) -> Snapshot:
        """Return the outputs' bytes, and those of operands that the op may write.

        They are copied on the current stream right after the call, as who uses the result reads
        it: what is written later, by another stream or thread, isn't in them. Large ones are views
        where they are contiguous and not an operand's, good until the next call.
        """
        small = self.room <= LARGE_BYTES
        snapshot = {
            name: integers(outputs[name], copy=small or self.arena.holds(outputs[name]))
            for name in self.outputs
        }
        for o in self.claim.operands:
            if o.mutable:
                snapshot[o.name] = integers(self.arena.tensors()[o.name])
        return snapshot

    def intact(self) -> None:
        """Check the inputs, their gaps and bands, the outputs' bands, and what calls share."""
        beside = self.put_back()
        if beside:
            raise Found("input_changed", f"changed: {', '.join(beside)}")
        changed = self.arena.changed(self.bits)
        if changed:
            name, at = changed[0]
            places = ", ".join(f"{n} (byte {b:+d})" for n, b in changed)
            own = any(o.name == name for o in self.claim.operands)
            kind = "input_changed" if own or name.startswith("gap") else "out_of_bounds"
            del at
            raise Found(kind, f"changed: {places}")
        overrun = self.out.overrun()
        if overrun:
            which, at = overrun
            raise Found(
                "out_of_bounds", f"wrote at byte {at:+d} from the edge of allocation {which + 1}"
            )

    def put_back(self) -> list[str]:
        """Restore what calls share beside the operands; return the names of what was changed."""
        beside = getattr(self.pair, "beside", None)  # a pair need not have any
        shared = beside(self.point, self.arena.buffer.device) if beside else {}
        changed = [
            n
            for n, two in shared.items()
            if not torch.equal(*(integers(t, copy=False) for t in two))
        ]
        for name in changed:
            shared[name][0].copy_(shared[name][1])
        return changed

    def same(self, expected: Snapshot, actual: Snapshot) -> bool:
        """Whether every output has the expected bytes."""
        ok = True
        for name, e in expected.items():
            self.bytes_compared += e.numel() * e.element_size()
            ok = ok and same_bytes(raw(e), raw(actual[name]))
        return ok

    def accepted(self, expected: Snapshot, actual: Snapshot) -> bool:
        """Whether these very bytes were found to be declared a call earlier."""
        return any(
            e is expected and all(same_bytes(raw(t), raw(actual[n])) for n, t in kept.items())
            for e, kept in self.declared[-2:]
        )

    # -- the case -------------------------------------------------------------------

    def differences(self, judge: Judge, hits: list[LedgerHit]) -> list[tuple[Snapshot, Snapshot]]:
        """Run the case's mode in both colours; return what differs undeclared, first of each.

        A large case isn't copied: it is judged before the other colour runs.
        """
        seen: list[tuple[Snapshot, Snapshot]] = []
        large = self.room > LARGE_BYTES
        for colour in COLOURS:
            if seen and large:
                break
            if colour != self.colour:
                self.colour = colour
                self.load(self.storage, again=True)
            for expected, actual in MODES[self.case.mode](self):
                if self.same(expected, actual) or self.accepted(expected, actual):
                    continue
                if judge.all_declared(expected, actual, hits):
                    self.met_declared = True
                    if not large:  # what isn't a copy can't be compared with later
                        self.declared.append((expected, actual))
                    continue
                seen.append((expected, actual))
                self.wrong_colours.append(colour)
                self.wrong_bits.append(self.bits)
                break
        return seen

    def result(self) -> Result:
        """Run the case."""
        try:
            self.arena.place(self.claim.operands, dict(self.case.views))
            self.load(self.elements(self.case.fill.seed))
            self.expected = self.reference()
            judge = Judge(self)
            oracle, oracle_hits, departure = judge.ask_oracle()
            hits: list[LedgerHit] = list(oracle_hits)
            seen = self.differences(judge, hits)
        except Found as f:
            return self.ended(f)
        base = Result(
            EQUAL,
            bytes_compared=self.bytes_compared,
            outputs_guarded=self.guarded,
            oracle_checked=oracle is not None,
            layouts=tuple(sorted(self.layouts)),
            ledger=tuple(hits),
        )
        base = self.hashed(base)
        if seen:
            self.bits = self.wrong_bits[0]  # a mode may have gone on to others
            return judge.judge(base, seen, oracle)
        if self.met_declared:
            base = replace(base, status=DECLARED)
        if departure is not None:
            return replace(
                base, status="reference", detail=departure.sentence(), difference=departure
            )
        return base

    def ended(self, f: Found) -> Result:
        """Turn an exception into a refusal, a declared event or a finding."""
        clean = f.kind == "raised" and not f.returned and "CUDA error" not in f.detail
        if clean and self.claim.outcome == REFUSED and not self.arena.changed(self.bits):
            return Result(REFUSED, detail=f.detail, raised_in=f.raised_in)
        for e in self.x.entries:
            if e.kind == f.kind and e.covers_case(
                self.point, aligned=self.claim.aligned, mode=self.case.mode
            ):
                return Result(DECLARED, f.detail, ledger=(LedgerHit(e.id, 1),))
        return Result(f.kind, f.detail, raised_in=f.raised_in, bytes_compared=self.bytes_compared)

    def hashed(self, result: Result) -> Result:
        """Return the hashes of the logical inputs and the reference's outputs."""
        if self.room > LARGE_BYTES:
            return result
        inputs, outputs = xxhash.xxh3_128(), xxhash.xxh3_128()
        for o in self.claim.operands:
            inputs.update(np.ascontiguousarray(self.bits[o.name]).data)
        for name in sorted(self.expected):
            outputs.update(self.expected[name].cpu().numpy().data)
        return replace(result, input_hash=inputs.hexdigest(), output_hash=outputs.hexdigest())
