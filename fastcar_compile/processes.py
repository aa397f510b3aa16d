"""Child processes that end with this one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from fastcar_compile.undo import unbroken, undone


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed. Messages are in English.

    The command and its own children are a process group. If this call ends early, so does the group.

    Args:
        env: variables besides those of this process.

    Raises:
        OSError: the command cannot be started.
    """
    variables = {**os.environ, "LC_ALL": "C", **(env or {})}
    output = subprocess.PIPE
    with ExitStack() as stack:
        with unbroken():
            child = stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables, process_group=0
                )
            )
            stack.enter_context(undone(lambda: _end(child)))
        out, err = (data.decode("utf-8", "replace") for data in child.communicate())
    return subprocess.CompletedProcess(list(command), child.returncode, out, err)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the group of a child that still runs."""
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
