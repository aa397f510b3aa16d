"""One-layer programs at every stage of the pipeline, and their listings."""

from __future__ import annotations

import re

import torch
from decoders import PlainDecoder, llama
from torch import Tensor, fx

from fastcar_compile.frontend.capture import capture
from fastcar_compile.graph_io import graph_to_text
from fastcar_compile.ir import DecoderProgram
from fastcar_compile.passes.base import Pass, run_pipeline
from fastcar_compile.passes.canonicalize import Canonicalize
from fastcar_compile.passes.find_sites import FindSites
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.normalize_state import NormalizeState
from fastcar_compile.passes.offload_mlp import OffloadMlp
from fastcar_compile.passes.quantize import QuantizeW8A8

FRAME, ROWS = 4, 17

STAGES: dict[str, Pass] = {
    "normalize-state": NormalizeState(),
    "canonicalize": Canonicalize(),
    "find-sites": FindSites(),
    "quantize-w8a8": QuantizeW8A8(),
    "insert-replay": InsertReplay(thresholds=(1.5,), max_chain=3),
    "offload-mlp": OffloadMlp(),
}
"""Every pass of the compiler in its order, with the options that the tests use."""


def plain() -> DecoderProgram:
    """One layer of the step protocol: LayerNorm, fused qkv, GELU MLP with biases."""
    model = PlainDecoder(rows=ROWS, layers=1)
    return capture(model, batch_size=1, max_seq_len=ROWS, tokens_per_frame=FRAME, prefill_chunk=0)


def gated() -> DecoderProgram:
    """One layer of a Hugging Face Llama: RMSNorm, RoPE, grouped queries, SwiGLU."""
    model = llama(num_hidden_layers=1)
    return capture(model, batch_size=1, max_seq_len=ROWS, tokens_per_frame=FRAME, prefill_chunk=0)


def up_to(program: DecoderProgram, stage: str, *, inclusive: bool) -> DecoderProgram:
    """The program after every pass before `stage`, and after it if inclusive."""
    names = list(STAGES)
    end = names.index(stage) + inclusive
    return run_pipeline(program, [STAGES[n] for n in names[:end]])


def listing(program: DecoderProgram) -> str:
    """The decode step as text; of the notes only which pass made a node, so that moved source lines change nothing."""
    text = graph_to_text(program.graph_module)
    return re.sub(r"  # (made by [a-z0-9-]+)?.*", lambda m: f"  # {m[1]}" if m[1] else "", text)


def run(module: fx.GraphModule, program: DecoderProgram, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Eager results by name; states that are not given are zero."""
    zeros = dict(zip(program.inputs, program.example_inputs(), strict=True))
    with torch.inference_mode():
        results = module(*[values.get(n, zeros[n]) for n in program.inputs])
    return dict(zip(program.outputs, results, strict=True))
