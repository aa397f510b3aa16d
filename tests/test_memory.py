"""The memory of a build: weights that are in memory already are not copied, and no artifact keeps them."""

from typing import Any

import pytest
import torch
from conftest import first_often
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


@pytest.mark.parametrize("quant", first_often(["w4a8", "bf16", "w8a8"]))
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
