"""Ctrl-C and SIGTERM: one line, their exit code, and nothing left: no file, no child process."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fastcar_compile.support import machine as processes

BUILD = """
import sys
from pathlib import Path
import fastcar_compile.cli.commands
from fastcar_compile.support import machine as processes
from fastcar_compile.artifact.writer import ArtifactWriter

def build(**options):
    with ArtifactWriter(sys.argv[1]) as writer:
        writer.write_text("graph/after.txt", "x")
        processes.run(["sh", "-c", "echo $$ > $0; sleep 600 & wait", str(writer.scratch / "ready")])

fastcar_compile.cli.commands.app = build
fastcar_compile.cli.main()
"""


def running(group: int) -> list[str]:
    """The processes of a group that have not ended, by what /proc says of them."""
    found: list[str] = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _parent, of = file.read_text().rpartition(")")[2].split()[:3]
            found += [file.parent.name] if state != "Z" and int(of) == group else []
    return found


@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]
)
def test_a_signal_inside_a_linker(tmp_path: Path, number: signal.Signals, code: int, line: str) -> None:
    command = [sys.executable, "-c", BUILD, str(tmp_path / "deeper" / "out")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        group = 0
        while not group and process.poll() is None:
            texts = [path.read_text() for path in tmp_path.glob("deeper/.out.building-*/scratch/ready")]
            group = int(texts[0]) if texts and texts[0].endswith("\n") else 0
            time.sleep(0.01)
        process.send_signal(number)
        assert (process.communicate(), process.returncode) == (("", line), code)
    assert os.listdir(tmp_path) == []
    deadline = time.monotonic() + 30
    while running(group) and time.monotonic() < deadline:  # killed, but the kernel may not have ended it yet
        time.sleep(0.01)
    assert running(group) == []


def test_a_library_that_makes_another_error_of_it(tmp_path: Path) -> None:
    code = "import signal, sys, fastcar_compile, fastcar_compile.cli as cli\n"
    code += "def load(path):\n"
    code += "    try: signal.raise_signal(signal.SIGINT)\n"
    code += "    except BaseException as error: raise ImportError('numpy failed to import') from error\n"
    code += "fastcar_compile.load = load\nsys.argv = ['fastcar', 'inspect', 'x']\ncli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    code = "import signal, sys, fastcar_compile.cli.commands as c; import fastcar_compile.cli as cli\n"
    code += "c.app = lambda **_: print(signal.getsignal(signal.SIGINT).name)\ncli.main()"
    command = ["sh", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "SIG_IGN\n"


def test_a_command_that_fails_is_reported_in_english() -> None:
    done = processes.run(["ls", "/none"], {"LC_MESSAGES": "de_DE.UTF-8"})
    assert done.returncode == 2
    assert "No such file or directory" in done.stderr
