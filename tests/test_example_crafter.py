"""The Crafter example: its tokens show what the game shows, and the shipped page is built from what is here."""

import json
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import check_module, check_tool, imported

import fastcar_compile as fc
from fastcar_compile.artifact.layout import MANIFEST
from fastcar_compile.artifact.reader import parse_manifest
from fastcar_play.pixels import Pixels
from fastcar_play.player import ALONE, ASSETS, NAMES
from fastcar_play.world import load_world

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDER = EXAMPLES / "crafter"
PAGE = FOLDER / "page"


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as its own scripts import them."""
    check_module("crafter")
    with imported([FOLDER, EXAMPLES], ("tiles", "recording", "export")) as modules:
        yield modules


def test_tokens_show_what_the_game_shows(example: SimpleNamespace) -> None:
    """Pixel for pixel, through the shipped pixels.onnx."""
    game = example.recording.Game(5)
    agent, draw = example.recording.Agent(game, np.random.default_rng(0)), Pixels(load_world(FOLDER / "world"), 1)
    environment: Any = game._env
    environment._size = np.array((144, 144))
    for _ in range(40):
        game.step(agent.choose())
        np.testing.assert_array_equal(draw(game.codes().astype(np.int64)), type(environment).render(environment))


def test_world_toml_is_what_the_example_writes(example: SimpleNamespace) -> None:
    text = example.export.world_toml().text()
    assert (FOLDER / "world" / "world.toml").read_text() == text
    world = tomllib.loads(text)
    assert {button for action in world["actions"] for button in action["buttons"]} == set(world["buttons"])
    keys = [key for pressed in world["buttons"].values() for key in pressed]
    assert len(keys) == len(set(keys))


def test_the_page_is_put_together_of_its_parts(crafter_page: Path) -> None:
    """The built files and the player's, as the command writes a page; only built ones are in the repository."""
    built = {path.relative_to(PAGE): path.read_bytes() for path in PAGE.rglob("*") if path.is_file()}
    assert {path.parts[0] for path in built} == {"artifact", "page.json", "pixels.wasm"}
    for path, content in built.items():
        assert (crafter_page / path).read_bytes() == content
    own = {path.name for path in crafter_page.iterdir()} - {path.parts[0] for path in built}
    assert own == {NAMES.get(name, name) for name in {*ASSETS, *ALONE} - {"connection.js"}}
    assert "/static/" not in (crafter_page / "index.html").read_text("utf-8")
    static = files("fastcar_play") / "static"
    assert (crafter_page / "connection.js").read_text("utf-8") == (static / "local.js").read_text("utf-8")
    runtime = files("fastcar_compile.runtime.web") / "fastcar.mjs"
    assert (crafter_page / "fastcar.mjs").read_text("utf-8") == runtime.read_text("utf-8")


def test_the_page_tells_what_a_replay_spares() -> None:
    layers = parse_manifest((PAGE / "artifact" / MANIFEST).read_bytes(), MANIFEST).layers.layers
    hello = json.loads((PAGE / "page.json").read_text("utf-8"))["hello"]
    assert hello["spared"] == [1 - layer.draft_share for layer in layers]
    assert max(hello["spared"]) < 1


def test_the_shipped_page_plays_the_recorded_game(crafter_page: Path) -> None:
    """Tokens, scores and logits of every frame, in Node."""
    world, game = load_world(FOLDER / "world"), json.loads((FOLDER / "game.json").read_text())
    request = json.dumps({"world": world.to_json(), "games": [game]})
    verify = Path(__file__).parent / "web" / "verify.mjs"
    command = [check_tool("node"), str(verify), str(crafter_page), str(crafter_page / "artifact")]
    done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None]


@pytest.mark.thorough
def test_the_page_is_built_from_the_world(tmp_path: Path) -> None:
    """The shipped weights and library are those that this compiler makes of the shipped decoder."""
    shipped = json.loads((PAGE / "artifact" / MANIFEST).read_text())
    options = {name: shipped["options"][name] for name in ("target", "quant", "kv", "numerics", "max_seq_len")}
    draft = fc.Draft.load(FOLDER / "draft.safetensors")
    replay = fc.ReplayConfig(draft=draft, threshold=shipped["options"]["replay"]["threshold"])
    jacobi = fc.Jacobi(shipped["options"]["jacobi"]["window"])
    made = fc.compile(
        FOLDER / "world" / "decoder", replay=replay, jacobi=jacobi, output=tmp_path / "artifact", **options
    )
    used = [
        path.relative_to(PAGE / "artifact").as_posix()
        for path in (PAGE / "artifact").rglob("*.*")
        if path.name != MANIFEST
    ]
    assert len(used) == 2
    for name in used:
        assert made.manifest.files[name].sha256 == shipped["files"][name]["sha256"], name
