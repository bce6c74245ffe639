"""Whether a finding's one command repeats it: asked of a fresh process, not believed.

A pack that keeps something between calls, such as a buffer or a counter, fails after other cases
and not alone. Its case by itself then shows nothing, and shrinking it meant nothing either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from equiv import apart, evidence
from equiv.errors import ExitCode
from equiv.loop import isolate, lanes
from equiv.loop.campaign import Options, campaign_command
from equiv.stopping import SLICE_S, Stop

NOT_ALONE = "alone in a fresh process this case is no finding: it depends on what ran before it"
"""What such a finding says of itself."""
TIMEOUT_S = 300.0
"""Most of a repetition is the import of vLLM."""


def confirm(done: Sequence[evidence.Lane], options: Options) -> list[evidence.Lane]:
    """Repeat every finding of the served lanes in a process of its own.

    Returns
    -------
    The lanes; a finding that its case alone doesn't show has the case as it was found, says so, and
    gets the command that runs the lanes up to it again.

    Raises
    ------
    Stopped
        ``options.stop`` was set.

    """
    names = tuple(lane.lane for lane in done)
    found = []
    for index, lane in enumerate(done):
        if lane.lane in lanes.APART:  # their commands run the lane
            found.append(lane)
            continue
        ran = tuple(name for name in names[: index + 1] if name not in lanes.APART)
        again = [_confirmed(finding, options, ran) for finding in lane.findings]
        found.append(dataclasses.replace(lane, findings=again))
    return found


def _confirmed(
    finding: evidence.Finding, options: Options, ran: tuple[str, ...]
) -> evidence.Finding:
    if repeats(finding, options.stop):
        return finding
    return dataclasses.replace(
        finding,
        case=finding.found,
        detail=f"{finding.detail}; {NOT_ALONE}",
        repro=campaign_command(options, ran),
    )


def repeats(finding: evidence.Finding, stop: Stop) -> bool:
    """Whether the finding's command, run in a fresh process, ends with a finding.

    Raises
    ------
    Stopped
        ``stop`` was set.

    """
    words = shlex.split(finding.repro)[1:]
    path = os.pathsep.join(entry or "." for entry in sys.path)
    code = "from equiv.apart import tie; tie(); from equiv.cli import main; main()"
    command = [sys.executable, "-c", code, *words]
    stop.check()
    process = subprocess.Popen(  # noqa: S603
        command,
        env={**os.environ, "PYTHONPATH": path, **apart.with_command()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is the command's alone, which ends this process
    )
    end = time.monotonic() + TIMEOUT_S
    try:
        while process.poll() is None and time.monotonic() < end:
            stop.check()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SLICE_S)
        isolate.told(process.returncode, stop)
        return process.returncode == ExitCode.FAIL
    finally:
        process.kill()
        process.wait()
