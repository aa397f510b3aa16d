"""Flip bits of an artifact's files and cut them short: everything is refused before a library is loaded.

    python tests/trust/damage.py ARTIFACT --flips 10000 --truncations 1000

Half of the cases are opened with a signature, half with a pinned digest. A fifth each hits the manifest and, where it
is required, the signature; the others hit a file that is drawn among all files. So small files are hit as often as
large ones. Prints a table; the exit code is 1 where anything was accepted or loaded.

The same for the C++ host, which the test builds with a stand-in for XRT:

    FLIPS=10000 TRUNCATIONS=1000 pytest -s --timeout 0 tests/board/test_board_program.py -k every_flip
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fastcar_compile as fc
from fastcar_compile.artifact.layout import MANIFEST, SIGNATURE

Requirements = Mapping[str, Any]
"""Arguments of `load`."""

Attempt = Callable[[], tuple[str, bool]]
"""Opens the artifact: the error's type ("": accepted), and whether a library was loaded."""

LINKED = re.compile(r"file=(\S+) \[\d+\];  generating link map")
"""What the dynamic linker writes with LD_DEBUG=files before it maps a library."""


@dataclass(frozen=True)
class Case:
    """One damage: a bit of a byte, or, with bit None, what is cut from there on."""

    name: str
    at: int
    bit: int | None
    required: str


@dataclass(frozen=True)
class Result:
    """What became of a case. error: its type; "": accepted. loaded: a library was loaded."""

    case: Case
    error: str
    loaded: bool


@dataclass(frozen=True)
class Count:
    """How many cases of each."""

    flips: int
    truncations: int


class Watch:
    """Sees when this process loads a library: by ctypes, by an import, or in any other way, as its memory map shows."""

    def __init__(self) -> None:
        self._events = 0
        sys.addaudithook(self._note)
        self._mapped = libraries()

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        native = event == "import" and len(arguments) > 1 and str(arguments[1] or "").endswith(".so")
        self._events += event == "ctypes.dlopen" or native

    def loaded(self) -> bool:
        """Return whether there was a library since the last call."""
        before, self._events = self._events, 0
        mapped, self._mapped = self._mapped, libraries()
        return bool(before or self._mapped - mapped)


def libraries() -> set[str]:
    """Return the files whose code is in this process's memory."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {line[5] for line in lines if len(line) > 5 and "x" in line[1]}


def attempts_here(root: Path, required: Mapping[str, Requirements]) -> dict[str, Attempt]:
    """Return how this process opens an artifact, by what it requires."""
    for each in required.values():
        fc.load(root, **each).close()  # and imports what that needs
    watch = Watch()

    def attempt(requirements: Requirements) -> tuple[str, bool]:
        try:
            fc.load(root, **requirements).close()
            error = ""
        except fc.ArtifactError as refusal:
            error = type(refusal).__name__
        return error, watch.loaded()

    return {kind: partial(attempt, each) for kind, each in required.items()}


def attempts_of(command: Sequence[object], required: Mapping[str, Sequence[object]]) -> dict[str, Attempt]:
    """Return how a host program opens an artifact and decodes, by the words that require something.

    Args:
        command: program and words; refused without its words, so that this shows the libraries of the program itself.
    """
    environment = os.environ | {"LD_DEBUG": "files"}

    def run(words: Sequence[object]) -> tuple[str, set[str]]:
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, env=environment)
        linked = set(LINKED.findall(done.stderr))
        if done.returncode == 0:
            return "", linked
        refused = done.returncode == 2 and not done.stdout and re.search("^error: .", done.stderr, re.MULTILINE)
        assert refused, (words, done.returncode, done.stderr)
        return "error", linked

    error, own = run(command[:1])
    assert error
    assert own

    def attempt(words: Sequence[object]) -> tuple[str, bool]:
        error, linked = run([*command, *words])
        return error, bool(linked - own)

    return {kind: partial(attempt, words) for kind, words in required.items()}


def cases(root: Path, kinds: Sequence[str], count: Count, seed: int, often: Sequence[str]) -> Iterator[Case]:
    """Yield the cases, the same for the same seed. often: files that a further fifth hits."""
    draw = random.Random(seed)
    sizes = {str(p.relative_to(root)): p.stat().st_size for p in sorted(root.rglob("*")) if p.is_file()}
    others = sorted(name for name in sizes.keys() - {SIGNATURE} if sizes[name])
    for number in range(count.flips + count.truncations):
        kind = draw.choice(sorted(kinds))
        share = draw.random()
        if share < 0.2:
            name = MANIFEST
        elif share < 0.4 and kind == "signature":
            name = SIGNATURE
        else:
            name = draw.choice(often if often and share >= 0.8 else others)
        at = draw.randrange(sizes[name])
        yield Case(name, at, draw.randrange(8) if number < count.flips else None, kind)


def damaged(path: Path, case: Case) -> Callable[[], object]:
    """Damage a file in place; return what puts it back."""
    with path.open("r+b") as file:
        file.seek(case.at)
        kept = file.read(1 if case.bit is not None else -1)
        file.seek(case.at)
        if case.bit is None:
            file.truncate()
        else:
            file.write(bytes([kept[0] ^ 1 << case.bit]))
    return lambda: restore(path, case.at, kept)


def restore(path: Path, at: int, kept: bytes) -> None:
    """Write bytes back."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(kept)


