"""The memory of a build: weights that are in memory already are not copied, and no artifact keeps them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fresh_process
from decoders import PlainDecoder, llama, rewritten
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.codegen import plan
from fastcar_compile.codegen.plan import decide
from fastcar_compile.config.options import asked
from fastcar_compile.config.resolve import resolve
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import tensor_attributes
from fastcar_compile.ir.text import graph_to_text
from fastcar_compile.passes.pipeline import analysis_pipeline

SIZES = {"batch_size": 1, "max_seq_len": 33, "tokens_per_frame": 4}


def places(program: DecoderProgram) -> dict[tuple[int, str], int]:
    """Addresses of the tensors that each graph reads."""
    graphs = enumerate(program.all_graphs())
    return {(at, name): t.data_ptr() for at, graph in graphs for name, t in tensor_attributes(graph).items()}


def same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def analysed(model: torch.nn.Module, **changes: int) -> DecoderProgram:
    program = capture(model, **{**SIZES, "prefill_chunk": 4, **changes})
    run_pipeline(program, analysis_pipeline())
    return program


def test_a_copy_of_a_program_shares_every_tensor_and_no_graph() -> None:
    model = PlainDecoder()
    program = analysed(model)
    other = program.copied()
    assert places(other) == places(program)
    own = {t.data_ptr() for t in model.parameters()}
    assert own <= set(places(program).values()), "nor does the capture copy any"
    before = graph_to_text(program.graph_module)
    for graph in other.all_graphs():
        graph.graph.erase_node(next(n for n in reversed(graph.graph.nodes) if not n.users))
    assert graph_to_text(program.graph_module) == before


def test_a_build_that_falls_back_copies_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wish for whole steps is tried on the program, and what is built instead begins from a copy."""
    board = fc.load_target("zcu102")
    options: Any = {**SIZES, "quant": "w8a8"}
    wanted = resolve(asked(options), board, dict.fromkeys(SIZES))
    assert wanted.whole is not None
    begun = list[DecoderProgram]()
    program = analysed(PlainDecoder())
    original, before = program.copied(), places(program)
    real = plan.run_pipeline

    def noted(each: DecoderProgram, passes: Any) -> None:
        begun.append(each)
        assert places(each) == before
        real(each, passes)

    monkeypatch.setattr(plan, "run_pipeline", noted)
    with pytest.warns(UserWarning, match="cannot run this decoder's whole steps"):
        decide(program, wanted, board, original=original)
    assert len({id(each) for each in begun}) == 2


@pytest.mark.parametrize("quant", ["bf16", "w8a8", "w4a8"])
def test_graphs_share_what_is_made_of_a_weight(quant: str) -> None:
    decode, prefill = map(tensor_attributes, rewritten(PlainDecoder(), 4, quant=quant, **SIZES).graphs())
    made = {name for name in decode if name in prefill and ".weight_" in name}
    assert len(made) >= 9, "four linears of each layer, and the head"
    assert [name for name in made if not same(decode[name], prefill[name])] == []


def test_graphs_of_a_bfloat16_model_share_its_float32_weights() -> None:
    model: Any = llama(num_hidden_layers=1)
    program = analysed(model.to(torch.bfloat16), rows=2)
    decode, prefill = map(tensor_attributes, program.graphs())
    assert decode["lm_head.weight"].dtype == torch.float32
    assert [n for n, t in decode.items() if n in prefill and n.endswith("weight") and not same(t, prefill[n])] == []


MEASURE = """
import gc, re, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
from decoders import llama
import fastcar_compile as fc

def built(hidden, inner, layers, **options):
    heads = hidden // 64
    model = llama(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, max_position_embeddings=64,
    )
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = kilobytes("VmRSS")
    fc.compile(model, sys.argv[2], quant=sys.argv[3], tokens_per_frame=8, output=sys.argv[4], cache=None)
    return sum(p.nbytes for p in model.parameters()), (kilobytes("VmHWM") - before) * 1024

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

built(64, 128, 2)  # what the first build imports
print(*built(1024, 4096, 3))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("quant", "most"), [("none", 0.25), ("w8a8", 1.75)])
def test_a_build_of_200_mb_takes_no_second_copy_of_the_weights(quant: str, most: float, tmp_path: Path) -> None:
    """float32: nothing but graphs. w8a8: a quarter in int8, and onnx holds its model several times while it writes it.

    On 29 November 2026 the peaks were 0.06 and 1.5 of the weights; with a copy of the program 1.06 and 4.1.
    """
    text = fresh_process("-c", MEASURE, Path(__file__).parent, "cpu", quant, tmp_path / "made")
    size, peak = map(int, re.findall(r"^(\d+) (\d+)$", text, re.MULTILINE)[-1])
    assert size > 200e6
    assert peak < most * size
