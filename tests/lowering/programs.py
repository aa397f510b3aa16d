"""Small decoders, captured and rewritten by the real front end and passes, and lowered once per test run."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from decoders import llama, rewritten

from fastcar_compile.artifact.programs import decoder_section
from fastcar_compile.codegen.tvm import build
from fastcar_compile.codegen.tvm.build import HostGraph, LoweredModule, lower
from fastcar_compile.config import ReplayConfig
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.weights import to_numpy
from fastcar_compile.runtime.backends.cpu import CpuStepper, Library
from fastcar_compile.runtime.backends.eager import EagerStepper

LAYERS, FRAME, LENGTH, VOCAB = 3, 8, 65, 17


@dataclass(frozen=True)
class Case:
    """What distinguishes one small decoder from another: one threshold per layer, and with `None` it never replays."""

    quant: str = "none"
    batch: int = 2
    length: int = LENGTH
    max_chain: int | None = None
    couple_cfg: bool = False
    bias: bool = False
    gate: str = "tas"
    thresholds: tuple[float | None, ...] = (0.0,) * LAYERS


@cache
def program(case: Case) -> DecoderProgram:
    """The rewritten decode step and prefill chunk of a random Llama."""
    model = llama(
        seed=7, num_hidden_layers=len(case.thresholds), max_position_embeddings=case.length, mlp_bias=case.bias,
        attention_bias=case.bias, initializer_range=0.2,
    )  # fmt: skip
    limits = {"max_chain": case.max_chain, "couple_cfg": case.couple_cfg}
    return rewritten(
        model, chunk=6, tokens_per_frame=FRAME, max_seq_len=case.length, batch_size=case.batch, quant=case.quant,
        replay=ReplayConfig(gate=case.gate, threshold=case.thresholds, **limits),
    )  # fmt: skip


def _lowered(case: Case, *names: str) -> LoweredModule:
    """The decode step and the prefill chunk in TVM, or one of them."""
    source = program(case)
    assert source.prefill is not None
    graphs = {
        "decode": HostGraph(source.graph_module, source.outputs),
        "prefill": HostGraph(source.prefill, source.prefill_outputs),
    }
    return lower({name: graphs[name] for name in names or graphs})


lowered_whole = cache(_lowered)


@cache
def lowered(case: Case, name: str = "decode") -> LoweredModule:
    """The decode step or the prefill chunk in TVM, without machine code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "compile_module", lambda *_: None)
        return _lowered(case, name)


def export(case: Case, folder: Path, *names: str) -> Library:
    """Write decoder.so."""
    module = lowered_whole(case, *names)
    module.export(folder / "decoder.so")
    return Library((folder / "decoder.so").read_bytes(), module.part("decoder.so"))


def numpy_params(source: DecoderProgram) -> dict[str, np.ndarray]:
    """Every parameter as an array over the tensor's memory."""
    return {name: to_numpy(tensor) for name, tensor in source.params.items()}


def cpu_backend(case: Case, library: Library, params: dict[str, np.ndarray] | None = None) -> CpuStepper:
    """A backend on an exported library."""
    source = program(case)
    return CpuStepper(library, decoder_section(source), params or numpy_params(source), threads=2)


def eager_backend(case: Case) -> EagerStepper:
    """The reference."""
    source = program(case)
    return EagerStepper(source)


def tokens(case: Case, count: int, seed: int = 3) -> np.ndarray:
    """int64 [count, B, 1]."""
    return np.random.default_rng(seed).integers(0, VOCAB, (count, case.batch, 1))
