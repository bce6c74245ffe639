"""The first thing that the fork server of the workers imports: it leaves the command's group.

``timeout`` and Ctrl-C on a terminal signal a whole process group. A fork server that died of that
would take every worker that is being started with it.
"""

from __future__ import annotations

import contextlib
import os
import sys

if sys.argv[:1] == ["-c"]:  # the fork server's own command, not whoever imports all modules
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
