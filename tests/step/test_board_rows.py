"""The design of VILA-U 7B for eight rows on ZCU102, cut to a small decoder: coupled decoding is sequential decoding."""

from pathlib import Path

import numpy as np
import pytest
from conftest import check_module
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.codegen.hls.design.spec import StepSpec
from fastcar_compile.config.models import Jacobi

ROWS, CORES, SHARE = 8, 8, 4


@pytest.mark.thorough
def test_eight_rows_decode_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On eight cores, with attention of four rows at a time: tokens, decisions, states and counts."""
    check_module("hls4ml")
    monkeypatch.setattr(StepSpec, "sides", lambda own: [(1, min(SHARE, own.shared))])
    artifact = fc.compile(
        llama(head_dim=32),
        target="zcu102",
        quant="w4a8",
        offload="all",
        rows=ROWS,
        tokens_per_frame=10,
        max_seq_len=64,
        replay=fc.ReplayConfig(threshold=0.0),
        output=tmp_path / "board",
    )
    design = artifact.manifest.accelerator.design if artifact.manifest.accelerator else None
    assert design is not None
    assert (design.spec.cores, design.share) == (CORES, SHARE)
    prompt, sampling = np.random.default_rng(4).integers(0, 17, (1, 13)), fc.Sampling(0.8, 9, seed=5)
    board, eager = (artifact.session(backend, record=True) for backend in ("hls-csim", "eager"))
    expected, held = eager.generate(prompt, 45, sampling, jacobi=Jacobi(1)), set[bytes]()
    for window in (1, 3, ROWS):
        np.testing.assert_array_equal(board.generate(prompt, 45, sampling, jacobi=Jacobi(window)), expected)
        np.testing.assert_array_equal(board.stats.decisions, eager.stats.decisions)
        assert (board.stats.steps < board.stats.forwards) == (window > 1)
        board.save(tmp_path / "held")
        held.add((tmp_path / "held").read_bytes())
    assert len(held) == 1, "the states of a window are those of one row after another"
    assert 0.05 < eager.stats.replay_ratio < 0.9
