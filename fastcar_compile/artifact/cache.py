"""The build cache: what builds made, found again by everything that decided its bytes.

| path in the folder, and behind the URL of an HTTP store | what it is |
|---|---|
| `ac/<key>` | an entry as JSON: names, SHA-256 and sizes of its files, what the build noted, the key, a checksum |
| `cas/<sha256>` | the bytes of a file |

A key is a SHA-256 of inputs as JSON. SECURITY.md says whom a cache trusts.
"""

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from fastcar_compile.artifact.digest import (
    Digests,
    FileEntry,
    UserDigests,
    blocks,
    cache_folder,
    name_problem,
    private_folder,
    remove,
    require_own,
)
from fastcar_compile.artifact.layout import SIGNATURE
from fastcar_compile.artifact.manifest import sealed
from fastcar_compile.artifact.store import download, upload
from fastcar_compile.errors import InputError, UserError, os_errors
from fastcar_compile.ir.tensor_files import CHUNK
from fastcar_compile.support import limits
from fastcar_compile.support.files import open_plain, replacing
from fastcar_compile.support.machine import at_once
from fastcar_compile.support.packages import installed_names, sources_digest, versions
from fastcar_compile.support.values import LOGGER, check_kind, parse_json, path_of, shown

NO_CACHE = "FASTCAR_NO_CACHE"
"""Environment variable: set, and not empty: builds whose caller names no cache have none."""

_SCHEMES = ("http://", "https://")
LINKED = 1 << 20
"""Bytes of the smallest file that an artifact shares with the cache: nobody edits one of this size."""

_NAME = re.compile("[0-9a-f]{64}")
_LEFT_SECONDS = 24 * 60 * 60
"""Age from which an unfinished file has no writer any more."""


