"""The player's own files: what a page consists of beside the files that are built.

    python3 play/fastcar_play/player.py BUILT FOLDER

puts a page together from its built files, in a new FOLDER that any file server serves. Python alone is enough.
"""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

ASSETS = {
    "play.html": "text/html",
    "base.css": "text/css",
    "play.css": "text/css",
    "connection.js": "text/javascript",
    "controls.js": "text/javascript",
    "picture.js": "text/javascript",
    "main.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
"""Files of the page, and their types."""

DECODER = ("fastcar.mjs", "wasm.mjs", "gpu.mjs")
"""Files that decode in a browser."""

ALONE = ("local.js", "worker.js", "game.mjs", "together.mjs", *DECODER)
"""Files of a page without a server, whose game runs in its worker."""

NAMES = {"play.html": "index.html", "local.js": "connection.js"}
"""Names that such a page has for files."""

FOREIGN = {"base.css": "report/page/static", **dict.fromkeys(DECODER, "runtime/web")}
"""Files that stand in folders of `fastcar_compile`."""


def path_of(name: str) -> Path:
    """Return the path of one of the player's files."""
    if name not in FOREIGN:
        return Path(__file__).parent / "static" / name
    compiler = find_spec("fastcar_compile")  # finds it without importing what it needs
    assert compiler is not None
    assert compiler.submodule_search_locations is not None
    return Path(compiler.submodule_search_locations[0], FOREIGN[name], name)


def copy_player(folder: Path) -> None:
    """Copy the player's files of a page without a server."""
    for name in {*ASSETS, *ALONE} - {"connection.js"}:
        text = path_of(name).read_text(encoding="utf-8").replace("/static/", "")
        (folder / NAMES.get(name, name)).write_text(text, encoding="utf-8")


def main() -> None:
    """Put a page together, with the compiler's files of this repository."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    built, folder = map(Path, sys.argv[1:])
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(built, folder)
    copy_player(folder)


if __name__ == "__main__":
    main()
