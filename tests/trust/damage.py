"""Flip bits of an artifact's files and cut them short: everything is refused before a library is loaded.

    python tests/trust/damage.py ARTIFACT --flips 10000 --truncations 1000

Half of the cases are opened with a signature, half with a pinned digest. A fifth each hits the manifest and, where it
is required, the signature; the others hit a file that is drawn among all files. So small files are hit as often as
large ones. Prints a table; the exit code is 1 where anything was accepted or loaded.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastcar_compile as fc
from fastcar_compile.artifact.layout import MANIFEST, SIGNATURE

Requirements = Mapping[str, Any]
"""Arguments of `load`."""


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


def cases(root: Path, required: Mapping[str, Requirements], flips: int, truncations: int, seed: int) -> Iterator[Case]:
    """Yield the cases, the same for the same seed."""
    draw = random.Random(seed)
    sizes = {str(p.relative_to(root)): p.stat().st_size for p in sorted(root.rglob("*")) if p.is_file()}
    others = sorted(name for name in sizes.keys() - {SIGNATURE} if sizes[name])
    for number in range(flips + truncations):
        kind = draw.choice(sorted(required))
        share = draw.random()
        name = MANIFEST if share < 0.2 else SIGNATURE if share < 0.4 and kind == "signature" else draw.choice(others)
        at = draw.randrange(sizes[name])
        yield Case(name, at, draw.randrange(8) if number < flips else None, kind)


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
    root: Path, required: Mapping[str, Requirements], *, flips: int, truncations: int, seed: int = 1
) -> Iterator[Result]:
    """Yield what became of each case. The artifact is whole again afterwards."""
    for each in required.values():
        fc.load(root, **each).close()  # and imports what that needs
    watch = Watch()
    for case in cases(root, required, flips, truncations, seed):
        undo = damaged(root / case.name, case)
        try:
            fc.load(root, **required[case.required]).close()
            error = ""
        except fc.ArtifactError as refusal:
            error = type(refusal).__name__
        finally:
            undo()
        yield Result(case, error, watch.loaded())
    for each in required.values():
        fc.load(root, **each).close()


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
        for result in outcomes(root, required, flips=given.flips, truncations=given.truncations, seed=given.seed):
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
