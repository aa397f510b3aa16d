"""One decoder with exact numerics whose decode step is on the accelerator: in eager PyTorch, TVM, C simulation and on
the stand-in for a board."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import decode
from board.fake_pyxrt import FakeXrt
from conftest import check_module
from decoders import headless_llama, llama
from tensor_maps import load_tensors

import fastcar_compile as fc
from exact.conftest import BATCH, FRAME, LENGTH, PROMPT, compiled, token_ids
from fastcar_compile.artifact.digest import cache_folder
from fastcar_compile.codegen.hls.step_program.program import read_program
from fastcar_compile.errors import BackendError, CompileError
from fastcar_compile.runtime.backends.accelerator.step import StepStepper, accelerator_of
from fastcar_compile.runtime.backends.base import Stepper
from fastcar_compile.runtime.backends.board import MEMINFO, buffer_bytes
from fastcar_compile.runtime.backends.hls_csim import open_library, sources_of
from fastcar_compile.runtime.session import Session

# A decoder with exact numerics: one artifact, equal bits on every backend that has them.


def test_backends_have_the_same_bits(artifact: fc.Artifact) -> None:
    eager, cpu = (artifact.session(backend, record=True) for backend in ("eager", "cpu"))
    assert torch.equal(*(decode(session, token_ids(), PROMPT) for session in (eager, cpu)))
    assert 0.1 < np.asarray(eager.stats.decisions).mean() < 0.9
    assert (cpu.stats.decisions == eager.stats.decisions).all()


def test_prefill_and_steps_have_the_same_bits(artifact: fc.Artifact) -> None:
    """The prompt in chunks, or all but its first token in steps that never replay."""
    ids = token_ids()[:, : PROMPT + 1]
    session = artifact.session("cpu")
    session.set_threshold(float("inf"))
    chunks, steps = (decode(session, ids, prompt) for prompt in (PROMPT, 1))
    assert torch.equal(chunks[:, -2:], steps[:, -2:])


def test_what_the_artifact_says(artifact: fc.Artifact) -> None:
    assert artifact.manifest.pipeline.passes.endswith(",exact-arithmetic")
    assert artifact.manifest.options.numerics == "exact"
    assert artifact.manifest.onnx is None
    assert "rotary_table_0" in artifact.program.params
    with pytest.raises(BackendError, match="exact numerics, and onnxruntime rounds quantised linears") as found:
        artifact.session("onnxruntime")
    assert found.value.hint == "use backend 'cpu' or 'eager', or compile with numerics='native'"


@pytest.mark.parametrize("options", [{"quant": "bf16"}, {"kv": "float16"}])
def test_floats_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(CompileError, match="numerics='exact' is defined for integers"):
        compiled(tmp_path / "a", **options)


def test_positions_inside_the_cache_are_refused(tmp_path: Path) -> None:
    sparse = fc.SparseAttention(window=5, sinks=3, positions="cache")
    with pytest.raises(CompileError, match='sparse attention with positions="cache" is not defined bit for bit'):
        compiled(tmp_path / "a", sparse_attention=sparse, replay=None, dry_run=True)


# offload="all": the whole decode step on the accelerator, in C simulation and on the stand-in for a board.


STEPS = 24
DRY_RUN: dict[str, Any] = {"target": "zcu102", "tokens_per_frame": FRAME, "max_seq_len": LENGTH, "dry_run": True}


@pytest.fixture
def simulated(artifact: fc.Artifact) -> Iterator[Session]:
    """A session on hls-csim."""
    check_module("hls4ml")
    with artifact.session("hls-csim", record=True) as session:
        yield session


def stepper_of(session: Session) -> StepStepper:
    """The session's own."""
    assert isinstance(session._run.stepper, StepStepper)
    return session._run.stepper


def states_of(stepper: Stepper) -> dict[str, np.ndarray]:
    """Every state, as the decoder's graph has it."""
    return {state.name: stepper.read(state.name, slice(None)) for state in stepper.states()}


