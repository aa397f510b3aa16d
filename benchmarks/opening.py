"""What opening a large signed artifact costs beside reading its bytes.

    python benchmarks/opening.py build/demo/artifact --gigabytes 3.7

The artifact is a copy of the given one whose weights are random bytes in files of 1 GiB; nothing is compiled. Each
round measures every way in turn. Reading uses as many threads as opening. Cold: the files are dropped from the page
cache before.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import fastcar_compile as fc
from fastcar_compile.artifact.digest import CACHE, SETTLED_NS
from fastcar_compile.artifact.layout import weight_file, weight_files
from fastcar_compile.artifact.manifest import Sections
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.emit import SHARD_BYTES
from fastcar_compile.support.machine import at_once, usable_cores

CHUNK = 1 << 20
REPORTING = 3
"""Seconds of rest before files are dropped. A virtual machine whose balloon reports free pages does so 2 s after some
were freed (PAGE_REPORTING_DELAY of Linux), and a reported page costs its next user a fault in the host. Without the
rest, what one way freed is reported while the next one is measured."""


def enlarged(source: Path, path: Path, size: int) -> Path:
    """Write a copy of an artifact with so many bytes of random weights."""
    draw = np.random.default_rng(0)
    with StoredArtifact(source) as stored, ArtifactWriter(path) as writer:
        replaced = weight_files(stored.manifest.files)
        for name in stored.manifest.files.keys() - set(replaced):
            writer.write_bytes(name, stored.files.data(name))
        for shard, start in enumerate(range(0, size, SHARD_BYTES), 1):
            with writer.file(weight_file(shard)).open("wb") as file:
                for at in range(start, min(start + SHARD_BYTES, size), CHUNK):
                    file.write(draw.bytes(min(CHUNK, size - at)))
        writer.finish(Sections(**{name: getattr(stored.manifest, name) for name in Sections.model_fields}))
    return path


def sign(artifact: Path, folder: Path) -> Path:
    """Sign it with a new key; return the public key's file."""
    key, pem = ec.generate_private_key(ec.SECP256R1()), serialization.Encoding.PEM
    private, public = folder / "key.pem", folder / "key.pub"
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    fc.sign(artifact, private)
    return public


def read(path: Path) -> None:
    """Read a file, and do nothing with it. Asking the disk earlier, with POSIX_FADV_WILLNEED, was slower."""
    buffer = bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while file.readinto(buffer):
            pass


def drop(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time, and the CPU time of all threads, which other programs hardly change."""
    start, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cpu


def measure(artifact: Path, key: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the wall and CPU times of every way, cold and warm."""
    files = sorted((p for p in artifact.rglob("*") if p.is_file()), key=lambda p: -p.stat().st_size)
    ways: dict[str, Callable[[], object]] = {
        "read its bytes": lambda: at_once(read, files, 4 * usable_cores()),
        "open, signature required": lambda: fc.load(artifact, require_signature=key).close(),
        "open, signature required, reread=False": lambda: fc.load(
            artifact, require_signature=key, reread=False
        ).close(),
    }
    os.sync()  # what is not yet written cannot be dropped
    time.sleep(SETTLED_NS / 1e9)
    for way in ways.values():
        way()  # imports, and the digests that are kept
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for state in ("cold", "warm"):
            for name, way in ways.items():
                if state == "cold":
                    time.sleep(REPORTING)
                at_once(drop if state == "cold" else read, files)
                found.setdefault(f"{name}, {state}", []).append(seconds(way))
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path, help="a small one")
    parser.add_argument("--gigabytes", type=float, default=3.7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the file system to measure")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        folder = Path(scratch)
        os.environ[CACHE] = str(folder / "cache")
        artifact = enlarged(given.artifact, folder / "artifact", int(given.gigabytes * 1e9))
        found = measure(artifact, sign(artifact, folder), given.rounds)
    medians = {name: [statistics.median(each) for each in zip(*times, strict=True)] for name, times in found.items()}
    print("| | seconds | of the read | CPU seconds |\n|---|---|---|---|")
    for name, (wall, cpu) in medians.items():
        state = name.rpartition(", ")[2]
        share = wall / medians[f"read its bytes, {state}"][0]
        walls = [each[0] for each in found[name]]
        print(f"| {name} | {wall:.2f} ({min(walls):.2f} to {max(walls):.2f}) | {share:.2f} | {cpu:.2f} |")


if __name__ == "__main__":
    main()
