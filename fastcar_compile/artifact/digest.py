"""SHA-256 of files, and the digest that names an artifact. A file is read again unless the caller forbids it."""

import hashlib
import os
import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from fastcar_compile.errors import UserError, os_errors
from fastcar_compile.support import limits
from fastcar_compile.support.files import open_plain, replacing
from fastcar_compile.support.values import LOGGER, parse_json


class FileEntry(BaseModel):
    """The expected checksum and size of one file: SHA-256 as 64 hex digits, size in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0, strict=True)


def walk(root: Path) -> list[tuple[str, Path]]:
    """Return (relative POSIX name, path) of everything below root that is not a plain directory, sorted by name."""
    paths = (path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted((path.relative_to(root).as_posix(), path) for path in paths)


def name_problem(name: str) -> str | None:
    """Return why `name` may not be a file of an artifact, or None; names are relative POSIX paths without `..`."""
    if not name or "\\" in name or "\0" in name:
        return "is empty or has a backslash or NUL in it"
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.as_posix() != name or name == ".":
        return "leaves the artifact's folder or is not in plain relative form"
    return None


SETTLED_NS = 1_000_000_000
"""A digest is remembered only of a file whose last change is this long past: file systems' clocks tick, and a change
within the same tick would leave no trace."""

DIGEST_PREFIX = "sha256:"
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"

CACHE = "FASTCAR_CACHE"
"""Environment variable: the folder of files that are kept from process to process; see `cache_folder`."""

MOST_KNOWN = 20_000
"""Digests that a user's file keeps: the newest."""

_BLOCK = 512 << 10
"""Bytes that are read at once: they are hashed while they are in the core's cache."""

_FETCHED = 4 << 20
"""Bytes that a thread brings into the page cache at once."""

_AHEAD = 32 << 20
"""Bytes that a thread brings into the page cache before they are read."""


class Identity(NamedTuple):
    """A state of a file: a change of its contents changes one of these, and nobody can put `changed` back."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """Return the state of an open file; `modified` and `changed`, of contents and of the inode, in nanoseconds."""
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def blocks(descriptor: int, most: int | None = None) -> Generator[memoryview]:
    """Yield the bytes of an open file from its start; the disk reads on meanwhile. A block is valid until the next one.

    Args:
        most: bytes of a block; None: as many as are hashed fastest.

    Raises:
        OSError: it cannot be read.
    """
    buffer = memoryview(bytearray(most or _BLOCK))
    size = os.fstat(descriptor).st_size
    wanted = SimpleQueue[int | None]()
    fetcher = Thread(target=_fetch, args=(descriptor, wanted), daemon=True)
    fetcher.start()
    at = asked = 0
    try:
        # `preadv` does not move the file's position, so the fetcher can use the same descriptor.
        while count := os.preadv(descriptor, [buffer], at):
            while asked < min(at + _AHEAD, size):
                wanted.put(asked)
                asked += _FETCHED
            at += count
            yield buffer[:count]
    finally:
        wanted.put(None)
        fetcher.join()


def _fetch(descriptor: int, wanted: SimpleQueue[int | None]) -> None:
    """Bring the wanted pages of a file into the page cache, until None is wanted.

    Copying them within the kernel, to nowhere, takes no time, and makes pages as large as reading them would:
    `posix_fadvise` makes small pages, which slow decoding down. The reader of the pages meets an error again.
    """
    with suppress(OSError), open(os.devnull, "wb", buffering=0) as nowhere:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while (start := wanted.get()) is not None:
            end = start + _FETCHED
            while start < end and (sent := os.sendfile(nowhere.fileno(), descriptor, start, end - start)):
                start += sent


class Digests:
    """Digests of files by their state. With these digests an unchanged file is not read again.

    Args:
        known: digests of earlier readings.
    """

    def __init__(self, known: Mapping[Identity, str] | None = None) -> None:
        self.known = dict(known or {})

    def of(self, descriptor: int) -> str:
        """Return the SHA-256 of an open file in 64 hex digits.

        Raises:
            OSError: it cannot be read.
        """
        before = Identity.of(descriptor)
        if before in self.known:
            return self.known[before]
        # The age counts from before the reading: a change during it is seen by the comparison below.
        settled = time.time_ns() - before.changed > SETTLED_NS
        hashing = hashlib.sha256()
        for block in blocks(descriptor):
            hashing.update(block)
        digest = hashing.hexdigest()
        if settled and Identity.of(descriptor) == before:
            self.known[before] = digest
        return digest

    def of_path(self, path: Path) -> str:
        """Return the SHA-256 of a file that is not open.

        Raises:
            OSError: it cannot be read.
        """
        with open_plain(path) as stream:
            return self.of(stream.fileno())

    def note(self, path: Path, digest: str) -> None:
        """Remember the digest of a file that this process has just written, and nobody else knows of."""
        with path.open("rb") as stream:
            self.known[Identity.of(stream.fileno())] = digest


class _KnownFile(BaseModel):
    """The file of a user's digests: states of files, the oldest first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = 1
    files: tuple[tuple[Identity, str], ...]