def outcomes(
    root: Path, attempts: Mapping[str, Attempt], count: Count, seed: int = 1, often: Sequence[str] = ()
) -> Iterator[Result]:
    """Yield what became of each case. The artifact is whole before and afterwards, and accepted."""
    assert_accepted(attempts)
    for case in cases(root, list(attempts), count, seed, often):
        undo = damaged(root / case.name, case)
        try:
            error, loaded = attempts[case.required]()
        finally:
            undo()
        yield Result(case, error, loaded)
    assert_accepted(attempts)


def assert_accepted(attempts: Mapping[str, Attempt]) -> None:
    """Raise AssertionError: something refuses what is not damaged."""
    assert [error for attempt in attempts.values() for error, _ in [attempt()] if error] == []


def group(name: str) -> str:
    """Return the row of the table that a file belongs to."""
    return name if name in (MANIFEST, SIGNATURE) else f"{name.split('/')[0]}/" if "/" in name else "other files"


def table(results: list[Result]) -> str:
    """Return the table, in Markdown."""
    cells = Counter((group(r.case.name), r.case.required, r.case.bit is None) for r in results)
    refused = Counter(group(r.case.name) for r in results if r.error)
    loaded = Counter(group(r.case.name) for r in results if r.loaded)
    columns = [(kind, cut) for cut in (False, True) for kind in ("digest", "signature")]
    heads = [f"{'truncations' if cut else 'flips'}, {kind}" for kind, cut in columns]
    lines = [f"| files | {' | '.join(heads)} | refused | loaded |", "|---" * 7 + "|"]
    for name in sorted({group(r.case.name) for r in results}):
        counts = [cells[name, *column] for column in columns]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {refused[name]} of {sum(counts)} | {loaded[name]} |")
    totals = [sum(cells[name, *column] for name in refused) for column in columns]
    lines.append(f"| all | {' | '.join(map(str, totals))} | {refused.total()} of {len(results)} | {loaded.total()} |")
    return "\n".join(lines)


def new_key(folder: Path) -> tuple[Path, Path]:
    """Return the files of a new private key and its public key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, pem = ec.generate_private_key(ec.SECP256R1()), serialization.Encoding.PEM
    private, public = folder / "key.pem", folder / "key.pub"
    hidden = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, hidden))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def main() -> None:
    """Damage a copy of an artifact."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--truncations", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "artifact"
        shutil.copytree(given.artifact, root)
        private, public = new_key(Path(folder))
        signed = fc.sign(root, private)
        required = {"digest": {"digest": signed.digest}, "signature": {"require_signature": public}}
        results: list[Result] = []
        attempts, count = attempts_here(root, required), Count(given.flips, given.truncations)
        for result in outcomes(root, attempts, count, given.seed):
            results.append(result)
            if os.isatty(2) or len(results) % 1000 == 0:
                print(f"\r{len(results)}", end="", file=sys.stderr, flush=True)
    print(table(results))
    bad = [r for r in results if r.loaded or not r.error]
    for result in bad[:20]:
        print(result)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
