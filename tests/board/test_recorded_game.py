"""One recorded game of Crafter on every backend: the same tokens, scores and logits of all frames, by their hash.

A run has 4 frames of each. All of them: `FASTCAR_GAME_FRAMES=1000 pytest tests/board/test_recorded_game.py`.
"""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import board_libraries, check_module, check_tool
from numpy.typing import NDArray

import fastcar_compile as fc
from board.conftest import Machine
from fastcar_compile.artifact.layout import MANIFEST
from fastcar_compile.codegen.tvm.isa import instruction_set
from fastcar_compile.runtime.backends.base import Array, Numbers, OpenStepper, Stepper, StepResult
from fastcar_compile.support.machine import cpu_flags
from fastcar_play.game import Beginning
from fastcar_play.lockstep import RecordedGame, recorded, verify
from fastcar_play.world import World, load_world

EXAMPLE = Path(__file__).parents[2] / "examples" / "crafter"
PAGE = EXAMPLE / "page"
FRAMES = int(os.environ.get("FASTCAR_GAME_FRAMES", "4"))
EMULATED, SIMULATED = 50, 4
"""Frames at most under qemu, and in C simulation."""

CPUS = {"neon": "cortex-a53"}
"""Instruction sets, and the CPUs that qemu emulates for them. Tests of kernels have the others, and SSE 4.2, and
test_host_program.py decodes on NEON in every run."""


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
    """For this machine: with AVX2, where it has that, so that a whole decoder runs on it in every run."""
    x86 = instruction_set("avx2").flags <= cpu_flags()
    return compiled(tmp_path_factory.mktemp("crafter") / "artifact", "avx2" if x86 else "native")


@pytest.fixture(scope="module")
def games(artifact: fc.Artifact, world: World) -> dict[int, RecordedGame]:
    """By their frames, as this machine plays them: walks and uses, with the draws of seed 3."""
    kinds = [action.token for action in world.file.actions]
    actions = np.repeat(np.random.default_rng(0).choice(kinds[:6], FRAMES), 4)[:FRAMES].tolist()
    counts = {min(FRAMES, most) for most in (FRAMES, EMULATED, SIMULATED)}
    return {count: recorded(artifact, world, Beginning(seed=3), actions[:count]) for count in counts}


def same(artifact: fc.Artifact, world: World, game: RecordedGame, backend: str | OpenStepper = "cpu") -> None:
    """A frame with other bits is an error. The first frame has nothing to replay, others have."""
    share = verify(artifact, world, game, backend)
    assert 0.3 < share < 1


@pytest.mark.thorough
def test_the_best_instruction_set(foreign: fc.Artifact, world: World, games: dict[int, RecordedGame]) -> None:
    same(foreign, world, games[FRAMES])


def test_the_page_in_node(world: World, games: dict[int, RecordedGame], crafter_page: Path) -> None:
    """The shipped WebAssembly."""
    request = json.dumps({"world": world.to_json(), "games": [games[FRAMES].model_dump(mode="json")]})
    script = Path(__file__).parents[1] / "web" / "verify.mjs"
    command = [check_tool("node"), str(script), str(crafter_page), str(crafter_page / "artifact")]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[null]"), done.stderr


@pytest.mark.thorough  # every run simulates small decoders
def test_c_simulation(foreign: fc.Artifact, world: World, games: dict[int, RecordedGame]) -> None:
    """Every decode step and the prompt run on the accelerator's kernel."""
    check_module("hls4ml")
    same(foreign, world, games[min(FRAMES, SIMULATED)], "hls-csim")


class Emulated(Stepper):
    """run_steps.cpp in a process of its own."""

    def __init__(self, artifact: fc.Artifact, command: list[str]) -> None:
        self._config, self.prefill_chunk = artifact.config, artifact.config.prefill_chunk
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.reset()

    def _ask(self, count: int, position: Numbers, step: Numbers, *parts: Array) -> None:
        assert self._process.stdin is not None
        head = np.array([count, int(position), int(step)], np.int64)
        self._process.stdin.write(b"".join(part.tobytes() for part in (head, *parts)))
        self._process.stdin.flush()

    def _answer(self, dtype: type[np.generic], *shape: int) -> NDArray[np.generic]:
        assert self._process.stdout is not None
        data = self._process.stdout.read(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.frombuffer(data, dtype).reshape(shape)

    def reset(self) -> None:
        self._ask(0, 0, 0)

    def prefill(self, inputs: Array, position: int) -> Array:
        self._ask(inputs.shape[1], position, 0, inputs)
        return self._answer(np.float32, *inputs.shape, self._config.vocab_size or 0)

    def decode(self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array) -> StepResult:
        self._ask(1, position, step, inputs, thresholds.astype(np.float32))
        layers, vocabulary = self._config.num_layers, self._config.vocab_size or 0
        kinds = (np.float32, (1, 1, vocabulary)), (np.bool_, (layers, 1)), (np.float32, (layers, 1))
        return StepResult(*(self._answer(kind, *shape) for kind, shape in kinds))

    def end(self) -> None:
        with self._process:
            self._process.terminate()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """With this machine's best library, those for other machines, and an accelerator that runs whole steps."""
    check_tool("aarch64-linux-gnu-g++")
    with board_libraries():
        folder = tmp_path_factory.mktemp("foreign")
        return compiled(folder / "artifact", "native", *CPUS, target="zcu102", offload="all")


@pytest.fixture(scope="module")
def steps(foreign: fc.Artifact, aarch64: Machine, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs an artifact's decoder on AArch64, in C++ and under qemu-user."""
    folder, artifact = tmp_path_factory.mktemp("steps"), foreign
    sources = folder / "artifact" / "host" / "src"
    shutil.copytree(artifact.path / "host" / "src", sources)
    shutil.copy(Path(__file__).with_name("run_steps.cpp"), sources)
    done = aarch64.build(folder / "artifact", folder, str(folder / "run_steps"))
    assert done.returncode == 0, done.stderr
    return [*aarch64.emulator, str(folder / "run_steps"), str(artifact.path)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CPUS)
def test_another_machine(
    name: str,
    foreign: fc.Artifact,
    world: World,
    games: dict[int, RecordedGame],
    steps: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QEMU_CPU", CPUS[name])
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    (library,) = (foreign.path / "host" / "aarch64-linux-gnu" / name).glob("*.so")
    stepper = Emulated(foreign, [*steps, library.relative_to(foreign.path).as_posix()])
    try:
        same(foreign, world, games[min(FRAMES, EMULATED)], lambda artifact, options: stepper)
    finally:
        stepper.end()
