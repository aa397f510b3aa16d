"""One recorded game of Crafter on every backend: the same tokens, scores and logits of all frames, by their hash.

`FASTCAR_GAME_FRAMES=1000 pytest tests/board/test_recorded_game.py` has all frames, the thorough run four. In every run
test_example_crafter.py plays the example's own recorded game in Node.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import check_module, check_tool

import fastcar_compile as fc
from fastcar_compile.artifact.layout import MANIFEST
from fastcar_compile.codegen.tvm.isa import instruction_set
from fastcar_compile.runtime.backends.base import OpenStepper
from fastcar_compile.support.machine import cpu_flags
from fastcar_play.game import Beginning
from fastcar_play.lockstep import RecordedGame, recorded, verify
from fastcar_play.world import World, load_world

pytestmark = [] if "FASTCAR_GAME_FRAMES" in os.environ else [pytest.mark.thorough]
EXAMPLE = Path(__file__).parents[2] / "examples" / "crafter"
PAGE = EXAMPLE / "page"
FRAMES = int(os.environ.get("FASTCAR_GAME_FRAMES", "4"))
SIMULATED = 4
"""Frames at most in C simulation."""


@pytest.fixture(scope="module")
def world() -> World:
    """With starts of three frames: the window is six, so that the fourth new frame overwrites what is in the ring."""
    whole = load_world(EXAMPLE / "world")
    return replace(whole, starts=whole.starts[:, -3:])


def compiled(output: Path, *host_cpus: str, **target: Any) -> fc.Artifact:
    """The page's decoder with libraries for these CPUs, and for a target."""
    options = json.loads((PAGE / "artifact" / MANIFEST).read_text())["options"]
    draft = fc.Draft.load(EXAMPLE / "draft.safetensors")
    replay = fc.ReplayConfig(draft=draft, threshold=options["replay"]["threshold"])
    formats = {name: options[name] for name in ("quant", "kv", "numerics", "max_seq_len")}
    return fc.compile(
        EXAMPLE / "world" / "decoder", host_cpus=host_cpus, replay=replay, output=output, **formats, **target
    )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """For this machine: with AVX2, where it has that."""
    x86 = instruction_set("avx2").flags <= cpu_flags()
    return compiled(tmp_path_factory.mktemp("crafter") / "artifact", "avx2" if x86 else "native")


@pytest.fixture(scope="module")
def games(artifact: fc.Artifact, world: World) -> dict[int, RecordedGame]:
    """By their frames, as this machine plays them: walks and uses, with the draws of seed 3."""
    kinds = [action.token for action in world.file.actions]
    actions = np.repeat(np.random.default_rng(0).choice(kinds[:6], FRAMES), 4)[:FRAMES].tolist()
    counts = {min(FRAMES, most) for most in (FRAMES, SIMULATED)}
    return {count: recorded(artifact, world, Beginning(seed=3), actions[:count]) for count in counts}


def same(artifact: fc.Artifact, world: World, game: RecordedGame, backend: str | OpenStepper = "cpu") -> None:
    """A frame with other bits is an error. The first frame has nothing to replay, others have."""
    share = verify(artifact, world, game, backend)
    assert 0.3 < share < 1


def test_the_best_instruction_set(foreign: fc.Artifact, world: World, games: dict[int, RecordedGame]) -> None:
    same(foreign, world, games[FRAMES])


def test_the_page_in_node(world: World, games: dict[int, RecordedGame], crafter_page: Path) -> None:
    """The shipped WebAssembly."""
    request = json.dumps({"world": world.to_json(), "games": [games[FRAMES].model_dump(mode="json")]})
    script = Path(__file__).parents[1] / "web" / "verify.mjs"
    command = [check_tool("node"), str(script), str(crafter_page), str(crafter_page / "artifact")]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[null]"), done.stderr


def test_c_simulation(foreign: fc.Artifact, world: World, games: dict[int, RecordedGame]) -> None:
    """Every decode step and the prompt run on the accelerator's kernel."""
    check_module("hls4ml")
    same(foreign, world, games[min(FRAMES, SIMULATED)], "hls-csim")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """With this machine's best library, and an accelerator that runs whole steps."""
    return compiled(tmp_path_factory.mktemp("foreign") / "artifact", "native", target="zcu102", offload="all")
