"""Child processes that end with this one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed. Messages are in English.

    The command and its own children are a process group. If this call ends early, so does the group.

    Args:
        env: variables besides those of this process.

    Raises:
        OSError: the command cannot be started.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "LC_ALL": "C", **(env or {})},
        process_group=0,
    ) as child:
        try:
            out, err = child.communicate()
        except BaseException:  # such as Ctrl-C: g++ alone would leave its linker running
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(list(command), child.returncode, out, err)
