"""Target webgpu on a software adapter: shaders against the eager reference, and an artifact beside the backend cpu."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import check_module, first_often, missing
from decoders import PlainDecoder, llama, rewritten
from gates.drafts import random_draft
from gates.networks import networks
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.artifact.layout import GPU_PROGRAM
from fastcar_compile.artifact.programs import decoder_section
from fastcar_compile.codegen.segment import HostGraph
from fastcar_compile.errors import BackendError, CompileError
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.runtime.backends.eager import EagerStepper
from fastcar_compile.runtime.backends.webgpu import GpuDevice, WebGpuStepper
from fastcar_compile.runtime.forwards import Forwards, WindowChoice

from .conftest import compiled

FRAME, LENGTH = 4, 65
TOLERANCE = 1e-5
"""Of logits of about 0.4; see docs/reference/numerics.md."""


@pytest.fixture(scope="module")
def device() -> GpuDevice:
    check_module("wgpu")
    try:
        return GpuDevice()
    except BackendError as error:
        missing(f"no GPU adapter: {error}")
        raise


def _array(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def _program(program: DecoderProgram) -> dict[str, Any]:
    from fastcar_compile.codegen.tvm.gpu.program import program_of

    return program_of(HostGraph(program.copied().graph_module, program.outputs))


def _steppers(
    device: GpuDevice, model: torch.nn.Module, **options: Any
) -> tuple[EagerStepper, WebGpuStepper, Mapping[str, Any]]:
    defaults: dict[str, Any] = {"max_seq_len": LENGTH, "tokens_per_frame": FRAME, "batch_size": 1}
    program = rewritten(model, 1, **{**defaults, "replay": fc.ReplayConfig(), **options})
    made = _program(program)
    params = {name: _array(tensor) for name, tensor in program.params.items()}
    return EagerStepper(program), WebGpuStepper(device, made, decoder_section(program), params), made


def _format(quant: str, kv: str, gate: str) -> dict[str, Any]:
    return {"quant": quant, "kv": kv, "replay": fc.ReplayConfig(gate=gate, max_chain=2)}


CASES: dict[str, tuple[dict[str, Any], float]] = {
    "bf16": (_format("bf16", "bfloat16", "tas"), 0.0),
    "w4a8": (_format("w4a8", "int8", "input_delta"), 1.0),
    "learned": ({"replay": fc.ReplayConfig(gate="learned", gate_weights=networks(64, 3, 7))}, 0.05),
    "draft": ({"replay": fc.ReplayConfig(draft=random_draft(64)), "quant": "w8a8"}, 0.0),
    "fp16": (_format("fp16", "float16", "input_delta"), 1.0),
    "w8a8": (_format("w8a8", "int8", "tas"), 0.0),
    "none": (_format("none", "float32", "tas"), 0.0),
    "always": ({"replay": fc.ReplayConfig(gate="always", threshold=0.0)}, 0.0),
    "heads": ({"replay": fc.ReplayConfig(threshold=0.0, heads=[[(0, 0.25), (1, 0.75)], [(1, 1.0)]])}, 0.0),
}


@pytest.mark.parametrize("name", first_often(CASES, 4))
def test_decode_steps_are_those_of_the_reference(device: GpuDevice, name: str) -> None:
    """Logits within the tolerance, and every decision; integers of states are equal."""
    options, threshold = CASES[name]
    eager, gpu, _ = _steppers(device, llama(head_dim=32), **options)
    token, thresholds, replayed = np.array([[2]]), np.full(2, threshold, np.float32), 0
    for i in range(3 * FRAME):
        want, found = (s.decode(token, i, i, thresholds) for s in (eager, gpu))
        np.testing.assert_allclose(found.logits, want.logits, atol=TOLERANCE)
        np.testing.assert_array_equal(found.decisions, want.decisions)
        np.testing.assert_allclose(found.scores, want.scores, atol=TOLERANCE)
        token, replayed = want.logits.argmax(-1), replayed + int(want.decisions.sum())
    most = 2 * 2 * FRAME
    assert replayed == most if name == "always" else 0 < replayed < most
    for state in gpu.states():
        want, found = (s.read(state.name, np.s_[:]).astype(np.float32) for s in (eager, gpu))
        np.testing.assert_allclose(found, want, atol=0 if state.dtype in ("int8", "int32") else 2e-4)


def test_layer_norms_and_several_videos(device: GpuDevice) -> None:
    eager, gpu, _ = _steppers(device, PlainDecoder(batch=2), batch_size=2, quant="w8a8", max_seq_len=33)
    thresholds = np.zeros(2, np.float32)
    for i in range(16):
        token = np.array([[i % 7], [3 * i % 11]])
        want, found = (s.decode(token, i, i, thresholds) for s in (eager, gpu))
        np.testing.assert_allclose(found.logits, want.logits, atol=1e-4)
        np.testing.assert_array_equal(found.decisions, want.decisions)


def test_an_artifact_plays_on_the_gpu(device: GpuDevice, artifact: fc.Artifact, tmp_path: Path) -> None:
    """Tokens and decisions are those of the backend cpu, and a saved state goes from one to the other."""
    assert GPU_PROGRAM in artifact.manifest.files
    cpu, gpu = artifact.session(), artifact.session("webgpu", keep=1)
    prompt = np.array([[1, 5, 9]])
    want, found = (s.generate(prompt, 3 * FRAME) for s in (cpu, gpu))
    np.testing.assert_array_equal(found, want)
    counted = [s.stats.saved() for s in (cpu, gpu)]
    assert counted[0].keys() == counted[1].keys()
    for name, want in counted[0].items():
        np.testing.assert_array_equal(counted[1][name], want)
    assert cpu.stats.replay_ratio > 0
    gpu.save(tmp_path / "state")
    cpu.load(tmp_path / "state")
    other = gpu.fork()
    steps = [s.step(np.array([3])) for s in (cpu, gpu, other)]
    np.testing.assert_allclose(steps[1], steps[0], atol=TOLERANCE)
    np.testing.assert_array_equal(steps[2], steps[1])
    gpu.rewind(1)
    np.testing.assert_array_equal(gpu.step(np.array([3])), steps[1])


def test_a_batcher_with_thresholds_of_each_sequence(device: GpuDevice, tmp_path: Path) -> None:
    """Sequences that share decode steps on the GPU have the tokens of the backend cpu, each with its thresholds."""
    options: dict[str, Any] = {"batch_size": 2, "rows": 2, "host_cpus": ["native"]}
    artifact, draws = compiled(tmp_path / "rows", 1, **options), np.random.default_rng(0)
    thresholds = [0.0, None, 1e30]
    prompts = [draws.integers(0, 17, count) for count in (3, 5, 2)]
    found = list[Any]()
    for backend in ("cpu", "webgpu"):
        with fc.Batcher(artifact, backend) as batcher:
            sampling = [fc.Sampling(temperature=0.9, seed=i) for i in range(3)]
            given = zip(prompts, sampling, thresholds, strict=True)
            streams = [batcher.submit(p, 3 * FRAME, s, limits) for p, s, limits in given]
            found.append([(stream.result(), stream.replay_ratio) for stream in streams])
    assert found[1] == found[0]
    assert [found[0][0][1] > 0, found[0][2][1]] == [True, 0]


def test_a_layer_whose_rows_all_replay_has_no_workgroups(device: GpuDevice) -> None:
    """The gate's shader writes 0 for all dispatches of the MLP, and their counts where it computes. Shaders are given
    finite thresholds: one that is NaN never replays, an infinite one never or always."""
    _, gpu, made = _steppers(device, llama(head_dim=32), quant="w8a8", replay=fc.ReplayConfig(gate="input_delta"))
    branch = [d for d in made["dispatches"] if d.get("when", [0, 0, 1])[2] == 0]
    assert branch
    for threshold, replayed in ((np.nan, 0), (np.inf, 1), (-np.inf, 0)):
        gpu.reset()
        steps = [gpu.decode(np.array([[2]]), i, i, np.full(2, threshold, np.float32)) for i in range(2 * FRAME)]
        assert [np.mean(step.decisions) for step in steps] == [0] * FRAME + [replayed] * FRAME
        data = device.device.queue.read_buffer(gpu._buffers[gpu._inputs["thresholds"]])
        assert np.isfinite(np.frombuffer(data, np.float32)).all()
        for dispatch in branch:
            place, word = dispatch["counts"]
            counts = np.frombuffer(device.device.queue.read_buffer(gpu._buffers[place]), np.uint32)
            assert counts[word : word + 3].tolist() == [(1 - replayed) * g for g in dispatch["groups"]]


def test_rows_of_a_video_decode_the_tokens_of_one(device: GpuDevice) -> None:
    """Jacobi decoding in a window, and a prompt read in rows: tokens and decisions are those of the reference."""
    sparse = fc.SparseAttention(sinks=0, window=9)
    options = {"batch_size": 2, "rows": 3, "quant": "w8a8", "kv": "int8", "sparse_attention": sparse}
    eager, gpu, _ = _steppers(device, llama(head_dim=32), **options)
    draws, found = np.random.default_rng(0), list[tuple[Any, ...]]()
    prompt = draws.integers(0, 11, (2, 5))
    for stepper, width in ((eager, 1), (gpu, 1), (gpu, 3)):
        stepper.reset()
        run = Forwards(stepper, stepper._config, np.zeros(2, np.float32), True, 0, None)
        logits = run.read(prompt)
        sampling = fc.Sampling(temperature=0.5, seed=3).start(prompt)
        tokens = [*run.guess(logits, 4 * FRAME, sampling, WindowChoice(fc.Jacobi(width), 3))]
        found.append((np.stack(tokens), run.at.stats.decisions, run.at.stats.steps))
    for tokens, decisions, _ in found[1:]:
        np.testing.assert_array_equal(tokens, found[0][0])
        np.testing.assert_array_equal(decisions, found[0][1])
    assert found[0][1].any()
    assert found[2][2] < found[1][2]


@pytest.mark.parametrize(
    ("options", "text", "hint"),
    [
        ({"numerics": "exact", "quant": "w8a8", "kv": "int8"}, "exact_norm", "numerics='native'"),
        ({"replay": fc.ReplayConfig(gate="random")}, "random_score", "choose another gate"),
    ],
)
def test_what_has_no_shader_is_refused_by_name(options: dict[str, Any], text: str, hint: str) -> None:
    from fastcar_compile.codegen.tvm.emit import check_shaders

    defaults: dict[str, Any] = {"max_seq_len": LENGTH, "tokens_per_frame": FRAME, "batch_size": 1}
    with pytest.raises(CompileError, match=text) as caught:
        check_shaders(rewritten(llama(head_dim=32), 1, **{**defaults, **options}))
    assert hint in str(caught.value)


def test_a_layer_has_at_most_twelve_dispatches_of_eight_buffers() -> None:
    """The shaders are those of one layer, and no more storage is bound than every adapter allows."""
    sizes: dict[str, Any] = {"max_seq_len": 9, "tokens_per_frame": 2, "batch_size": 1, "quant": "w8a8", "kv": "int8"}
    few, more = (
        _program(rewritten(llama(head_dim=32, num_hidden_layers=n), 1, replay=fc.ReplayConfig(), rows=2, **sizes))
        for n in (2, 3)
    )
    assert 0 < len(more["dispatches"]) - len(few["dispatches"]) <= 12
    assert len(more["shaders"]) <= len(few["shaders"])
    assert max(code.count("var<storage") for code in more["shaders"]) <= 8


def test_stages_keep_the_order_of_dispatches_that_wait() -> None:
    """At random: behind what it waits for, in its lane or a later stage; values of one time are apart in the arena."""
    from fastcar_compile.codegen.tvm.gpu.merge import THREADS, Dispatch, arranged, staged
    from fastcar_compile.codegen.tvm.gpu.shaders import Binding, Shader

    draws, bindings = np.random.default_rng(0), tuple(Binding(f"b{i}", "f32", i == 0) for i in range(3))
    for _ in range(50):
        given = list[Dispatch]()
        for i in range(30):
            shader = Shader(str(i), bindings, (THREADS, 1, 1), (int(draws.choice([1, 2, 99])), 1, 1), wide=i % 5 == 0)
            when = (10 + int(draws.integers(2)), bool(draws.integers(2))) if draws.random() < 0.4 else None
            given.append(Dispatch(shader, tuple(int(b) for b in draws.choice(10, 3, replace=False)), when))
        words = {b: int(draws.integers(1, 9)) for b in range(7)}
        stages = staged(given, words)
        place = {
            one: (s, stage.lanes.index(lane), i)
            for s, stage in enumerate(stages) for lane in stage.lanes for i, one in enumerate(lane)
        }  # fmt: skip
        assert place.keys() == {*given}
        assert len(stages) < len(given) == sum(len(lane) for stage in stages for lane in stage.lanes)
        for i, one in enumerate(given):
            for other in filter(one.waits_for, given[:i]):
                (own, *lane), (its, *before) = place[one], place[other]
                assert its < own or (its == own and lane[0] == before[0] and before[1] < lane[1])
        found, size = arranged(stages, words)
        times = {b: [s for s, stage in enumerate(stages) if any(b in one.uses for one in stage)] for b in found}
        for b, begin in found.items():
            assert begin + words[b] <= size
            for other in found.keys() - {b}:
                at_a_time = times[b][0] <= times[other][-1] and times[other][0] <= times[b][-1]
                assert not at_a_time or begin + words[b] <= found[other] or found[other] + words[other] <= begin
