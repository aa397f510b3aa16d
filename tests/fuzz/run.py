"""Fuzz: some targets at a time, each for so many seconds. Exit 1 with a finding, 2 where something is missing.

Outputs go to build/fuzz: what the engine found worth keeping (corpora/NAME), logs, findings. See README.md.
"""

import argparse
import base64
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fuzz.programs import CPP, build, missing
from fuzz.seeds import PYTHON, seeds

HERE = Path(__file__).parent
OUT = Path("build/fuzz")
BEGIN = {"drs_table": ("table",), "host_files": ("manifest", "signature", "tensors")}
"""Fuzzer of C++ code -> whose first inputs are also its own."""

INPUT_SECONDS = 20
"""Of one input. The slowest takes milliseconds, but other processes may have the core."""

MEMORY_MB = 2500
LONGEST = {"manifest": 65536, "signature": 16384, "session": 16384, "host_files": 32768}
"""Bytes of an input, where 4096 are too few."""

SHOWN = 6000
"""Characters of a log that a report ends with."""

CRASHED = re.compile(r"Test unit written to (\S+)")
WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_.-]{2,30}")


@dataclass(frozen=True)
class Result:
    """What one fuzzer did."""

    name: str
    code: int
    seconds: float
    log: Path

    @property
    def line(self) -> str:
        """How it ended; the log has the engine's figures."""
        state = "nothing found" if self.code == 0 else f"FAILED with exit status {self.code}"
        return f"{self.name}: {state} in {self.seconds:.0f} s; {self.log}"

    @property
    def report(self) -> str:
        """The end of the log, the input that was the finding, and how to run it again."""
        text = self.log.read_text(errors="replace")
        lines = [f"== {self.name} ({self.log})", text[-SHOWN:]]
        if crashed := CRASHED.search(text):
            path = Path(crashed[1])
            engine = f"PYTHONPATH=tests python -m fuzz.engine {self.name}"
            program = f"{OUT}/{self.name}" if self.name in CPP else engine
            lines += ["input in base64:", base64.b64encode(path.read_bytes()).decode(), f"again: {program} {path}"]
        return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Return the exit status."""
    known = [*PYTHON, *CPP]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(known))
    parser.add_argument("--seconds", type=int, default=25, help="of each fuzzer")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="fuzzers at a time")
    options = parser.parse_args(arguments)
    names: list[str] = options.names or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"there is no fuzzer {', '.join(unknown)}; there are {', '.join(known)}")
    if lacking := missing(names):
        print("\n".join(f"missing: {each}" for each in lacking), file=sys.stderr)
        return 2
    failed = list[Result]()
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(lambda name: fuzz(name, options.seconds), names):
            print(result.line, flush=True)
            failed += [result] if result.code else []
    for result in failed:
        print(result.report)
    print(f"fuzzers: {len(names)}, with findings: {len(failed)}")
    return 1 if failed else 0


def fuzz(name: str, seconds: int) -> Result:
    """Run one fuzzer, from today's first inputs and both corpora: that of the repository and that of earlier runs."""
    kept, first, findings = (OUT / kind / name for kind in ("corpora", "seeds", "findings"))
    for folder in (kept, first, findings):
        folder.mkdir(parents=True, exist_ok=True)
    inputs = {file: data for each in BEGIN.get(name, (name,)) for file, data in seeds(each).items()}
    for file, data in inputs.items():
        (first / file).write_bytes(data)
    words = OUT / f"{name}.dict"
    words.write_text(dictionary(inputs.values()))
    options = {"max_total_time": seconds, "timeout": INPUT_SECONDS, "rss_limit_mb": MEMORY_MB, "print_final_stats": 1}
    options |= {"max_len": LONGEST.get(name, 4096), "dict": words, "artifact_prefix": f"{findings}/"}
    log, begin = OUT / f"{name}.log", time.monotonic()
    with log.open("wb") as stream:
        program = build(name, OUT, stream) if name in CPP else None
        if name in CPP and program is None:
            return Result(name, 1, 0, log)
        engine = [sys.executable, "-m", "fuzz.engine", name] if program is None else [str(program)]
        places = [str(folder) for folder in (kept, first, HERE / "corpora" / name)]
        command = [*engine, *(f"-{option}={value}" for option, value in options.items()), *places]
        done = subprocess.run(command, stdout=stream, stderr=stream, check=False)
    return Result(name, done.returncode, time.monotonic() - begin, log)


def dictionary(inputs: Iterable[bytes]) -> str:
    """The words of the inputs, for the engine to write into others."""
    words = {word for data in inputs for word in WORD.findall(data)}
    return "".join(f'"{word.decode()}"\n' for word in sorted(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