class Kind(StrEnum):
    """What an entry is, and the versions of packages, or all of them, that its bytes depend on."""

    WEIGHTS = "weights"
    LIBRARY = "library"
    BUILD = "build"

    def key(self, inputs: object) -> str | None:
        """Return the key of these inputs (JSON), of the package's own sources and of the packages it builds on.

        None: a source was written since this process began, so nobody knows which one it runs.
        """
        sources = sources_digest()
        if sources is None:
            return None
        made_by = installed_names() if self is Kind.BUILD else versions(*_MAKERS[self])
        text = json.dumps({"kind": self, "sources": sources, "made by": made_by, "inputs": inputs}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


_MAKERS = {
    Kind.WEIGHTS: ("torch", "numpy", "ml-dtypes", "safetensors"),
    Kind.LIBRARY: ("apache-tvm", "apache-tvm-ffi", "torch", "numpy", "jinja2"),
}


class Entry(BaseModel):
    """What `ac/<key>` holds. files: by their names in an artifact. about: JSON of the build's own."""

    model_config = ConfigDict(frozen=True)

    files: dict[str, FileEntry]
    about: Any = None

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            inside = any(str(folder) in files for folder in PurePosixPath(name).parents)
            if problem := name_problem(name) or ((inside or name == SIGNATURE) and "is no file of a build"):
                raise ValueError(f"{name!r:.80} {problem}")
        return files

    def sealed(self, key: str) -> bytes:
        """Return the bytes of `ac/<key>`: other ones under this key are damaged."""
        return sealed({"key": key} | self.model_dump(mode="json"))


class Cache:
    """A folder of what builds made, and an HTTP store behind it where one is named.

    A large file of an artifact and the kept file are two names of one file that nobody may write. Its SHA-256 is
    computed once for each state of the file. All other files are copied, and of what is taken the SHA-256 is computed
    of the very bytes that are written. A cache never fails a build: what is missing or damaged is made again. A store
    that fails once is not asked again.

    Args:
        folder: default: `builds` in $FASTCAR_CACHE, else in ~/.cache/fastcar_compile.
        remote: URL of a store that answers GET, and PUT where `write` holds, of `ac/<key>` and `cas/<sha256>`.
        write: whether builds are put into the store.
        libraries: whether the store has more than packed weights: libraries and whole builds, which are code that runs.

    Raises:
        InputError: an argument is not valid. UserError: other users may write the folder.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        remote: str | None = None,
        write: bool = False,
        libraries: bool = False,
    ) -> None:
        self.folder = (cache_folder() / "builds" if folder is None else path_of("the cache", folder)).absolute()
        for what, value in (("write", write), ("libraries", libraries)):
            check_kind(what, value, bool, "True or False")
        named: Any = remote  # a caller without a type checker may give anything
        if named is not None and not (isinstance(named, str) and named.startswith(_SCHEMES) and named.isprintable()):
            raise InputError(f"remote is {shown(remote)}", hint="give a URL that begins with http:// or https://")
        if remote is None and (write or libraries):
            raise InputError("write and libraries are about a remote store", hint="give remote too, a URL")
        self.remote, self.write, self.libraries, self._failed = remote, write, libraries, False
        require_own("the build cache", self.folder, self._path("ac"), self._path("cas"))
        self.digests = UserDigests(self.folder)

    def digests_of(self, folder: Path) -> dict[str, str]:
        """Return name and SHA-256 of the files of a model folder; an unchanged one is not read again.

        Raises:
            OSError: one cannot be read.
        """
        paths = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors") and p.is_file())
        found = at_once(self.digests.of_path, paths)
        self._save_digests()
        return {path.name: digest for path, digest in zip(paths, found, strict=True)}

    def fetch(
        self, kind: Kind, key: str, place: Callable[[str], Path], *, only: str | None = None, links: bool = False
    ) -> Entry | None:
        """Put the files of an entry where `place` wants each; None: it is not there, or is damaged.

        Args:
            key: of the entry. place: name of a file -> its path. only: name of the one file that the entry may have.
            links: whether a large file may be the kept file under a second name.
        """
        far = self._is_far(kind)
        taken = list[Path]()
        try:
            entry = self._entry(key, far)
            if entry is None or (only is not None and [*entry.files] != [only]):
                return None
            # onnx refuses weights with several names: one of them might lead out of the model's folder.
            links = links and not any(name.endswith(".onnx") for name in entry.files)

            def take(item: tuple[str, FileEntry]) -> bool:
                target = place(item[0])
                taken.append(target)  # of several threads
                return self._take(item[1], target, far, links)

            if all(at_once(take, entry.files.items())):
                with suppress(OSError):  # a folder that cannot be written is read all the same
                    os.utime(self._path(f"ac/{key}"))  # by these times `trim` knows what was used last
                return entry
        except OSError as error:
            LOGGER.warning("the build cache %s cannot be read: %s", self.folder, error)
        for path in filter(os.path.lexists, taken):  # a name that no file can have is not there
            path.unlink()
        return None

    def keep(self, kind: Kind, key: str, paths: Mapping[str, Path], entry: Entry, *, links: bool = False) -> None:
        """Keep files, by name at these paths, under a key, and put them into the store where that is wanted.

        Args:
            links: whether a large file may become the kept one, which nobody may write. Nobody else knows of it yet.
        """
        try:
            for name, path in paths.items():
                self._keep(path, entry.files[name], links)
            private_folder(self._path("ac"))
            with replacing(self._path(f"ac/{key}"), 0o444) as copy:
                copy.write(entry.sealed(key))
        except (OSError, ValueError) as error:  # what was noted may be a path that is no UTF-8
            LOGGER.warning("the build cache %s cannot be written: %s", self.folder, error)
            return
        if self.write and self._is_far(kind):
            for name in (*(f"cas/{file.sha256}" for file in entry.files.values()), f"ac/{key}"):
                self._asked("take", self._path(name), upload)
        try:
            if sum(self.sizes().values()) > limits.CACHE_BYTES:
                self.trim(limits.CACHE_BYTES)
        except UserError as error:
            LOGGER.warning("%s", error)

    def settle(self, files: Mapping[Path, FileEntry], digests: Digests) -> None:
        """Remember the states that kept files have now, after names of them came or went; in `digests`, too.

        Args:
            files: of an artifact, by path.
        """
        for path, file in files.items():
            kept = self._path(f"cas/{file.sha256}")
            with suppress(OSError):  # such as a file that was trimmed: the digest is computed again
                if file.size >= LINKED and kept.samefile(path):
                    self.digests.note(kept, file.sha256)
                    digests.note(kept, file.sha256)
        self._save_digests()

    def entries(self) -> dict[str, Entry]:
        """Return the entries of the folder by key, the least recently used first; damaged ones are removed.

        Raises:
            UserError: the folder cannot be read.
        """
        times = sorted((found.st_mtime_ns, key) for key, found in self._listed("ac").items())
        found = {key: self._entry(key, far=False) for _, key in times}
        return {key: entry for key, entry in found.items() if entry is not None}

    def sizes(self) -> dict[str, int]:
        """Return SHA-256 and bytes of every file that the folder holds, each once.

        Raises:
            UserError: the folder cannot be read.
        """
        return {name: found.st_size for name, found in self._listed("cas").items()}

    def trim(self, most: int) -> int:
        """Remove the entries that were used least recently, until at most `most` bytes are left; return these bytes.

        What killed builds left is removed, too.

        Raises:
            UserError: a file cannot be removed.
        """
        with os_errors("the build cache cannot be trimmed", self.folder):
            sizes, used, left = self.sizes(), set[str](), 0
            for key, entry in reversed(self.entries().items()):
                new = {file.sha256 for file in entry.files.values()} - used
                size = sum(sizes.get(sha256, most + 1) for sha256 in new)  # without a file it is of no use
                if left + size > most:
                    remove(self._path(f"ac/{key}"))
                else:
                    used, left = used | new, left + size
            for sha256 in sizes.keys() - used:
                remove(self._path(f"cas/{sha256}"))
            for path in (path for name in ("", "ac", "cas") for path in self._path(name).glob(".*")):
                with suppress(OSError):  # a file system without unnamed files keeps what killed builds left
                    if path.lstat().st_mtime < time.time() - _LEFT_SECONDS:
                        path.unlink()
        return left

    def _is_far(self, kind: Kind) -> bool:
        """Return whether the store may be asked for entries of this kind."""
        return self.remote is not None and (self.libraries or kind is Kind.WEIGHTS)

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _listed(self, name: str) -> dict[str, os.stat_result]:
        """Return what a folder has by the name of a SHA-256; files may go meanwhile."""
        found = dict[str, os.stat_result]()
        with os_errors("the build cache cannot be read", self.folder), suppress(FileNotFoundError, NotADirectoryError):
            for path in filter(lambda path: _NAME.fullmatch(path.name), self._path(name).iterdir()):
                with suppress(FileNotFoundError):
                    found[path.name] = path.lstat()
        return found

    def _entry(self, key: str, far: bool) -> Entry | None:
        path = self._path(f"ac/{key}")
        try:
            if self._has(path, far):
                with open_plain(path) as stream:
                    content = stream.read(limits.ENTRY_BYTES + 1)
                entry = Entry.model_validate(parse_json(content, size=limits.ENTRY_BYTES))
                if content != entry.sealed(key):
                    raise ValueError("its checksum is not that of its content")
                return entry
        except (OSError, ValueError) as error:
            self._damaged(f"entry {key}", path, error)
        return None

    def _has(self, path: Path, far: bool, most: int = limits.ENTRY_BYTES) -> bool:
        """Return whether a file is in the folder, or could be fetched from the store into it."""
        try:
            plain = stat.S_ISREG(path.lstat().st_mode)
        except OSError:  # the caller's next operation names what is more than missing
            return far and self._asked("give", path, download, most)
        if not plain:
            self._damaged("file", path, "it is not a plain file")
        return plain

    def _damaged(self, what: str, path: Path, why: object) -> None:
        LOGGER.warning("%s of the build cache is damaged, and is made again: %s (%s)", what, why, path)
        with suppress(OSError):  # it is found damaged again
            remove(path)

    def _save_digests(self) -> None:
        try:
            self.digests.save()
        except UserError as error:
            LOGGER.warning("%s", error.what)

    def _take(self, file: FileEntry, target: Path, far: bool, links: bool) -> bool:
        """Link or copy a file; return whether it was there, with the bytes of the entry."""
        kept = self._path(f"cas/{file.sha256}")
        if not self._has(kept, far, file.size):
            return False
        # Whoever made a kept file writable may be writing it.
        shared = links and file.size >= LINKED and not kept.stat().st_mode & 0o222
        if shared and self.digests.of_path(kept) == file.sha256 and self._link(kept, target, file):
            return True
        hashing = hashlib.sha256()
        # Blocks of a huge page, as `_Chunks` writes weights; what is hashed is what is written.
        with open_plain(kept) as stream, target.open("wb") as copy:
            for block in blocks(stream.fileno(), CHUNK):
                hashing.update(block)
                copy.write(block)
        if hashing.hexdigest() == file.sha256:
            return True
        self._damaged("file", kept, "its SHA-256 is another")
        return False

    def _keep(self, path: Path, file: FileEntry, links: bool) -> None:
        """Link or copy a file into the folder, unless it is there."""
        kept = self._path(f"cas/{file.sha256}")
        if self._has(kept, far=False):
            return
        private_folder(kept.parent)
        if links and file.size >= LINKED:
            path.chmod(0o444)
            if self._link(path, kept, file):
                return
        with path.open("rb") as stream, replacing(kept, 0o444) as copy:
            for block in blocks(stream.fileno(), CHUNK):
                copy.write(block)

    def _link(self, path: Path, new: Path, file: FileEntry) -> bool:
        """Give a checked file a second name; return whether the file system does so."""
        try:
            os.link(path, new)
        except OSError:
            return False
        self.digests.note(path, file.sha256)
        return True

    def _asked(self, what: str, path: Path, request: Callable[..., None], *most: int) -> bool:
        """Return whether the store gave a file of the folder, which `_take` and `_entry` check, or took it.

        Args:
            what: it does not do, where it fails.
        """
        if not self._failed:
            try:
                request(f"{self.remote}/{path.relative_to(self.folder)}", path, *most)
                return True
            except FileNotFoundError:
                pass
            except (OSError, ValueError, HTTPException) as error:
                self._failed = True
                text = "the build cache %s does not %s %s, and is not asked again: %s"
                LOGGER.warning(text, self.remote, what, path.name, error or type(error).__name__)
        return False


def cache_of(value: object) -> Cache | None:
    """Return the cache that a caller of `compile` names: a Cache, a folder, a URL, True (the default), None or False.

    Raises:
        InputError: it is none of these. UserError: other users may write the folder.
    """
    if value is None or value is False:
        return None
    if isinstance(value, Cache):
        return value
    if isinstance(value, str) and value.startswith(_SCHEMES):
        return Cache(remote=value)
    if value is True:
        try:
            return None if os.environ.get(NO_CACHE) else Cache()
        except (OSError, UserError) as error:  # nobody asked for it; a deleted current folder is an OSError
            LOGGER.warning("builds are not cached: %s", error)
            return None
    return Cache(path_of("the cache", value))
