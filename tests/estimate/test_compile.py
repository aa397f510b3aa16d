"""What the compiler does with the model: the explored design is emitted, and a decoder that does not fit is refused."""

from dataclasses import replace

import pytest
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.codegen.hls.design.memory import HOST_RESERVE, capacity, require_fit
from fastcar_compile.codegen.hls.model.shapes import load_shape
from fastcar_compile.codegen.hls.model.system import estimate
from fastcar_compile.codegen.hls.model.workload import Workload


def test_a_card_holds_the_weights_and_the_caches_where_it_attends() -> None:
    """The cache alone would fill the card. A board that shares its memory with the host holds it too."""
    work, card = Workload(load_shape("llama3-8b"), "w4a8", 2**18), fc.load_target("u280")
    assert work.kv_bytes(work.context) > capacity(card)
    assert estimate(work, card).what_if == ()
    with pytest.raises(fc.CompileError, match="does not fit the memory of u280"):
        require_fit(replace(work, offload="all").footprint(card), card, quant="w4a8", positions=work.context)
    with pytest.raises(fc.CompileError, match="does not fit the memory of zcu102"):
        estimate(work, fc.load_target("zcu102"))


def test_a_dry_run_refuses_from_the_same_byte_on() -> None:
    board = fc.load_target("zcu102")
    work = fc.compile(llama(), board, offload="mlp", tokens_per_frame=8, dry_run=True)
    needed = work.memory.banks[0].used
    assert needed == work.memory.weights + sum(work.memory.state.values())
    for room, fits in ((needed, True), (needed - 1, False)):
        memory = board.memories[0].model_copy(update={"capacity_bytes": HOST_RESERVE + room})
        narrow = board.model_copy(update={"memories": (memory,)})
        found = fc.compile(llama(), narrow, offload="mlp", tokens_per_frame=8, dry_run=True)
        assert (found.ok, len(found.speed)) == (fits, len(work.speed))
