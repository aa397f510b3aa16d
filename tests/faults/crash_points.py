"""Builds that are killed at every step that touches their folder. Prints one JSON value: what was found after each.

    python crash_points.py FOLDER

One process imports everything; each build is a fork of it with an audit hook, which kills it at the n-th event that
names a path below the folder. So nothing of this is in the package.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from manifests import sections

from fastcar_compile.artifact.claim import moved_artifact
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import PipelineSection
from fastcar_compile.artifact.writer import ArtifactWriter, store_thresholds
from fastcar_compile.errors import ArtifactError

NAME = "out"


@dataclass(frozen=True)
class Found:
    """What was there after a kill, and after the next build.

    Attributes:
        event: at which the build was killed. content: of the artifact; "": there is none. refused: what `load` says
        then. after: of the next build's artifact. left: everything in the folder then.
    """

    event: str
    content: str
    refused: str
    after: str
    left: list[str]


def build(path: Path, text: str) -> None:
    """Write a small artifact."""
    with ArtifactWriter(path) as writer:
        writer.write_text("graph/after.txt", text)
        writer.write_bytes("weights/a.bin", bytes(1000))
        (writer.scratch / "object").write_bytes(b"x")
        writer.finish(sections(pipeline=PipelineSection(passes=text, log=())))


def change_thresholds(path: Path, text: str) -> None:
    """Write the manifest again; `text` is not used."""
    store_thresholds(path, StoredArtifact(path).manifest, None)


def killed_at(work: Callable[[], None], folder: Path, count: int, log: Path) -> bool:
    """Run `work` in a fork that is killed at the n-th event below `folder`; False: it ended before."""
    child = os.fork()
    if child == 0:
        left = count
        inside = False

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left, inside
            if inside or not any(isinstance(a, str) and a.startswith(str(folder)) for a in arguments):
                return
            left -= 1
            if left == 0:
                inside = True
                log.write_text(f"{event} {Path(str(arguments[0])).name.partition('-')[0]}")
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def content(path: Path) -> tuple[str, str]:
    """Return the text of a whole artifact, or why there is none."""
    try:
        StoredArtifact(path).close()
    except ArtifactError as error:
        if "damaged" in str(error):
            raise
        return "", str(error)
    return (path / "graph/after.txt").read_text(), ""


def crash_points(work: Callable[[Path, str], None], base: Path, *, replaces: bool) -> list[Found]:
    """Kill `work` at every event in turn, and build again each time."""
    found: list[Found] = []
    while True:
        folder = base / "place"
        folder.mkdir()
        path = folder / NAME
        if replaces:
            build(path, "old")
        log = base / "event"
        if not killed_at(lambda at=path: work(at, "new"), folder, len(found) + 1, log):
            shutil.rmtree(folder)
            return found
        text, refused = content(path)
        if refused and (moved := moved_artifact(path)):
            StoredArtifact(moved).close()
        build(path, "next")
        found.append(Found(log.read_text(), text, refused, content(path)[0], sorted(os.listdir(folder))))
        shutil.rmtree(folder)


def main(base: Path) -> None:
    """Print what was found, by scenario."""
    results = {
        "new": crash_points(build, base, replaces=False),
        "replaced": crash_points(build, base, replaces=True),
        "thresholds": crash_points(change_thresholds, base, replaces=True),
    }
    print(json.dumps({name: [asdict(f) for f in each] for name, each in results.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