class UserDigests(Digests):
    """The digests that a user keeps from process to process, in a file that nobody else may write.

    Args:
        folder: of the file `digests.json`; None: `cache_folder`.

    Raises:
        UserError: another user may write the file, or its folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._path = (folder or cache_folder()) / "digests.json"
        super().__init__(self._read())
        self._saved = dict(self.known)

    def _read(self) -> dict[Identity, str]:
        require_own("the digests of files that are not read again", self._path, self._path.parent)
        try:
            with open_plain(self._path) as stream:
                return dict(_KnownFile.model_validate(parse_json(stream.read(limits.JSON_BYTES + 1))).files)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            LOGGER.warning("%s cannot be read, so that every file is read again: %s", self._path, error)
            return {}

    def save(self) -> None:
        """Write the file atomically, where it would change.

        Raises:
            UserError: it cannot be written.
        """
        if self.known == self._saved:
            return
        text = _KnownFile(files=tuple(self.known.items())[-MOST_KNOWN:]).model_dump_json()
        with os_errors("the digests of checked files cannot be kept", self._path):
            private_folder(self._path.parent)
            with replacing(self._path, 0o600) as new:
                new.write(text.encode())
        self._saved = dict(self.known)


def cache_folder() -> Path:
    """Return the folder of files that need not be made again.

    It is $FASTCAR_CACHE, else `fastcar_compile` in $XDG_CACHE_HOME, else in ~/.cache.

    Raises:
        UserError: no variable is set, and the user has no home folder.
    """
    if os.environ.get(CACHE):
        return Path(os.environ[CACHE])
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastcar_compile"
    except RuntimeError as error:
        raise UserError("the user has no home folder", hint=f"set {CACHE} to a folder that can be written") from error


# Files of a cache, which nobody else may write, and where anything may stand in a file's place.


def require_own(what: str, *places: Path) -> None:
    """Raise unless these files and folders, as far as they are there, are this user's own.

    Args:
        what: they are, for the error.

    Raises:
        UserError: another user may write one.
    """
    for place in places:
        with suppress(OSError):  # what cannot be looked at cannot be read either
            found = place.stat()
            # Root may write anything anyway. Group and other users must not.
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
                hint = f"correct its permissions (chmod go-w), or set ${CACHE}"
                raise UserError(f"other users may write {what}", where=str(place), hint=hint)


def private_folder(path: Path) -> None:
    """Make a folder, and the missing ones above it, for this user alone, whatever the umask is.

    Raises:
        OSError: one cannot be made.
    """
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            with suppress(FileExistsError):  # another build was faster; where it is a file, the next line says so
                folder.mkdir(mode=0o700)
                folder.chmod(0o700)


def remove(path: Path) -> None:
    """Remove a file, or whatever stands in its place."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path)


def manifest_digest(data: bytes) -> str:
    """Return the digest of an artifact whose manifest.json has these bytes, `sha256:` and 64 hex digits."""
    return DIGEST_PREFIX + hashlib.sha256(data).hexdigest()
