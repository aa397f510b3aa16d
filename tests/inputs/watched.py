"""Runs `fastcar` several times and prints as JSON what ran: started programs, loaded libraries, compiled code.

Usage: python watched.py FOLDER CALLS: FOLDER is the artifact, from which nothing may be loaded. CALLS is a JSON list of
lists of words. The result maps each call to its exit code and what ran.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn"}


def watch(folder: str, seen: list[str]) -> None:
    """Note every start of a program, every library of the folder, and all code that is not from a file of Python."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            seen.append(f"{event} {arguments[0]!r}")
        elif event == "ctypes.dlopen" and str(arguments[0]).startswith(folder):
            seen.append(f"{event} {arguments[0]}")
        elif event == "exec" and "eval_with_key" in arguments[0].co_filename:
            seen.append(f"exec {arguments[0].co_filename}")
        elif event == "pickle.find_class":
            seen.append(f"{event} {arguments}")

    sys.addaudithook(hook)


def main() -> None:
    folder, calls = sys.argv[1:]
    seen: list[str] = []
    found: dict[str, dict[str, object]] = {}
    watch(folder, seen)
    from typer.testing import CliRunner

    from fastcar_compile.cli import app

    for words in json.loads(calls):
        seen.clear()
        result = CliRunner().invoke(app, words)
        maps = Path("/proc/self/maps").read_text().splitlines()
        seen += [line for line in maps if f" {folder}" in line and "x" in line.split()[1]]
        name = " ".join(word for word in words if "/" not in word)
        found[name] = {"code": result.exit_code, "seen": list(seen)}
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # what other libraries do at the end of a process is not watched


if __name__ == "__main__":
    main()
