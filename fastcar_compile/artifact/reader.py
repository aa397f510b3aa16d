"""Read an artifact: every byte is checked before it is used."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import ValidationError

from fastcar_compile.artifact.claim import moved_artifact
from fastcar_compile.artifact.digest import Digests, manifest_digest, name_problem
from fastcar_compile.artifact.layout import MANIFEST, RESERVED, weight_files
from fastcar_compile.artifact.manifest import CHECKSUM, SCHEMA_VERSION, Manifest, inconsistencies, sealed
from fastcar_compile.artifact.opened import OpenedFiles
from fastcar_compile.errors import ArtifactError, UserError, describe_validation
from fastcar_compile.ir.tensor_files import Array, tensors_of
from fastcar_compile.support import limits
from fastcar_compile.support.values import parse_json

if TYPE_CHECKING:
    from fastcar_compile.artifact.trust import Requirements

_HINT = "compile the model again, or copy the artifact again"
_MOST_PROBLEMS = 10


class StoredArtifact:
    """An artifact on disk whose files are verified. This class needs no torch.

    It is a context manager that closes itself. Sessions and arrays of a closed artifact stay usable.

    Args:
        digests: digests of files that need not be read again; None: every file is read.

    Attributes:
        path: folder of the artifact.
        digest: digest of manifest.json as it was read, `sha256:` and 64 hex digits. It names the artifact with all its
            files.
        manifest: its typed sections, and sha256 and size of every file.
        files: the checked files, open.

    Raises:
        ArtifactError: missing, damaged, tampered with, not what `trust` requires, or of another schema version.
    """

    def __init__(self, path: Path, trust: Requirements | None = None, digests: Digests | None = None) -> None:
        self.path = path
        self.files = _opened(path)
        try:
            data = _manifest_bytes(self.files, path)
            self.digest = manifest_digest(data)
            if trust is not None:  # before anything of the artifact is parsed
                trust.check_digest(path, self.digest)
            self.manifest: Manifest = parse_manifest(data, str(path / MANIFEST))
            if trust is not None:  # before any other file of the artifact is read
                trust.check_manifest(path, self.digest, self.manifest)
            self.files.check(self.manifest.files, Digests() if digests is None else digests)
        except BaseException:
            self.files.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files now; a second call has no effect. No session can be opened afterwards."""
        self.files.close()

    def arrays(self) -> dict[str, Array]:
        """Return every parameter of the rewritten graph by name, over memory maps of the weight files."""
        return {n: a for file in weight_files(self.manifest.files) for n, a in self.tensors(file).items()}

    def tensors(self, name: str) -> dict[str, Array]:
        """Return the tensors of a safetensors file of the artifact, over a memory map of it.

        Raises:
            ArtifactError: the file was written since the check.
        """
        return tensors_of(self.files.mapped(name), name)

    def json(self, name: str) -> Any:
        """Return the content of a JSON file of the artifact.

        Raises:
            ArtifactError: the file cannot be read.
        """
        try:
            return parse_json(self.files.data(name, limits.GRAPH_BYTES), size=limits.GRAPH_BYTES)
        except ValueError as error:
            what = f"the artifact's {name} cannot be read: {error}"
            raise ArtifactError(what, where=str(self.path), hint=_HINT) from error


def _opened(root: Path) -> OpenedFiles:
    """Return the folder, opened.

    Raises:
        ArtifactError: the folder is missing.
    """
    try:
        return OpenedFiles(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        moved = moved_artifact(root.absolute())
        if moved is not None:
            hint = f"the next build into it puts it back, and so does `mv {moved} {root.absolute()}`"
            what = "a build is replacing this artifact, or was killed while it did"
            raise ArtifactError(what, where=str(root), hint=hint) from error
        hint = "run `fastcar compile` first"
        raise ArtifactError("there is no artifact folder here", where=str(root), hint=hint) from error
    except (OSError, ValueError) as error:  # a path with a NUL raises one too
        raise ArtifactError(f"the artifact cannot be opened: {error}", where=repr(str(root))) from error


def _manifest_bytes(files: OpenedFiles, root: Path) -> bytes:
    try:
        # One byte more than is allowed lets the parser see that the file is too long.
        return files.unchecked(MANIFEST, limits.JSON_BYTES + 1)
    except OSError as error:
        if error.errno == errno.ELOOP:
            what = f"the artifact's {MANIFEST} is a symbolic link or no plain file, which is refused"
            raise ArtifactError(what, where=str(root), hint="copy the artifact with its files: cp -rL") from error
        if error.errno == errno.ENOENT:
            what = f"the folder has no {MANIFEST}, so it is not a fastcar artifact"
            hint = "give the folder that `fastcar compile -o` wrote"
            if (root / "config.json").is_file():
                hint = "this is a model: `fastcar compile` it first, and give the folder that this writes"
            raise ArtifactError(what, where=str(root), hint=hint) from error
        raise ArtifactError(f"the manifest cannot be read: {error.strerror}", where=str(root / MANIFEST)) from error


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Return the manifest of these bytes, which must be the bytes that its writer gives for its fields.

    Args:
        where: name of the file, for error texts.

    Raises:
        ArtifactError: the bytes are not JSON, or have another schema version, damage, bad fields, bad file names or
            contradictions.
    """
    try:
        data = parse_json(content)
    except ValueError as error:
        raise ArtifactError(f"the manifest is not valid JSON: {error}", where=where, hint=_HINT) from error
    if not isinstance(data, dict):
        raise ArtifactError("the manifest holds no JSON object", where=where, hint=_HINT)
    data = cast("dict[str, Any]", data)
    version = data.get("schema_version")
    if version != SCHEMA_VERSION or type(version) is not int:
        what = f"the artifact has schema version {version!r:.80}, this fastcar_compile reads version {SCHEMA_VERSION}"
        hint = "compile the model again, or open it with the release that its manifest names as producer"
        raise ArtifactError(what, where=where, hint=hint)
    # The writer gives one form for its fields, so a comparison of bytes covers order, spaces and checksum.
    try:
        whole = content == sealed(data)
    except ValueError:  # 1e999 is read as infinity, which no manifest has
        whole = False
    if not whole:
        what = "the manifest is damaged: its checksum is not that of its content"
        raise ArtifactError(what, where=where, hint=_HINT)
    return _validated({name: value for name, value in data.items() if name != CHECKSUM}, where)


def _validated(data: dict[str, Any], where: str) -> Manifest:
    try:
        manifest = Manifest.model_validate(data)
    except (ValidationError, UserError) as error:
        text = error.what if isinstance(error, UserError) else describe_validation(error)
        raise ArtifactError(f"the manifest has bad fields: {text}", where=where, hint=_HINT) from error
    bad = [f"{name!r} {problem}" for name in sorted(manifest.files) if (problem := name_problem(name))]
    bad += [f"{name!r} is reserved" for name in RESERVED if name in manifest.files]
    if bad:
        text = "; ".join(bad)
        raise ArtifactError(f"the manifest names files that are refused: {text}", where=where, hint=_HINT)
    if problems := inconsistencies(manifest):
        text = "; ".join(problems[:_MOST_PROBLEMS])
        raise ArtifactError(f"the manifest contradicts itself: {text}", where=where, hint=_HINT)
    return manifest
