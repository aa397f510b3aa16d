"""A game that was recorded here is verified here and in Node, frame by frame."""

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from conftest import check_tool
from play.worlds import write_world
from typer.testing import CliRunner

import fastcar_compile as fc
from fastcar_compile.artifact.layout import WEB_MODULES
from fastcar_compile.artifact.manifest import SCHEMA_VERSION
from fastcar_compile.cli.commands import app
from fastcar_compile.errors import InputError
from fastcar_play.game import Beginning
from fastcar_play.lockstep import RecordedGame, load_game, recorded, verify
from fastcar_play.world import World, load_world

ACTIONS = [14] * 7 + [0] + [13] * 12 + [15, 0, 15] + [14] * 17
"""Frames of 5 tokens, more than the decoder has positions: it reads the last ones again."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return load_world(write_world(tmp_path / "world"))


@pytest.fixture
def game(artifact: fc.Artifact, world: World) -> RecordedGame:
    return recorded(artifact, world, Beginning(start=1, seed=11, temperature=0.8, top_k=6), ACTIONS)


def changed(game: RecordedGame) -> dict[int, RecordedGame]:
    """Games that are not what they say, by the first frame that shows it."""
    checks = game.checks[:20] + ("A" if game.checks[20] != "A" else "B") + game.checks[21:]
    return {
        21: game.model_copy(update={"checks": checks}),
        len(ACTIONS): game.model_copy(update={"digest": "0" * 64}),
        1: game.model_copy(update={"start": 0}),
    }


def test_a_recorded_game_is_verified_in_node(
    artifact: fc.Artifact, world: World, game: RecordedGame, tmp_path: Path
) -> None:
    games = [game, *changed(game).values()]
    for source in (*map(artifact.path.joinpath, WEB_MODULES), files("fastcar_play") / "static" / "game.mjs"):
        shutil.copy(str(source), tmp_path)
    request = json.dumps({"world": world.to_json(), "games": [each.model_dump(mode="json") for each in games]})
    command = [check_tool("node"), str(Path(__file__).with_name("verify.mjs")), str(tmp_path), str(artifact.path)]
    done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None, *changed(game)]


def test_what_the_page_refuses(artifact: fc.Artifact, world: World, game: RecordedGame, tmp_path: Path) -> None:
    """Named errors before anything changes: of manifests, tokens, thresholds, draws and recorded games."""
    module = (artifact.path / WEB_MODULES[0]).read_text()
    assert f"const SCHEMA_VERSION = {SCHEMA_VERSION};" in module
    for source in (*map(artifact.path.joinpath, WEB_MODULES), files("fastcar_play") / "static" / "game.mjs"):
        shutil.copy(str(source), tmp_path)
    texts = ["14*3", "14 13*2", "1*1e9", "1*999999 1*999999", "14", "1.5", "-1*3", "1**3", "x", "1*0x3", "\u0661*3"]
    request = {"world": world.to_json(), "game": game.model_dump(mode="json"), "games": texts}
    script, command = Path(__file__).with_name("refusals.mjs"), [check_tool("node"), "--max-old-space-size=256"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path), str(artifact.path)],
        input=json.dumps(request), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    version = f"this module reads version {SCHEMA_VERSION}: compile the model again"
    for name, text in found["manifests"].items():
        assert text.startswith("ArtifactError: "), name
        assert version in text or not name.startswith(("version", "null")), text
        assert version in text or "is damaged" in text or "cannot be read" in text, text
    assert "has schema version 99" in found["manifests"]["version 99"]
    assert (found["unchanged"], found["apart"]) == (True, True)
    for name, text in {**found["tokens"], **found["wrong"]}.items():
        assert text.startswith("RangeError: "), (name, text)
    assert "token 0 is -1: give integers from 0 to" in found["tokens"]["step -1"]
    assert "the threshold of layer 1 is NaN" in found["tokens"]["threshold 0.5,NaN"]
    assert [name for name, text in found["runs"].items() if text == "taken"] == texts[:2]
    assert "1*1e9 is no run of an action" in found["runs"]["1*1e9"]
    assert "there are 1999998 actions and 3 checks" in found["runs"]["1*999999 1*999999"]
    assert "the world has no action 999" in found["wrong"]['{"actions":"999","checks":"A"}']


def test_the_command_verifies_a_recorded_game(artifact: fc.Artifact, world: World, game: RecordedGame) -> None:
    """A kilobyte; a game with other bits is an error that names the first frame."""
    path = world.folder / "game.json"
    words = ["play", str(artifact.path), "--world", str(world.folder), "--recorded", str(path)]
    path.write_text(game.model_dump_json())
    assert path.stat().st_size < 1024
    assert load_game(path) == game
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["frames"] == len(ACTIONS)
    assert 0.1 < json.loads(done.stdout)["replayed"] < 0.9
    assert "unknown backend 'abacus'" in CliRunner().invoke(app, [*words, "--backend", "abacus"]).output
    for frame, wrong in changed(game).items():
        place = f"frame {frame} of" if frame < len(ACTIONS) else "a late frame"
        with pytest.raises(InputError, match=f"{place}.* has other bits than the recorded game"):
            verify(artifact, world, wrong)


def test_what_is_no_game_of_this_decoder(
    artifact: fc.Artifact, world: World, game: RecordedGame, tmp_path: Path
) -> None:
    path, fields = tmp_path / "game.json", game.model_dump(mode="json")
    for field, value, text in (
        ("actions", "14*7 0x", "is no run of an action"),
        ("actions", "14*7", "there are 7 actions and 40 checks"),
        ("digest", "abc", "digest: String should match"),
    ):
        path.write_text(json.dumps(fields | {field: value}))
        with pytest.raises(InputError, match=text):
            load_game(path)
    with pytest.raises(InputError, match="recorded with another decoder"):
        verify(artifact, world, game.model_copy(update={"weights": "0" * 64}))
    with pytest.raises(InputError, match="the world has no action 3"):
        recorded(artifact, world, Beginning(), [3])
