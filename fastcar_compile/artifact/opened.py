"""The files of an artifact, opened once: a session uses the bytes that were checked."""

import errno
import hashlib
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from fastcar_compile.artifact.digest import Digests, FileEntry, Identity, name_problem
from fastcar_compile.artifact.layout import MANIFEST, SIGNATURE
from fastcar_compile.errors import ArtifactError, InputError, count_text
from fastcar_compile.support import limits
from fastcar_compile.support.machine import at_once, usable_cores
from fastcar_compile.support.values import Array

T = TypeVar("T")

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Flags of an opening that follows no link and waits for no FIFO."""

KEPT_FILE = 256 << 10
"""Bytes of the largest file that is kept in memory, and not open."""

KEPT_BYTES = 64 << 20
"""Bytes of all files that are kept in memory."""

_CHUNK = 16 << 20
_AGAIN = "compile the model again, or copy the artifact again (cp -rL, where it has links)"


@dataclass(frozen=True)
class _Checked:
    """A checked file: its bytes if it is small, else its descriptor and the state in which it was checked."""

    entry: FileEntry
    content: bytes | None = None
    descriptor: int = -1
    identity: Identity | None = None


class OpenedFiles:
    """The files of an artifact's folder. Each is opened once, relative to the folder, and checked through that handle.

    Small files are kept in memory. Large files stay open, so that a file that is put in the place of a checked file is
    not read. `data` hashes again the bytes that it read, and `mapped` a file that was touched since the check.

    It is a context manager that closes itself. Bytes and arrays that it returned stay usable.

    Args:
        root: the folder.

    Raises:
        OSError: the folder cannot be opened.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, _Checked] = {}
        self._descriptors = [os.open(root, _FOLDER)]
        self._closing = weakref.finalize(self, _close, self._descriptors)
        # At exit the system closes the descriptors.
        self._closing.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder and every file; a second call has no effect."""
        self._closing()
        self._files.clear()

    def unchecked(self, name: str, most: int) -> bytes:
        """Return the first `most` bytes of a file that the manifest does not list.

        Raises:
            OSError: the file cannot be opened or read, or is not a plain file.
        """
        descriptor = self._open(name)
        try:
            return _read(descriptor, min(most, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)

    def check(self, files: Mapping[str, FileEntry], digests: Digests) -> None:
        """Open these files and check their sizes and SHA-256, and that the folder has no other file but a signature.

        Args:
            digests: known digests; their files need not be read.

        Raises:
            ArtifactError: lists every missing, changed, unexpected or refused file at once.
        """
        # The smallest files: each of at most KEPT_FILE bytes, and KEPT_BYTES together.
        ordered = sorted((entry.size, name) for name, entry in files.items())
        totals = accumulate(size for size, _ in ordered)
        within = zip(ordered, totals, strict=True)
        kept = {name for (size, name), total in within if size <= KEPT_FILE and total <= KEPT_BYTES}

        def check(name: str) -> str | None:
            problem = name_problem(name) or self._problem(name, files[name], None if name in kept else digests)
            return f"{name}: {problem}" if problem else None

        # The largest first, and more threads than cores: some wait for the disk, and the last threads end together.
        names = sorted(files, key=lambda name: (-files[name].size, name))
        problems = sorted(text for text in at_once(check, names, 4 * usable_cores()) if text)
        problems += self._unexpected(files)
        if problems:
            count = count_text(len(problems), "file")
            what = "\n".join([f"the artifact is damaged, {count} of it:", *(f"    {problem}" for problem in problems)])
            raise ArtifactError(what, where=str(self._root), hint=f"{_AGAIN}; nothing of it was loaded")

    def data(self, name: str, most: int | None = None) -> bytes:
        """Return the bytes of a file.

        Args:
            most: refuse a larger file.

        Raises:
            ArtifactError: the artifact has no such file, or the file is too large, or was written since the check.
        """
        file = self._checked(name)
        if most is not None and file.entry.size > most:
            what = f"the artifact's {name} has {file.entry.size} bytes, and at most {most} are read"
            raise ArtifactError(what, where=str(self._root), hint=_AGAIN)
        if file.content is not None:
            return file.content
        content = self._attempt(name, lambda: _read(file.descriptor, file.entry.size))
        if hashlib.sha256(content).hexdigest() != file.entry.sha256:
            raise self._changed(name)
        return content

    def mapped(self, name: str) -> Array:
        """Return the bytes of a file, uint8 [N], as a private memory map: writing to it does not change the file.

        A page is read when it is first touched.

        Raises:
            ArtifactError: the artifact has no such file, or the file was written since the check.
        """
        file = self._checked(name)
        size = file.entry.size
        # mmap refuses an empty file.
        if not size:
            return np.empty(0, np.uint8)
        if file.content is not None:
            # An anonymous map is writable and page-aligned, as a map of the file is.
            memory = mmap.mmap(-1, size)
            memory.write(file.content)
        else:
            memory = self._attempt(name, lambda: mmap.mmap(file.descriptor, size, access=mmap.ACCESS_COPY))
            # The check comes after the map: a change before it is seen here.
            self._check_again(name, file)
        return np.frombuffer(memory, np.uint8)

    def _checked(self, name: str) -> _Checked:
        if not self._closing.alive:
            raise InputError("the artifact is closed", where=str(self._root), hint="load it again")
        if name not in self._files:
            raise ArtifactError(f"{name!r} is not a file of the artifact", where=str(self._root), hint=_AGAIN)
        return self._files[name]

    def _check_again(self, name: str, file: _Checked) -> None:
        """Raise ArtifactError if a file has other bytes than before; it is read only if its state has changed."""
        found = Identity.of(file.descriptor)
        if found == file.identity:
            return  # a file of another state may have been removed, or written to
        digest = self._attempt(name, lambda: Digests().of(file.descriptor))
        if digest != file.entry.sha256:
            raise self._changed(name)
        self._files[name] = replace(file, identity=found)

    def _attempt(self, name: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except (OSError, ValueError) as error:  # a map longer than its file is a ValueError
            raise ArtifactError(f"the artifact's {name} cannot be read: {error}", where=str(self._root)) from error

    def _changed(self, name: str) -> ArtifactError:
        what = f"the artifact's {name} was written since it was checked"
        return ArtifactError(what, where=str(self._root), hint="load the artifact again, and see who writes to it")

    def _unexpected(self, files: Mapping[str, FileEntry]) -> list[str]:
        try:
            listed = sorted(self._listed())
        except OSError as error:
            return [f"{error.filename or 'the folder'}: cannot be listed: {error.strerror}"]
        others = [each for each in listed if each[0] not in files]
        return [
            f"{name}: unexpected, {'is a symbolic link' if stat.S_ISLNK(mode) else 'is not in the manifest'}"
            for name, mode in others
            if name not in (MANIFEST, SIGNATURE) or not stat.S_ISREG(mode)
        ]

    def _problem(self, name: str, entry: FileEntry, digests: Digests | None) -> str | None:
        """Open a file and remember it; return a problem, or None. digests: None: the file is kept in memory."""
        try:
            descriptor = self._open(name)
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return str(error.args[1]) if error.errno == errno.ELOOP else f"cannot be read: {error}"
        self._descriptors.append(descriptor)
        try:
            identity = Identity.of(descriptor)
            # The size is known without reading, and most damage changes it.
            if identity.size != entry.size:
                return f"has {identity.size} bytes, not {entry.size}"
            content = None if digests else _read(descriptor, entry.size)
            digest = digests.of(descriptor) if digests else hashlib.sha256(content or b"").hexdigest()
        except OSError as error:
            return f"cannot be read: {error}"
        if digest != entry.sha256:
            return "changed: its SHA-256 is not the manifest's"
        self._files[name] = _Checked(entry, content, descriptor, identity)
        if content is not None:
            self._descriptors.remove(descriptor)
            os.close(descriptor)
        return None

    def _open(self, name: str) -> int:
        """Return a descriptor of a plain file; no part of its name may be a link."""
        folder, _, last = name.rpartition("/")
        with self._folder(folder) as at:
            # Opening a device may have effects, so the kind of file is asked first.
            # O_NOFOLLOW covers a link that somebody puts there in between.
            if not stat.S_ISREG(os.stat(last, dir_fd=at, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, "is a symbolic link or not a plain file")
            return os.open(last, _FILE, dir_fd=at)

    @contextmanager
    def _folder(self, name: str) -> Generator[int]:
        """Yield a descriptor of a folder, "" for the artifact's own; no part of its name may be a link."""
        with ExitStack() as stack:
            at = self._descriptors[0]
            for part in name.split("/") if name else []:
                try:
                    at = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
                except NotADirectoryError as error:  # a link is not a directory
                    raise OSError(errno.ELOOP, f"is in {part}, a symbolic link or no folder") from error
                stack.callback(os.close, at)
            yield at

    def _listed(self) -> Iterator[tuple[str, int]]:
        """Yield name and mode of every file in the folder, and of every folder that is too deep in it."""
        folders = [""]
        while folders:
            prefix = folders.pop()
            with self._folder(prefix.rstrip("/")) as at, os.scandir(at) as entries:
                for entry in entries:
                    name, mode = prefix + entry.name, entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISDIR(mode) and len(name) < limits.FILE_NAME:
                        folders.append(f"{name}/")
                    else:
                        yield name, mode


def _read(descriptor: int, size: int) -> bytes:
    """Return the first `size` bytes of a file, or fewer where it ends."""
    parts = list[bytes]()
    at = 0
    while at < size and (part := os.pread(descriptor, min(_CHUNK, size - at), at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
