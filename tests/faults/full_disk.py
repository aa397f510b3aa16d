"""Small builds on a file system of which less and less is free. Prints one JSON value: what was found at each point.

    unshare --mount python full_disk.py FOLDER

It mounts a file system of memory at FOLDER, in a namespace of its own: nothing of it is left when the process ends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import tvm
from manifests import sections
from tvm import relax

from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.tvm.build import link_library
from fastcar_compile.errors import ArtifactError, CompileError
from faults.crash_points import build, content

SIZE = 1 << 20
PAGE = 4096
POINTS = 8


@dataclass(frozen=True)
class Found:
    """What one build met.

    Attributes:
        error: its text, or nothing. content: of the artifact afterwards. left: in the folder.
    """

    error: str
    content: str
    left: list[str]


def mount(folder: Path, options: str) -> None:
    """Mount an empty file system of memory."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def attempt(work: Callable[[], None], path: Path) -> Found:
    """Return what was found of a build at `path`; anything but a named error is raised."""
    try:
        work()
        error = ""
    except ArtifactError as caught:
        error = str(caught)
    return Found(error, content(path)[0], sorted(os.listdir(path.parent)))


def large_build(path: Path) -> None:
    """Write an artifact that replaces a small one and takes half of the file system."""
    with ArtifactWriter(path) as writer:
        writer.write_text("graph/after.txt", "large")
        for number in range(8):
            writer.write_bytes(f"weights/{number}.bin", bytes(SIZE // 16))
        writer.finish(sections())


def full_disk(folder: Path) -> list[Found]:
    """Build with 0, 1, 2, … eighths of what the build needs left."""
    mount(folder, f"size={SIZE}")
    path = folder / "out"
    found: list[Found] = []
    for point in range(POINTS):
        build(path, "small")
        statistics = os.statvfs(folder)
        left = (SIZE // 2) * point // POINTS
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(max(0, statistics.f_bavail * statistics.f_bsize - left)))
        found.append(attempt(lambda: large_build(path), path))
        ballast.unlink()
    found.append(attempt(lambda: large_build(path), path))
    return found


def full_inodes(folder: Path) -> list[Found]:
    """Build where some files can be made, but not all."""
    mount(folder, "size=1m,nr_inodes=24")
    path = folder / "out"
    build(path, "small")
    for number in range(8):
        (folder / f"ballast{number}").touch()
    return [attempt(lambda: large_build(path), path)]


def read_only(folder: Path) -> list[Found]:
    """Build on a file system that was made read-only."""
    mount(folder, f"size={SIZE}")
    path = folder / "out"
    build(path, "small")
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    return [attempt(lambda: large_build(path), path)]


def mount_point(folder: Path) -> list[Found]:
    """Build into the root of a file system, which has no name that could be exchanged."""
    mount(folder, f"size={SIZE}")
    return [attempt(lambda: large_build(folder), folder)]


def linkers(folder: Path) -> list[str]:
    """Link a library with its scratch folder full, then its own; then with compilers that fail or are not there."""
    mount(folder, f"size={SIZE}")
    (folder / "ballast").write_bytes(bytes(SIZE - 3 * PAGE))
    broken = folder.parent / "broken-g++"
    broken.write_text("#!/bin/sh\necho no such option\nexit 3\n")
    broken.chmod(0o755)
    block = relax.BlockBuilder()
    given = relax.Var("x", relax.TensorType(relax.ShapeExpr([tvm.tirx.IntImm("int64", 4)]), "float32"))
    with block.function("main", [given]):
        block.emit_func_output(relax.op.add(given, given))
    executable = tvm.compile(block.finalize(), tvm.target.Target("llvm"))
    assert isinstance(executable, relax.VMExecutable)
    texts: list[str] = []
    for library, compiler, scratch in (
        (folder.parent / "a.so", "g++", folder),
        (folder / "a.so", "g++", folder.parent),
        (folder.parent / "a.so", str(broken), folder.parent),
        (folder.parent / "a.so", "no-such-g++", folder.parent),
    ):
        try:
            link_library(executable, library, compiler, scratch)
        except (OSError, CompileError) as error:
            texts.append(str(error).replace(str(folder.parent), ""))
    return texts


def main(base: Path) -> None:
    """Print what was found, by scenario."""
    places = [base / name for name in ("disk", "inodes", "read-only", "mount", "linkers")]
    for place in places:
        place.mkdir(parents=True)
    builds = (full_disk, full_inodes, read_only, mount_point)
    found = {place.name: [asdict(f) for f in make(place)] for make, place in zip(builds, places, strict=False)}
    print(json.dumps({**found, "linkers": linkers(places[-1])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
