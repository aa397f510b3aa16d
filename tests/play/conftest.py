"""The tiny world with a compiled decoder, once per test run."""

from pathlib import Path

import pytest
from conftest import shared_folder
from decoders import llama
from filelock import FileLock

import fastcar_compile as fc
from fastcar_play.game import Stage, rehearsed
from fastcar_play.pixels import Pixels
from fastcar_play.track import Opener
from fastcar_play.world import load_world

from .worlds import FRAME, write_world


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of the artifact and of the world."""
    folder = shared_folder(tmp_path_factory) / "play"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            write_world(folder / "world")
            replay = fc.ReplayConfig(gate="input_delta", threshold=0.5)
            options = {"tokens_per_frame": FRAME, "max_seq_len": 60, "prefill_chunk": 1, "output": folder / "artifact"}
            fc.compile(llama(), target="cpu", replay=replay, **options)
    return folder / "artifact", folder / "world"


@pytest.fixture(scope="session")
def stage(built: tuple[Path, Path]) -> Stage:
    """What its visitors share."""
    artifact, world = fc.load(built[0]), load_world(built[1])
    world.check_decoder(artifact.config)
    opener = Opener(artifact.session, threads=1)
    return rehearsed(Stage("tiny", "input_delta", (1.0, 1.0), world, Pixels(world, 1), opener))
