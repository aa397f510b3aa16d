"""The artifact store: an atomic, deterministic directory writer and a reader that checks every byte before use.

Layout: the caller's files plus `manifest.json`, which lists each of them with SHA-256 and size. Writing goes to a
hidden sibling directory that is renamed over the destination at the end, so a failed build leaves nothing behind.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastcar_compile.artifact.atomic import replace_folder, sync
from fastcar_compile.artifact.digest import file_sha256
from fastcar_compile.artifact.tensor_files import Placement, TensorSource, write_streamed
from fastcar_compile.config import describe_validation
from fastcar_compile.errors import ArtifactError, InternalError
from fastcar_compile.parallel import at_once

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
_PRODUCERS = {
    "fastcar_compile": "fastcar_compile",
    "torch": "torch",
    "tvm": "apache-tvm",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "numpy": "numpy",
}


class FileEntry(BaseModel):
    """What one file must be: SHA-256 as 64 hex digits, size in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0, strict=True)


class Manifest(BaseModel):
    """The content of manifest.json.

    Args:
        schema_version: layout of the artifact; only `SCHEMA_VERSION` can be read.
        producer: versions of the packages that wrote it.
        sections: the compiler's own JSON sections (config, target, state, …), by name.
        files: POSIX path relative to the artifact -> checksum and size; every file but manifest.json itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = Field(strict=True)
    producer: dict[str, str]
    sections: dict[str, Any]
    files: dict[str, FileEntry]

    def to_bytes(self) -> bytes:
        """Deterministic JSON: sorted keys, two spaces, UTF-8, one newline at the end."""
        text = json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode("utf-8")


def producer_versions() -> dict[str, str]:
    """Versions of this package and of what it builds on; a package that is not installed reads "none"."""
    versions = {"python": platform.python_version()}
    for name, distribution in _PRODUCERS.items():
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    return versions


def name_problem(name: str) -> str | None:
    """Why `name` may not be a file of an artifact, or None. It must be relative, POSIX, without `..` and backslash."""
    if not name or "\\" in name or "\0" in name:
        return "is empty or has a backslash or NUL in it"
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.as_posix() != name or name == ".":
        return "leaves the artifact's folder or is not in plain relative form"
    return None


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """(relative POSIX name, path) of everything below root that is not a plain directory, sorted by name."""
    found: list[tuple[str, Path]] = []
    for folder, subfolders, files in os.walk(root, followlinks=False):
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        for name in [*files, *links]:
            path = Path(folder) / name
            found.append((path.relative_to(root).as_posix(), path))
    return iter(sorted(found))


class ArtifactWriter:
    """Writes an artifact directory atomically; use it as a context manager.

    Files go below `root` (or through `write_bytes`, `write_text`, `write_tensors`), sections through `section`. Leaving
    the block normally writes manifest.json and puts the directory in place; leaving it by an exception removes
    everything, including parent folders that this writer had to create.

    Args:
        path: destination. If it exists it must be an artifact (it is replaced) or an empty directory.

    Raises:
        ArtifactError: the destination is something else, or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._root: Path | None = None
        self._sections: dict[str, Any] = {}
        self._made_parents: list[Path] = []

    @property
    def root(self) -> Path:
        """The temporary directory that becomes the artifact."""
        if self._root is None:
            raise InternalError("ArtifactWriter is used outside its with block")
        return self._root

    def section(self, name: str, value: Any) -> None:
        """Sets one section of the manifest; `value` must be JSON-safe (no NaN, no infinity)."""
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InternalError(f"manifest section {name!r} is not JSON: {error}") from error
        self._sections[name] = value

    def file(self, name: str) -> Path:
        """The path at which to write the file `name` (its folders exist after this call)."""
        problem = name_problem(name)
        if problem or name == MANIFEST:
            raise InternalError(f"artifact file {name!r} {problem or 'is reserved'}")
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write_bytes(self, name: str, data: bytes) -> Path:
        """Writes one file; returns its temporary path."""
        path = self.file(name)
        path.write_bytes(data)
        return path

    def write_text(self, name: str, text: str) -> Path:
        """Writes one UTF-8 file with the newlines as given; returns its temporary path."""
        return self.write_bytes(name, text.encode("utf-8"))

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor | np.ndarray]) -> Path:
        """Writes one safetensors file; returns its temporary path."""
        path = self.file(name)
        save_tensors(path, tensors)
        return path

    def write_streamed(self, name: str, tensors: Iterable[str], source: TensorSource) -> dict[str, Placement]:
        """Writes one safetensors file holding one tensor at a time; returns where each tensor is in it."""
        self.file(name)
        return write_streamed(self.root, name, tensors, source)

    def __enter__(self) -> Self:
        _check_destination(self.path)
        parent = self.path.parent
        self._made_parents = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self._root = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.building-", dir=parent))
            self._root.chmod(0o755)
        except OSError as error:
            self._clean()
            raise ArtifactError(f"the output folder cannot be written: {error}", where=str(self.path)) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
                self._made_parents = []
        finally:
            self._clean()

    def _finish(self) -> None:
        root = self.root
        manifest = Manifest(
            schema_version=SCHEMA_VERSION, producer=producer_versions(), sections=self._sections, files=self._files()
        )
        data = manifest.to_bytes()
        for place in (str(root), str(self.path)):
            if json.dumps(place, ensure_ascii=False)[1:-1].encode() in data:
                raise InternalError(f"the manifest holds the absolute path {place}, so it would differ between folders")
        (root / MANIFEST).write_bytes(data)
        for _, path in _walk(root):
            sync(path)
        for folder, _, _ in os.walk(root):
            sync(Path(folder))
        _check_destination(self.path)
        replace_folder(root, self.path)
        sync(self.path.parent)

    def _files(self) -> dict[str, FileEntry]:
        found = dict(_walk(self.root))
        for name, path in found.items():
            if path.is_symlink() or not path.is_file() or name == MANIFEST:
                raise InternalError(f"{name!r} in the artifact is a link, not a plain file, or reserved")
        return dict(zip(found, at_once(_entry, found.values()), strict=True))

    def _clean(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None
        for folder in self._made_parents:
            try:
                folder.rmdir()
            except OSError:
                return


def _check_destination(path: Path) -> None:
    """Refuses to replace anything that is not ours."""
    if not path.exists() and not path.is_symlink():
        return
    hint = "choose another output folder, or remove this one yourself"
    if path.is_symlink() or not path.is_dir():
        raise ArtifactError("the output path exists and is not a folder", where=str(path), hint=hint)
    if not any(path.iterdir()):
        return
    try:
        data = json.loads((path / MANIFEST).read_bytes())
        ours = isinstance(data, dict) and "schema_version" in data and "fastcar_compile" in data["producer"]
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise ArtifactError("the output folder exists and is not a fastcar artifact", where=str(path), hint=hint)


def read_manifest(path: str | Path) -> Manifest:
    """Reads and checks manifest.json; touches no other file.

    Raises:
        ArtifactError: no artifact there, invalid JSON, another schema version, bad fields or bad file names.
    """
    root = Path(path)
    file = root / MANIFEST
    if not root.is_dir():
        raise ArtifactError("there is no artifact folder here", where=str(root), hint="run `fastcar compile` first")
    if file.is_symlink() or not file.is_file():
        raise ArtifactError(f"the folder has no {MANIFEST}, so it is not a fastcar artifact", where=str(root))
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"the manifest is not valid JSON: {error}", where=str(file)) from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ArtifactError(
            f"the artifact has schema version {version}, this fastcar_compile reads version {SCHEMA_VERSION}",
            where=str(file),
            hint="compile the model again with this version",
        )
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        text = "; ".join(describe_validation(error))
        raise ArtifactError(f"the manifest has bad fields: {text}", where=str(file)) from error
    bad = [f"{name!r} {problem}" for name in sorted(manifest.files) if (problem := name_problem(name))]
    if bad:
        raise ArtifactError("the manifest names files that are refused: " + "; ".join(bad), where=str(file))
    return manifest


