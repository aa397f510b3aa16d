"""Decoder shapes: the weights of the published models, and what an artifact's manifest gives."""

from dataclasses import replace
from typing import Any

import pytest
from manifests import decoder_config, layer_part, sections

from fastcar_compile.artifact.explain import explain, own_windows
from fastcar_compile.artifact.sections import LayersSection
from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.codegen.hls.model import load_shape
from fastcar_compile.codegen.hls.model.shapes import shape_of_sections
from fastcar_compile.codegen.hls.model.workload import workload_of_sections
from fastcar_compile.errors import UserError
from fastcar_compile.ir.types import LayerSite

SIZES: dict[str, Any] = {"hidden": 64, "intermediate": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
DECODER = decoder_config(tokens_per_frame=8, max_seq_len=33, vocab_size=None)


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama2-7b", 6.607e9), ("llama3-8b", 7.504e9), ("tinyllama-1.1b", 1.034e9)]
)
def test_weights_read_by_a_step(name: str, parameters: float) -> None:
    """int8 bytes are parameters and 4 bytes per output; embeddings are not read."""
    assert load_shape(name).weight_bytes("w8a8") == pytest.approx(parameters, rel=3e-3)


def test_bytes_of_a_linear() -> None:
    linear = LinearSpec("x", 130, 3)
    assert linear.weight_bytes("none") == 4 * 390
    assert linear.weight_bytes("w8a8") == 3 * (144 + 4)
    assert linear.weight_bytes("w4a8") == 3 * 2 * (64 + 2)


def test_shape_of_an_artifact() -> None:
    shape = shape_of_sections(DECODER, [layer_part(0, **SIZES), layer_part(1, **SIZES)])
    assert (shape.layers, shape.kv_heads, shape.vocab, shape.frames) == (2, 2, 0, 4)
    with pytest.raises(UserError, match="layer 1 differs from layer 0 in intermediate"):
        shape_of_sections(DECODER, [layer_part(0, **SIZES), layer_part(1, **{**SIZES, "intermediate": 128})])


def with_window(layer: int, window: int | None, rows: int, sinks: int = 0) -> LayerSite:
    part = layer_part(layer)
    seen = {"window": window, "sinks": sinks, "cache_rows": rows}
    return replace(part, attention=replace(part.attention, **seen))


def test_windows_of_the_model_count_as_their_mean() -> None:
    """Half of 32 positions are read, or the window; memory holds the mean of the rings and the full caches."""
    layers = [with_window(0, 4, 8), with_window(1, None, 32), with_window(2, 4, 8)]
    found = sections(layers=LayersSection(layers=tuple(layers)))
    work = workload_of_sections(found.options, found.decoder, layers)
    assert (work.attended, work.kv_rows) == ((4 + 16 + 4) // 3, (8 + 32 + 8) // 3)
    assert [(w.layer, w.window, w.cache_rows) for w in own_windows(found)] == [(0, 4, 8), (2, 4, 8)]
    line = "window    the last 4 tokens in layers 0, 2, as the model has it; 8 rows of keys and values instead of 32"
    assert line in explain(found)


def test_one_window_of_all_layers_is_that_of_the_workload() -> None:
    layers = [with_window(n, 4, 10, sinks=2) for n in range(3)]
    options, decoder = sections().options, sections().decoder
    work = workload_of_sections(options, decoder, layers)
    assert (work.sink_window, work.kv_rows) == ((2, 4), 10)
    assert workload_of_sections(options, decoder, [layer_part(n) for n in range(3)]).sink_window is None
