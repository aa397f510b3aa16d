"""`fastcar play`: a world model in the browser."""

from __future__ import annotations

import ipaddress
import os
import sys
import warnings
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

import fastcar_compile as fc
from fastcar_compile.cli.common import JsonOption, command, stages
from fastcar_compile.cli.inspect import DigestOption, KeyOption, RereadOption
from fastcar_compile.cli.options import BACKENDS, ArtifactArgument
from fastcar_compile.cli.output import interactive, print_fields, print_result, print_text
from fastcar_compile.config.listing import Without
from fastcar_compile.errors import count_text
from fastcar_compile.support.machine import usable_cores
from fastcar_play import limits

if TYPE_CHECKING:
    from fastcar_play.game import Stage

LOCAL = "127.0.0.1"

OPEN = "whoever reaches this machine there can play, and use its cores; there is no password, and nothing is encrypted"

SERVED = Without("static"), Without("recorded")
"""Of the options of the server."""


@command
def play_command(
    artifact: ArtifactArgument,
    world: Annotated[Path, Option(help="Folder of the world that the decoder was trained on.")],
    host: Annotated[
        str, Option(help="Address to listen at. Others than this machine reach 0.0.0.0, without a password."), *SERVED
    ] = LOCAL,
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen at; 0 takes a free one."), *SERVED] = 0,
    visitors: Annotated[
        int | None, Option(min=1, max=limits.VISITORS, help="Players at once; default: one per core."), *SERVED
    ] = None,
    backend: Annotated[
        str, Option(help="cpu or onnxruntime; a recorded game also hls-csim or board.", autocompletion=BACKENDS)
    ] = "cpu",
    threads: Annotated[int | None, Option(min=1, help="CPU threads of each player."), SERVED[1]] = None,
    static: Annotated[
        Path | None,
        Option(help="Write the page into this folder, for any file server: the browser plays by itself."),
        SERVED[1],
    ] = None,
    recorded: Annotated[
        Path | None, Option(help="Verify a recorded game bit for bit, instead of playing: numerics have to be exact.")
    ] = None,
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open the page."), *SERVED] = True,
    digest: DigestOption = None,
    public_key: KeyOption = None,
    reread: RereadOption = True,
    as_json: JsonOption = False,
) -> None:
    """Play a compiled world model in the browser.

    A local web server generates frames from the keys that you press, until Ctrl-C.
    """
    from fastcar_play.serve import serving

    places = min(usable_cores(), limits.VISITORS) if visitors is None else visitors
    with stages(as_json, "play") as show:
        show("checking the files")
        loaded = fc.load(artifact, digest=digest, require_signature=public_key, reread=reread)
        if recorded is not None:
            show("playing the recorded game again")
            _verify(loaded, world, recorded, backend, as_json)
            return
        show("generating the first frames")
        stage = _stage(loaded, world, backend, threads)
        if static is not None:
            show("compiling the pictures for the browser")
            _write(loaded, stage, static, as_json)
            return
        if not _is_local(host):
            warnings.warn(f"{host} is open to others: {OPEN}", stacklevel=1)
    with serving(stage, host=host, port=port, visitors=places) as listening:
        _announce(stage, listening.url, places, as_json)
        if browser and not as_json and not _opened(listening.url):
            print_text("No browser can be opened here. Open the address yourself.")
        sys.stdout.flush()
        listening.wait()


def _write(loaded: fc.Artifact, stage: Stage, folder: Path, as_json: bool) -> None:
    from fastcar_play.page import write_page

    found = write_page(loaded, stage, folder)
    total = sum(found.values())
    fields = {
        "page": str(folder / "index.html"),
        "files": f"{len(found)}, {total / 1e6:.1f} MB",
        "serve": "any file server",
    }
    print_result(as_json, {"folder": str(folder), "files": found, "bytes": total}, lambda: print_fields(fields))


def _verify(loaded: fc.Artifact, world: Path, recorded: Path, backend: str, as_json: bool) -> None:
    from fastcar_play.lockstep import load_game, verify
    from fastcar_play.world import load_world

    game, found = load_game(recorded), load_world(world)
    found.check_decoder(loaded.config)
    share = verify(loaded, found, game, backend)
    fields = {"verified": f"{count_text(len(game.checks), 'frame')}, bit for bit", "MLPs replayed": f"{share:.1%}"}
    facts = {"frames": len(game.checks), "replayed": share, "digest": game.digest}
    print_result(as_json, facts, lambda: print_fields(fields | {"digest": game.digest}))


def _stage(loaded: fc.Artifact, world: Path, backend: str, threads: int | None) -> Stage:
    """Return what the visitors share, tried out.

    Raises:
        UserError: the world or the artifact cannot be read, or they do not fit each other.
    """
    from fastcar_play.game import Stage, rehearsed
    from fastcar_play.pixels import Pixels
    from fastcar_play.track import Opener
    from fastcar_play.world import load_world

    found = load_world(world)
    found.check_decoder(loaded.config)
    gates = [gate for gate in loaded.manifest.layers.gates if gate is not None]
    name = f"{loaded.path.resolve().name}, {loaded.manifest.options.quant}"
    gate = gates[0] if gates else None
    opener = Opener(loaded.session, backend, threads)
    spared = tuple(1 - layer.draft_share for layer in loaded.manifest.layers.layers)
    return rehearsed(Stage(name, gate, spared, found, Pixels(found, threads), opener))


def _announce(stage: Stage, url: str, places: int, as_json: bool) -> None:
    fields = {"playing": stage.world.file.name, "at": url, "players": f"{count_text(places, 'place')}, Ctrl-C ends"}
    print_result(as_json, {"url": url, "visitors": places}, lambda: print_fields(fields))


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _opened(url: str) -> bool:
    """Open the page, and return whether a browser did. Without a screen, some would take over the terminal."""
    screen = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return interactive() and screen and webbrowser.open(url)
