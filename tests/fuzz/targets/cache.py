"""An entry of the build cache: as it is, and with the checksum of its content. The same bytes as `digests.json`."""

import os
from hashlib import sha256
from pathlib import Path
from shutil import rmtree

from fastcar_compile.artifact.cache import Cache, Entry, Kind
from fastcar_compile.support.values import LOGGER, parse_json
from fuzz.expect import Finding, folder, same

KEY = "0" * 64
MADE = b"what a build made"
_PLACE = folder() / "cache"


def run(data: bytes) -> bool:
    """Take the entry; then, where it has the fields of one, what a writer would have made of them."""
    LOGGER.addFilter(_quiet)  # a damaged entry is no error, and is reported
    try:
        return _all(data)
    finally:
        LOGGER.removeFilter(_quiet)


def _quiet(_: object) -> bool:
    return False


def _all(data: bytes) -> bool:
    found = _taken(data)
    try:
        entry = Entry.model_validate(parse_json(data))
        again = entry.sealed(KEY)
    except ValueError:
        return found
    # Files that are there, so that more than the entry is taken.
    return _taken(again) | found


def _taken(content: bytes) -> bool:
    rmtree(_PLACE, ignore_errors=True)
    for name, text in ((f"ac/{KEY}", content), (f"cas/{sha256(MADE).hexdigest()}", MADE), ("digests.json", content)):
        path = _PLACE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    root = _PLACE / "artifact"
    placed = list[Path]()

    def place(name: str) -> Path:
        path = root / name
        if ".." in path.parts or not path.is_relative_to(root):
            raise Finding(f"a file outside of the artifact: {name!r:.200}")
        path.parent.mkdir(parents=True, exist_ok=True)
        placed.append(path)
        return path

    cache = Cache(_PLACE)
    entry = cache.fetch(Kind.WEIGHTS, KEY, place, links=True)
    if entry is None:
        same([path for path in placed if os.path.lexists(path)], [], "the files of a miss")
    else:
        same({path.read_bytes() for path in placed} <= {MADE}, True, "the bytes of the files")
        same(content, entry.sealed(KEY), "the entry that is written again")
    cache.trim(0)
    same(cache.sizes(), {}, "what is left of a trimmed cache")
    return entry is not None
