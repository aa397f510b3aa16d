"""The shipped decoder of the game: every backend decodes a frame alike, after one that it can replay."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import decode
from conftest import check_module, check_tool
from safetensors.torch import load_file
from torch import Tensor

import fastcar_compile as fc
from fastcar_play.world import load_world

WORLD = Path(__file__).parents[1] / "examples" / "doom" / "world"
FRAME = 65
THRESHOLDS = (0.728, 0.835, 0.81, 0.916, 0.915)
"""Some rows of every layer replay. No score of these frames is so near to one that rounding could decide."""

FLOATING = ("eager", "onnxruntime")


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """Two frames of a start, int64 [1, 130]."""
    return load_file(WORLD / "starts.safetensors")["tokens"][:1, :2].flatten(1)


def decoded(artifact: fc.Artifact, backends: Sequence[str], ids: Tensor) -> dict[str, Tensor]:
    """The logits [1, 130, V] of each backend, all of whose decisions are equal."""
    logits, decisions = dict[str, Tensor](), list[np.ndarray]()
    for backend in backends:
        with artifact.session(backend, record=True) as session:
            logits[backend] = decode(session, ids, 1)
            decisions.append(np.asarray(session.stats.decisions)[:, :, 0])
    second = decisions[0][FRAME:]
    assert ((second.mean(0) > 0.1) & (second.mean(0) < 0.9)).all()
    assert all((found == decisions[0]).all() for found in decisions)
    return logits


def compiled(quant: str, target: str, output: Path) -> fc.Artifact:
    """The decoder with replay. The prompt is one token."""
    replay = fc.ReplayConfig(gate="input_delta", threshold=THRESHOLDS)
    return fc.compile(
        WORLD / "decoder", target=target, quant=quant, replay=replay, max_seq_len=2 * FRAME, prefill_chunk=1,
        offload="mlp", output=output,
    )  # fmt: skip


@pytest.mark.thorough
def test_float32_is_alike(ids: Tensor, tmp_path: Path) -> None:
    artifact = compiled("none", "cpu", tmp_path / "a")
    load_world(WORLD).check_decoder(artifact.config)
    logits = decoded(artifact, ("cpu", *FLOATING), ids)
    for backend in FLOATING:
        torch.testing.assert_close(logits[backend], logits["cpu"], atol=1e-4, rtol=0)


@pytest.mark.thorough  # one more decoder in w8a8
def test_w8a8_is_alike_and_in_simulation_the_same(ids: Tensor, tmp_path: Path) -> None:
    """Backends that round at other places differ by steps of int8, which the layers and caches behind them spread."""
    check_tool("g++")
    check_module("hls4ml")
    logits = decoded(compiled("w8a8", "zcu102", tmp_path / "a"), ("cpu", "hls-csim", *FLOATING), ids)
    assert torch.equal(logits["hls-csim"], logits["cpu"])
    for backend in FLOATING:
        difference = logits[backend] - logits["cpu"]
        assert difference.square().mean().sqrt() < 0.03 * logits["cpu"].std(), backend
