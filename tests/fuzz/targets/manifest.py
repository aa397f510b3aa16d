"""manifest.json: as it is, and with the checksum that belongs to its content."""

from fastcar_compile.artifact.manifest import CHECKSUM, sealed
from fastcar_compile.artifact.reader import parse_manifest
from fastcar_compile.errors import ArtifactError
from fastcar_compile.support.values import parse_json
from fuzz.expect import accepted, same


def run(data: bytes) -> bool:
    """Read the bytes; then, if they are a JSON object, what a writer would have made of it."""
    found = _read(data)
    try:
        value = parse_json(data)
    except ValueError:
        return found
    if isinstance(value, dict):
        found |= _read(sealed({name: each for name, each in value.items() if name != CHECKSUM}))
    return found


def _read(content: bytes) -> bool:
    found = accepted(ArtifactError, lambda: parse_manifest(content, "manifest.json"))
    if found is not None:
        same(parse_manifest(found.to_bytes(), "manifest.json"), found, "the manifest that is written again")
    return found is not None
