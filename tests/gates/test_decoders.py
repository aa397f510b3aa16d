"""Every gate in a whole decoder: the same decisions in eager PyTorch, TVM, onnxruntime and HLS C simulation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import thresholds_between
from conftest import first_often
from decoders import llama, rewritten

import fastcar_compile as fc
from fastcar_compile.artifact.programs import decoder_section
from fastcar_compile.codegen.onnx.export import export_onnx
from fastcar_compile.codegen.tvm.build import HostGraph, lower
from fastcar_compile.gates import GATES
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.weights import to_numpy
from fastcar_compile.runtime.backends.base import Stepper
from fastcar_compile.runtime.backends.cpu import CpuStepper, Library
from fastcar_compile.runtime.backends.eager import EagerStepper
from fastcar_compile.runtime.backends.ort import OnnxModel, OrtStepper

from .networks import networks

FRAME, LENGTH, LAYERS, ROWS = 8, 33, 2, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "tas": {"heads": [[1, 2], {0: 1.0, 3: -0.5}], "max_chain": 2}, "input_delta": {"refresh_every": 3},
    "learned": {"gate_weights": networks(64, 5, 3), "refresh_every": 3, "couple_cfg": True},
    "random": {"max_chain": 1, "refresh_every": 2}, "always": {"refresh_every": 4}, "never": {},
}  # fmt: skip
KV = {"tas": "int8", "learned": "float16", "input_delta": "bfloat16"}
"""Gate -> type of its decoder's caches, where they are narrow. The first reads a key."""


def program(name: str) -> DecoderProgram:
    """A random Llama, rewritten with this gate."""
    return rewritten(
        llama(), chunk=1, tokens_per_frame=FRAME, max_seq_len=LENGTH, batch_size=ROWS, quant="none",
        replay=fc.ReplayConfig(gate=name, **OPTIONS[name]), kv=KV.get(name, "float32"),
    )  # fmt: skip


def backends(name: str, folder: Path) -> dict[str, Stepper]:
    """The same program three times; the constant gates only in eager, as test_scores.py has their operator."""
    source = program(name)
    eager = EagerStepper(replace(source, prefill=None))
    if name in ("always", "never"):
        return {"eager": eager}
    lowered = lower({"decode": HostGraph(source.graph_module, source.outputs)})
    lowered.export(folder / "decoder.so")
    library = Library((folder / "decoder.so").read_bytes(), lowered.part("decoder.so"))
    section = decoder_section(source)
    cpu = CpuStepper(library, section, {n: to_numpy(t) for n, t in source.params.items()}, threads=1)
    export_onnx(source, folder / "decoder.onnx")
    return {
        "eager": eager,
        "cpu": cpu,
        "ort": OrtStepper(OnnxModel("decoder.onnx", (folder / "decoder.onnx").read_bytes()), section, 1),
    }


@pytest.fixture(
    scope="module",
    params=first_often(["learned", "tas", "always", "never", "input_delta", "random"], 4),
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Stepper]]:
    return request.param, backends(request.param, tmp_path_factory.mktemp(request.param))


def tokens() -> np.ndarray:
    """int64 [T, B, 1]; few symbols, so that places repeat between frames."""
    return np.random.default_rng(3).integers(0, 3, (LENGTH, ROWS, 1))


def decode(backend: Stepper, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decisions and scores [T, L, B], logits [T, B, V] of the whole video."""
    backend.reset()
    results = [backend.decode(ids, t, t, thresholds) for t, ids in enumerate(tokens())]
    return tuple(np.stack([getattr(r, name) for r in results]) for name in ("decisions", "scores", "logits"))  # pyright: ignore[reportReturnType]


def between_scores(name: str, backend: Stepper) -> np.ndarray:
    """Thresholds in the widest gap between the middle scores, so that rounding decides nothing."""
    if name in ("always", "never"):
        return np.zeros(LAYERS, np.float32)
    thresholds = np.full(LAYERS, GATES[name].comparison.never, np.float32)
    for layer in range(LAYERS):
        thresholds[layer] = thresholds_between(decode(backend, thresholds)[1][FRAME:])[layer]
    return thresholds


def test_backends_decide_alike(built: tuple[str, dict[str, Stepper]]) -> None:
    name, opened = built
    thresholds = between_scores(name, opened["eager"])
    decisions, scores, logits = decode(opened["eager"], thresholds)
    assert not decisions[:FRAME].any()
    share = decisions[FRAME:].mean()
    assert share == 0 if name == "never" else 0 < share < 1
    assert sorted(GATES) == sorted(OPTIONS), "every gate is here"
    for other, backend in opened.items():
        same, close, equal = decode(backend, thresholds)
        np.testing.assert_array_equal(same, decisions, err_msg=other)
        np.testing.assert_allclose(close, scores, atol=1e-4, err_msg=other)
        np.testing.assert_allclose(equal, logits, atol=1e-4, err_msg=other)


def test_the_thresholds_never_and_always(built: tuple[str, dict[str, Stepper]]) -> None:
    """The comparison's own infinities close and open every gate but `never`, within first frame, chain and refresh."""
    name, opened = built
    comparison, options = GATES[name].comparison, OPTIONS[name]
    for which, backend in opened.items():
        closed, _, _ = decode(backend, np.full(LAYERS, comparison.never, np.float32))
        assert not closed.any()
        decisions, _, _ = decode(backend, np.full(LAYERS, comparison.always, np.float32))
        for t, row in enumerate(decisions[:, 0, 0]):
            visits = range(t % FRAME, t + 1, FRAME)
            assert row == expected_when_open(list(visits), options), f"{which} step {t}"


def expected_when_open(visits: list[int], options: dict[str, Any]) -> bool:
    """Whether the last of these visits to a slot replays when every score passes."""
    chain, replay = 0, False
    for t in visits:
        refresh = options.get("refresh_every")
        replay = t >= FRAME and not (refresh and t // FRAME % refresh == 0) and chain < options.get("max_chain", 99)
        chain = chain + 1 if replay else 0
    return replay