def write_section(path: str | Path, name: str, value: Any) -> Manifest:
    """Set one section of an artifact's manifest in one atomic step and return the manifest; no other file is touched.

    Raises:
        ArtifactError: no artifact there, or it cannot be written.
    """
    root = Path(path).absolute()
    manifest = read_manifest(root)
    changed = manifest.model_copy(update={"sections": {**manifest.sections, name: value}})
    try:
        # Beside the artifact, not in it: a file left behind by a kill must not make the artifact invalid.
        handle, scratch = tempfile.mkstemp(prefix=f".{root.name}.manifest-", dir=root.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(changed.to_bytes())
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(scratch, (root / MANIFEST).stat().st_mode & 0o777)
        os.replace(scratch, root / MANIFEST)
    except OSError as error:
        raise ArtifactError(f"the manifest cannot be written: {error}", where=str(root)) from error
    return changed


def verify_files(path: str | Path, manifest: Manifest, progress: Callable[[str], None] | None = None) -> None:
    """Checks that the folder holds exactly the manifest's files, each of its size and SHA-256.

    Args:
        progress: called with each file's name before it is read; from several threads, as files are read at once.

    Raises:
        ArtifactError: lists everything missing, changed, unexpected or refused, at once.
    """
    root = Path(path)
    present = dict(_walk(root))
    present.pop(MANIFEST, None)

    def check(name: str) -> str | None:
        if progress is not None:
            progress(name)
        problem = name_problem(name) or _file_problem(present.get(name), manifest.files[name])
        return f"{name}: {problem}" if problem else None

    problems = [text for text in at_once(check, sorted(manifest.files)) if text]
    for name in sorted(present.keys() - manifest.files.keys()):
        what = "is a symbolic link" if present[name].is_symlink() else "is not in the manifest"
        problems.append(f"{name}: unexpected, {what}")
    if problems:
        count = f"{len(problems)} file{'s' if len(problems) > 1 else ''}"
        raise ArtifactError(
            f"the artifact is damaged, {count} of it:\n" + "\n".join(f"    {problem}" for problem in problems),
            where=str(root),
            hint="compile the model again, or copy the artifact again; nothing of it was loaded",
        )


def _entry(path: Path) -> FileEntry:
    return FileEntry(sha256=file_sha256(path), size=path.stat().st_size)


def _file_problem(path: Path | None, entry: FileEntry) -> str | None:
    if path is None:
        return "missing"
    if path.is_symlink() or not path.is_file():
        return "is a symbolic link or not a plain file"
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"has {size} bytes, not {entry.size}"
        return None if _entry(path).sha256 == entry.sha256 else "changed: its SHA-256 is not the manifest's"
    except OSError as error:
        return f"cannot be read: {error}"


def save_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor | np.ndarray]) -> None:
    """Writes torch or numpy tensors of any shape to one safetensors file, deterministically."""
    plain = {}
    for name in sorted(tensors):
        value = tensors[name]
        tensor = torch.from_numpy(np.asarray(value, order="C")) if isinstance(value, np.ndarray) else value
        plain[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    Path(path).write_bytes(safetensors.torch.save(plain))


def load_tensors(path: str | Path, framework: Literal["torch", "numpy"] = "torch") -> dict[str, Any]:
    """All tensors of a safetensors file, as torch tensors or numpy arrays.

    Raises:
        ArtifactError: missing, or not a valid safetensors file.
    """
    try:
        module = safetensors.torch if framework == "torch" else safetensors.numpy
        return module.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"the tensor file cannot be read: {error}", where=str(path)) from error