def test_logits_scores_and_states_are_those_of_the_cpu(artifact: fc.Artifact, simulated: Session) -> None:
    """Step by step, after a prompt; then another threshold, and another video."""
    ids, thresholds = token_ids().numpy(), np.zeros(2, np.float32)
    other = artifact.session("cpu")._run.stepper
    own = stepper_of(simulated)
    for video in range(2):
        for stepper in (own, other):
            stepper.reset()
        for t in range(STEPS):
            given = ids[:, t : t + 1], t, t, thresholds + (2.0 if t > 3 * FRAME // 2 else 0.0) - video
            got, want = own.decode(*given), other.decode(*given)
            for name in ("logits", "decisions", "scores"):
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
        states = states_of(own)
        assert states
        for name, state in states_of(other).items():
            assert state.any()
            np.testing.assert_array_equal(states[name], state, err_msg=name)


def test_prefill_gives_the_logits_of_every_position(simulated: Session, artifact: fc.Artifact) -> None:
    ids = token_ids().numpy()[:, :4]
    own, eager = stepper_of(simulated), artifact.session("eager")._run.stepper
    np.testing.assert_array_equal(own.prefill(ids, 0), eager.prefill(ids, 0))
    states = states_of(own)
    replay = [name for name in states if not name.startswith(("key", "value"))]
    assert replay
    assert not any(states[name].any() for name in replay)


def test_a_reset_forgets_everything(simulated: Session) -> None:
    first = decode(simulated, token_ids()[:, :STEPS], PROMPT)
    simulated.step(torch.zeros(BATCH, dtype=torch.int64))
    assert torch.equal(decode(simulated, token_ids()[:, :STEPS], PROMPT), first)
    stepper_of(simulated).reset()
    assert not any(state.any() for state in states_of(stepper_of(simulated)).values())


@pytest.fixture
def fake(artifact: fc.Artifact, monkeypatch: pytest.MonkeyPatch) -> FakeXrt:
    """A stand-in for pyxrt that has the artifact's kernel."""
    check_module("hls4ml")
    (kernel,) = accelerator_of(artifact).kernels
    library = open_library(sources_of(artifact), cache_folder() / "csim")
    kinds = ["scalar" if a.kind == "scalar" else "memory" for a in kernel.arguments]
    fake = FakeXrt({kernel.name: (kinds, getattr(library, kernel.name))})
    monkeypatch.setitem(sys.modules, "pyxrt", fake.module)
    monkeypatch.setenv("FASTCAR_XCLBIN", str(artifact.path / "drs" / "table.bin"))  # any file
    monkeypatch.setenv(MEMINFO, "none")
    return fake


def test_the_board_launches_once_per_token(artifact: fc.Artifact, simulated: Session, fake: FakeXrt) -> None:
    (kernel,) = accelerator_of(artifact).kernels
    board, ids = artifact.session("board", record=True), token_ids()[:, : PROMPT + STEPS]
    loaded = len([call for call in fake.calls if call[0] == "start"])
    assert loaded == 1, "the control table"
    assert torch.equal(decode(board, ids, PROMPT), decode(simulated, ids, PROMPT))
    assert np.array_equal(board.stats.decisions, simulated.stats.decisions)
    assert len([call for call in fake.calls if call[0] == "start"]) == loaded + PROMPT + STEPS
    made = [call for call in fake.calls if call[0] == "bo"]
    assert len(made) == len([a for a in kernel.arguments if a.kind != "scalar"]), "buffers are made once"
    assert sum(-(-call[1] // 4096) * 4096 for call in made) == buffer_bytes(accelerator_of(artifact))


def test_a_session_on_the_board_goes_back_and_goes_on_elsewhere(
    artifact: fc.Artifact, simulated: Session, fake: FakeXrt, tmp_path: Path
) -> None:
    ids, back, never = token_ids().numpy(), 2 * FRAME, artifact.session("hls-csim", record=True)
    with artifact.session("board", record=True, keep=back) as board:
        for session in (board, never):
            session.prefill(ids[:, :FRAME])
            for t in range(FRAME, 4 * FRAME):
                session.step(ids[:, t])
        for t in range(FRAME, FRAME + back):
            board.step(ids[:, t])
        board.rewind(back)
        board.save(tmp_path / "session")
        simulated.load(tmp_path / "session")
        for t in range(4 * FRAME, 6 * FRAME):
            expected = never.step(ids[:, t])
            for session in (board, simulated):
                np.testing.assert_array_equal(session.step(ids[:, t]), expected)
        assert np.array_equal(board.stats.decisions, never.stats.decisions)
        assert np.array_equal(simulated.stats.decisions, never.stats.decisions)
        with pytest.raises(BackendError, match=r"takes one session\n.*fastcar_step\n.*save\(\) this one"):
            board.fork()


def test_the_artifact_tells_what_is_offloaded(artifact: fc.Artifact) -> None:
    options, section = artifact.manifest.options, accelerator_of(artifact)
    assert (options.offload, options.kv, options.numerics) == ("all", "int8", "exact")
    step, (kernel,) = section.step, section.kernels
    assert step is not None
    program = read_program((artifact.path / section.table).read_bytes())
    assert step.instructions == len(program.instructions)
    listed = json.loads((artifact.path / "drs" / "table.json").read_text())
    assert listed["program"] == json.loads(json.dumps(program.to_json()))
    tensors = load_tensors(artifact.path / section.weights)
    sizes = {a.name: a.bytes for a in kernel.arguments}
    assert {name: tensor.nbytes for name, tensor in tensors.items()} == {name: sizes[name] for name in tensors}
    assert set(tensors) == {*kernel.weights(), "constants"}
    text = artifact.explain()
    assert f"the whole decode step, one launch per token: {step.instructions} instructions of drs/table.bin" in text
    assert "offload  layer_1.o: model.layers.1.self_attn.o_proj; 128 -> 64, one instruction, all rows" in text
    names = {part.name for part in (artifact.path / "hls").iterdir()}
    assert f"{kernel.name}.cpp" in names
    host = {part.name for part in (artifact.path / "host" / "src").iterdir()}
    assert {"fastcar_board.cpp", "fastcar_accelerator.hpp", "fastcar_step_decoder.hpp"} <= host
    assert "fastcar_offload.hpp" not in host


def test_what_cannot_be_is_refused_all_at_once() -> None:
    """Options; then what the graph of a decoder has."""
    sizes: dict[str, Any] = {"target": "zcu102", "tokens_per_frame": FRAME, "max_seq_len": LENGTH}
    with pytest.raises(CompileError) as found:
        fc.CompileConfig(**sizes, offload="all", quant="bf16", kv="float16", numerics="native")
    assert [p.what for p in found.value.problems] == [
        "offload='all' needs kv='int8', not 'float16'",
        "offload='all' needs numerics='exact', not 'native'",
        "offload='all' needs integer weights, not quant='bf16'",
    ]
    with pytest.raises(CompileError, match="offload='all' needs an accelerator, and target cpu has none"):
        fc.compile(llama(), "cpu", tokens_per_frame=FRAME, offload="all", dry_run=True)
    assert fc.CompileConfig(**sizes, offload="all", quant="w8a8").kv == "int8"
    ring = fc.SparseAttention(sinks=2, window=8)
    (found,) = fc.compile(llama(head_dim=32), **DRY_RUN, rows=2, sparse_attention=ring).problems
    assert "several rows of a video with sparse attention" in found.what


def test_a_decoder_without_a_head_gives_hidden_states() -> None:
    report = fc.compile(headless_llama(head_dim=32), **DRY_RUN)
    assert report.ok
    assert report.options.offload == "all"


def test_the_accelerator_runs_whole_steps_where_it_can() -> None:
    """Where nobody says what it computes; test_resolve.py has the options that exclude them."""
    whole = fc.compile(llama(head_dim=32), **DRY_RUN)
    assert (whole.options.offload, whole.options.kv, whole.options.numerics) == ("all", "int8", "exact")
    assert whole.ok
    assert "exact-arithmetic" in whole.pipeline
    assert {p.what.partition(":")[0]: (p.unit, p.calls) for p in whole.placements} == {
        "decode step": ("accelerator", 1),
        "prefill": ("accelerator", 0),
        "embedding": ("host", 0),
    }
    reason = r"heads of 16 elements \(a multiple of 32\)"
    with pytest.warns(UserWarning, match=f"offload is 'mlp', because the accelerator cannot run.*{reason}"):
        narrow = fc.compile(llama(), **DRY_RUN)
    assert (narrow.options.offload, narrow.options.kv, narrow.options.numerics) == ("mlp", "float32", "native")
    assert "exact-arithmetic" not in narrow.pipeline
    (fallback,) = [f for f in narrow.fallbacks if f.kind == "offload"]
    assert "heads of 16 elements" in fallback.reason
