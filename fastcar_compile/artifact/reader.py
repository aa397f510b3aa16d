"""Read an artifact: every byte is checked before it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import ValidationError

from fastcar_compile import limits
from fastcar_compile.artifact.claim import moved_artifact
from fastcar_compile.artifact.consistency import inconsistencies, survives
from fastcar_compile.artifact.digest import manifest_digest
from fastcar_compile.artifact.files import FileEntry, file_entry, name_problem, walk
from fastcar_compile.artifact.layout import MANIFEST, RESERVED, SIGNATURE, weight_files
from fastcar_compile.artifact.manifest import CHECKSUM, SCHEMA_VERSION, Manifest, sealed
from fastcar_compile.artifact.tensor_files import Array, load_tensors
from fastcar_compile.config import describe_validation
from fastcar_compile.errors import ArtifactError, UserError
from fastcar_compile.parallel import at_once
from fastcar_compile.strict_json import parse_json, read_json

_HINT = "compile the model again, or copy the artifact again"
_MOST_PROBLEMS = 10


class Trust(Protocol):
    """What has to hold of an artifact before it is used. Both calls raise SignatureError where it does not."""

    def check_digest(self, root: Path, digest: str) -> None:
        """Check the digest, before anything of the artifact is parsed."""
        ...

    def check_manifest(self, root: Path, digest: str, manifest: Manifest) -> None:
        """Check the signature, before any other file of the artifact is read."""
        ...


class StoredArtifact:
    """An artifact on disk whose files are verified. This class needs no torch.

    Attributes:
        path: its folder.
        digest: of manifest.json as it was read, `sha256:` and 64 hex digits. It names the artifact with all its files.
        manifest: its typed sections, and sha256 and size of every file.

    Raises:
        ArtifactError: missing, damaged, tampered with, not what `trust` requires, or of another schema version.
    """

    def __init__(self, path: Path, trust: Trust | None = None) -> None:
        self.path = path
        data = _manifest_bytes(path)
        self.digest = manifest_digest(data)
        if trust is not None:
            trust.check_digest(path, self.digest)
        self.manifest: Manifest = parse_manifest(data, str(path / MANIFEST))
        if trust is not None:
            trust.check_manifest(path, self.digest, self.manifest)
        verify_files(path, self.manifest)

    def arrays(self) -> dict[str, Array]:
        """Return every parameter of the rewritten graph by name, over memory maps of the weight files."""
        found: dict[str, Array] = {}
        for name in weight_files(self.manifest.files):
            found |= load_tensors(self.path / name)
        return found

    def json(self, name: str) -> Any:
        """Return the content of a JSON file of the artifact.

        Raises:
            ArtifactError: it cannot be read.
        """
        return read_json(self.path / name, f"artifact's {name}", ArtifactError, size=limits.GRAPH_BYTES, hint=_HINT)


def read_manifest(path: str | Path) -> Manifest:
    """Return the checked manifest; no other file is touched.

    Raises:
        ArtifactError: no artifact there, invalid JSON, another schema version, bad fields or bad file names.
    """
    root = Path(path)
    return parse_manifest(_manifest_bytes(root), str(root / MANIFEST))


def _manifest_bytes(root: Path) -> bytes:
    file = root / MANIFEST
    if not root.is_dir():
        moved = moved_artifact(root.absolute())
        if moved is not None:
            hint = f"the next build into it puts it back, and so does `mv {moved} {root.absolute()}`"
            raise ArtifactError("a build was killed while it replaced this artifact", where=str(root), hint=hint)
        raise ArtifactError("there is no artifact folder here", where=str(root), hint="run `fastcar compile` first")
    if file.is_symlink() or not file.is_file():
        what = f"the folder has no {MANIFEST}, so it is not a fastcar artifact"
        raise ArtifactError(what, where=str(root), hint="give the folder that `fastcar compile -o` wrote")
    try:
        with file.open("rb") as stream:
            return stream.read(limits.JSON_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"the manifest cannot be read: {error.strerror}", where=str(file)) from error


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Return the manifest that these bytes are: the only ones that its writer gives for its fields.

    Args:
        where: the file, for error texts.

    Raises:
        ArtifactError: no JSON, another schema version, damage, bad fields, bad file names, or contradictions.
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
        raise ArtifactError(
            f"the artifact has schema version {version!r:.80}, this fastcar_compile reads version {SCHEMA_VERSION}",
            where=where,
            hint="compile the model again with this version",
        )
    if content != sealed(data):
        what = "the manifest is damaged: its checksum is not that of its content"
        raise ArtifactError(what, where=where, hint=_HINT)
    return _validated({name: value for name, value in data.items() if name != CHECKSUM}, where)


def _validated(data: dict[str, Any], where: str) -> Manifest:
    try:
        manifest = Manifest.model_validate(data)
        rewritten = manifest.model_dump(mode="json")
    except (ValidationError, UserError) as error:
        text = error.what if isinstance(error, UserError) else "; ".join(describe_validation(error))
        raise ArtifactError(f"the manifest has bad fields: {text}", where=where, hint=_HINT) from error
    bad = [f"{name!r} {problem}" for name in sorted(manifest.files) if (problem := name_problem(name))]
    bad += [f"{name!r} is reserved" for name in RESERVED if name in manifest.files]
    if bad:
        text = "; ".join(bad)
        raise ArtifactError(f"the manifest names files that are refused: {text}", where=where, hint=_HINT)
    if not survives(data, rewritten):
        what = "the manifest has bad fields: a value is of another type than its writer gives it"
        raise ArtifactError(what, where=where, hint=_HINT)
    if problems := inconsistencies(manifest):
        text = "; ".join(problems[:_MOST_PROBLEMS])
        raise ArtifactError(f"the manifest contradicts itself: {text}", where=where, hint=_HINT)
    return manifest


def verify_files(path: str | Path, manifest: Manifest, progress: Callable[[str], None] | None = None) -> None:
    """Check that the folder holds exactly the manifest's files, each of its size and SHA-256, and perhaps a signature.

    Args:
        progress: called with each file's name before it is read; from several threads, as files are read at once.

    Raises:
        ArtifactError: lists everything missing, changed, unexpected or refused, at once.
    """
    root = Path(path)
    present = dict(walk(root))
    present.pop(MANIFEST, None)
    if (signature := present.get(SIGNATURE)) and signature.is_file() and not signature.is_symlink():
        del present[SIGNATURE]  # it cannot be in what it signs

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


def _file_problem(path: Path | None, entry: FileEntry) -> str | None:
    if path is None:
        return "missing"
    if path.is_symlink() or not path.is_file():
        return "is a symbolic link or not a plain file"
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"has {size} bytes, not {entry.size}"
        return None if file_entry(path).sha256 == entry.sha256 else "changed: its SHA-256 is not the manifest's"
    except OSError as error:
        return f"cannot be read: {error}"
