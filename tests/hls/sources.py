"""Headers, and the files of a project that a test wrote to a folder, as the C simulation takes them."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from fastcar_compile.codegen.hls.project import generated_headers
from fastcar_compile.runtime.backends.hls_csim import SOURCES


def folder_sources(folder: Path, names: Sequence[str] = SOURCES) -> dict[str, bytes]:
    """Return the headers of a project's folder, and the sources of this list that the folder has, by name."""
    paths = [*folder.glob("*.hpp"), *(folder / name for name in names)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def headers() -> dict[str, bytes]:
    """Return the headers that do not depend on a design, by name."""
    found = {path.name: path.read_bytes() for path in files("hls_templates").iterdir() if path.name.endswith(".hpp")}
    return found | {name: text.encode() for name, text in generated_headers().items()}
