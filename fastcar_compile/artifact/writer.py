"""Write an artifact: an atomic, deterministic directory.

Files go to a hidden folder beside the destination, which takes its place at the end. So a failed build leaves
no file behind, and the next build removes the files of a killed build.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from fastcar_compile.artifact.cache import Cache, Entry, Kind
from fastcar_compile.artifact.claim import NO_ROOM, OLD, claimed, put, write_error
from fastcar_compile.artifact.digest import Digests, FileEntry, manifest_digest, name_problem, walk
from fastcar_compile.artifact.layout import MANIFEST, RESERVED, SIGNATURE
from fastcar_compile.artifact.manifest import Manifest, Sections, producer_versions
from fastcar_compile.artifact.thresholds import Thresholds
from fastcar_compile.errors import ArtifactError, InternalError
from fastcar_compile.ir.tensor_files import TensorPlacement, TensorSpec, placed, write_pieces
from fastcar_compile.support.files import sync
from fastcar_compile.support.machine import at_once
from fastcar_compile.support.values import LOGGER, parse_json

_MADE = "made"
"""Name of the one file of a cache's entry that is not a whole build: the artifact's name for it does not matter."""


class NotKept(Exception):
    """The cache does not have a build, or has it damaged."""


class ArtifactWriter:
    """Writes an artifact directory atomically; use it as a context manager.

    Files go below `root`, or through `write_bytes`, `write_text` and `write_pieces`; the sections through `finish`.
    Leaving the block writes manifest.json and puts the directory in place. Leaving it by an exception removes
    everything, including parent folders that this writer had to create. Inside the block no other writer may have the
    same destination.

    Args:
        path: destination. If it exists it must be an artifact (it is replaced) or an empty directory.
        cache: of files that other builds made; None: every file is made.

    Attributes:
        scratch: folder on the destination's file system for files that are not part of the artifact.
        digests: digests of the written files, once the block is left.
        links: whether the cache and the artifact may share large files.

    Raises:
        ArtifactError: the destination is not an artifact, cannot be written, or belongs to another writer.
    """

    def __init__(self, path: str | Path, cache: Cache | None = None) -> None:
        self.path, self.cache = Path(path).absolute(), cache
        self._root: Path | None = None
        self._sections: Sections | None = None
        self._written = dict[str, FileEntry]()
        self._work = self._working()
        self.digests, self.links = Digests(), True

    @property
    def root(self) -> Path:
        """The temporary directory that becomes the artifact."""
        if self._root is None:
            raise InternalError("ArtifactWriter is used outside its with block")
        return self._root

    def finish(self, sections: Sections) -> None:
        """Set the sections of the manifest. The block cannot end without them."""
        self._sections = sections

    def file(self, name: str) -> Path:
        """Return the path at which to write the file `name`; its folders exist after this call."""
        problem = name_problem(name)
        if problem or name in RESERVED:
            raise InternalError(f"artifact file {name!r} {problem or 'is reserved'}")
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def require_room(self, needed: int) -> None:
        """Raise unless the file system has `needed` bytes left. A replaced artifact keeps its room until the end.

        Raises:
            ArtifactError: the file system has fewer.
        """
        free = shutil.disk_usage(self.root).free
        if free < needed:
            what = f"the artifact needs at least {needed:,} bytes more, and {free:,} are free"
            hint = "free some space, or choose an output folder on another file system"
            raise ArtifactError(what, where=str(self.path), hint=hint)

    def write_bytes(self, name: str, data: bytes) -> Path:
        """Write one file; return its temporary path."""
        path = self.file(name)
        path.write_bytes(data)
        return path

    def write_text(self, name: str, text: str) -> Path:
        """Write one UTF-8 file with the newlines as given; return its temporary path."""
        return self.write_bytes(name, text.encode("utf-8"))

    def write_pieces(
        self,
        name: str,
        specs: Mapping[str, TensorSpec],
        pieces: Iterable[tuple[str, int, memoryview]],
        inputs: object = None,
        about: Callable[[], Any] = dict,
    ) -> tuple[dict[str, TensorPlacement], Any]:
        """Write one safetensors file, holding one piece of a tensor at a time; return where each tensor is in it.

        Args:
            pieces: none is asked for where the cache has the file. inputs: see `made`.
            about: what to say of the pieces once they are made, as JSON; it is returned, also where the cache has them.
        """

        def make(_path: Path) -> Any:
            self.require_room(sum(spec.nbytes for spec in specs.values()))
            write_pieces(self.root, name, specs, pieces)
            return about()

        header, places = placed(name, specs)
        key = None if inputs is None else [header.decode("latin-1"), inputs]
        return places, self.made(Kind.WEIGHTS, name, key, make)

    def made(self, kind: Kind, name: str, inputs: object, make: Callable[[Path], Any]) -> Any:
        """Write the file `name` by `make`, or as an earlier build made it; return what `make` returned, JSON.

        Args:
            inputs: all that decides the bytes and the result besides the package, as JSON; None: that is not known.
            make: writes the file at the path that it is given.
        """
        path = self.file(name)
        key = None if self.cache is None or inputs is None else kind.key(inputs)
        if self.cache is None or key is None:
            return make(path)
        # A store's entry of weights can write this one file, and no other.
        entry = self.cache.fetch(kind, key, lambda _name: path, only=_MADE, links=self.links)
        if entry is None:
            about = make(path)
            file = FileEntry(sha256=self.digests.of_path(path), size=path.stat().st_size)
            entry = Entry(files={_MADE: file}, about=about)
            self.cache.keep(kind, key, {_MADE: path}, entry, links=self.links)
        self.digests.note(path, entry.files[_MADE].sha256)
        return entry.about

    def take(self, key: str) -> Any:
        """Write every file as an equal build wrote it, and the sections; return what was noted then.

        Raises:
            NotKept: the cache has no such build. The block has to end by it.
        """
        assert self.cache is not None
        manifest = self.scratch / MANIFEST
        entry = self.cache.fetch(
            Kind.BUILD, key, lambda name: manifest if name == MANIFEST else self.file(name), links=True
        )
        if entry is None or MANIFEST not in entry.files:
            raise NotKept(key)
        for name in entry.files.keys() - {MANIFEST}:
            self.digests.note(self.root / name, entry.files[name].sha256)
        found: dict[str, Any] = parse_json(manifest.read_bytes())
        if found["files"] != {name: file.model_dump() for name, file in entry.files.items() if name != MANIFEST}:
            LOGGER.warning("build %s of the cache has other files than its manifest, and is made again", key)
            raise NotKept(key)
        self.finish(Sections.model_validate({name: found[name] for name in Sections.model_fields}))
        return entry.about

    def keep(self, key: str, about: object) -> None:
        """Keep the artifact, once it is in place, for equal builds.

        Args:
            about: JSON that `take` returns.
        """
        assert self.cache is not None
        paths = {name: path for name, path in walk(self.path) if name in self._written}
        self.cache.keep(Kind.BUILD, key, paths, Entry(files=self._written, about=about))

    def __enter__(self) -> Self:
        self._work.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._work.__exit__(*error)

    @contextmanager
    def _working(self) -> Generator[None]:
        """Hold the destination, and put the artifact in place at the end of the block.

        Raises:
            ArtifactError: the system refused an operation on a file of this writer.
        """
        try:
            _check_destination(self.path)
        except OSError as error:
            raise write_error(error, self.path) from error
        with claimed(self.path) as building:
            _check_destination(self.path)  # again: the claim may have put an artifact back
            try:
                self._root, self.scratch = building / "artifact", building / "scratch"
                self._root.mkdir()
                # The umask of the build does not decide who may read an artifact.
                self._root.chmod(0o755)
                self.scratch.mkdir()
                yield
                self._place(building)
            except OSError as error:
                names = [os.fsdecode(n) for n in (error.filename, error.filename2) if isinstance(n, str | bytes)]
                if error.errno in NO_ROOM or any(Path(name).is_relative_to(building) for name in names):
                    raise write_error(error, self.path) from error
                raise
            finally:
                self._root = None
        if self.cache is not None:
            # The replaced artifact is gone by now, and names of kept files with it.
            placed = {path: self._written[name] for name, path in walk(self.path) if name in self._written}
            self.cache.settle(placed, self.digests)

    def _place(self, building: Path) -> None:
        root = self.root
        if self._sections is None:
            raise InternalError("the artifact has no sections")
        sections = {name: getattr(self._sections, name) for name in Sections.model_fields}
        files = self._files()
        data = Manifest(producer=producer_versions(), files=files, **sections).to_bytes()
        self._written = files | {MANIFEST: FileEntry(sha256=hashlib.sha256(data).hexdigest(), size=len(data))}
        # A path inside JSON is escaped, so its escaped form is looked for.
        for place in (str(root), str(self.path)):
            if json.dumps(place, ensure_ascii=False)[1:-1].encode() in data:
                raise InternalError(f"the manifest holds the absolute path {place}, so it would differ between folders")
        (root / MANIFEST).write_bytes(data)
        # Contents reach the disk before names do: after a power failure a name never has half a file.
        for _, path in walk(root):
            sync(path)
        for folder, _, _ in os.walk(root):
            sync(Path(folder))
        # The build took long, and somebody may have put files there meanwhile.
        _check_destination(self.path)
        if self.path.exists() and any(self.path.iterdir()):
            os.rename(self.path, building / OLD)  # put back where the next line fails, and after a kill
        os.rename(root, self.path)
        sync(self.path.parent)

    def _files(self) -> dict[str, FileEntry]:
        found = dict(walk(self.root))
        for name, path in found.items():
            if path.is_symlink() or not path.is_file() or name in RESERVED:
                raise InternalError(f"{name!r} in the artifact is a link, not a plain file, or reserved")
        digests = at_once(self.digests.of_path, found.values())
        return {n: FileEntry(sha256=d, size=found[n].stat().st_size) for n, d in zip(found, digests, strict=True)}


def _check_destination(path: Path) -> None:
    """Raise ArtifactError instead of replacing anything that is not an artifact."""
    if not path.exists() and not path.is_symlink():
        return
    hint = "choose another output folder, or remove this one yourself"
    if path.is_symlink() or not path.is_dir():
        raise ArtifactError("the output path exists and is not a folder", where=str(path), hint=hint)
    if os.path.ismount(path):
        what = "the output folder is a mount point, which no rename can replace"
        raise ArtifactError(what, where=str(path), hint="give a folder inside of it")
    if not any(path.iterdir()):
        return
    try:
        data: Any = json.loads((path / MANIFEST).read_bytes())
        ours = "schema_version" in data and "fastcar_compile" in data["producer"]
        names = {*map(str, data["files"]), MANIFEST, SIGNATURE}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        ours, names = False, set[str]()
    if not ours:
        raise ArtifactError("the output folder exists and is not a fastcar artifact", where=str(path), hint=hint)
    if foreign := [name for name, _ in walk(path) if name not in names]:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        what = f"the output folder has files that do not belong to its artifact and would be lost: {foreign[0]!r}{more}"
        raise ArtifactError(what, where=str(path), hint="move them elsewhere, or choose another output folder")


def store_thresholds(path: Path, manifest: Manifest, thresholds: Thresholds | None) -> tuple[Manifest, str]:
    """Replace the thresholds in an artifact's manifest atomically; return the new manifest and its digest.

    A signature is removed first, as it would not hold any more. No other file is touched.

    Raises:
        ArtifactError: the manifest cannot be written.
    """
    root = path.absolute()
    changed = manifest.model_copy(update={"thresholds": thresholds})
    data = changed.to_bytes()
    with claimed(root) as building:
        try:
            # A kill between these operations leaves an artifact without signature, never one with a wrong signature.
            (root / SIGNATURE).unlink(missing_ok=True)
            # Beside the artifact, not in it: a file left behind by a kill must not make the artifact invalid.
            new = building / MANIFEST
            new.write_bytes(data)
            put(new, root / MANIFEST, (root / MANIFEST).stat().st_mode & 0o777)
        except OSError as error:
            raise ArtifactError(f"the manifest cannot be written: {error}", where=str(root)) from error
    return changed, manifest_digest(data)
