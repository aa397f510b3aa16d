"""Parallel matmuls combined: their parallel loops become one loop, which is launched and awaited once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from tvm.s_tir import SBlock, SBlockRealize, renew_defs
from tvm.tirx import Bind, DeclBuffer, For, ForKind, IfThenElse, IntImm, PrimFunc, SeqStmt, Stmt, Var

from fastcar_compile.codegen.tvm.kernels import OPAQUE
from fastcar_compile.errors import InternalError


def combine(kernels: Sequence[PrimFunc], shared: int) -> PrimFunc:
    """Return one kernel with all results, each computed by the statements of its own kernel, so bit for bit.

    First comes what the kernels do before their parallel loops, then one loop over the iterations of all kernels, then
    what they do after it. A kernel without a parallel loop runs before that loop as a whole.

    Args:
        kernels: each has one block as its body and the result as its last argument. A kernel may occur several times.
        shared: how many of the first arguments are the same for all.

    Returns:
        A kernel of the shared arguments, the other arguments of each kernel in order, and the results.

    Raises:
        InternalError: a kernel has two parallel loops.
    """
    kernels = [renew_defs(kernel) for kernel in kernels]  # every variable is defined once
    common = list(kernels[0].params[:shared])
    # Every other kernel has buffers of its own for these arguments: a DeclBuffer makes each an alias.
    again = [
        DeclBuffer(other, data=buffer.data)
        for kernel in kernels[1:]
        for other, buffer in zip(kernel.params[:shared], common, strict=True)
    ]
    blocks = [kernel.body.block for kernel in kernels]
    before, loops, after = zip(*(_split(block.body) for block in blocks), strict=True)
    # Aliases, then all statements before the loops, one parallel loop, and all statements behind them.
    body = SeqStmt([*again, *chain(*before), *_one_loop([loop for loop in loops if loop is not None]), *chain(*after)])
    # A region of an alias is left out: the first kernel's regions name the same data.
    copies = {one.buffer for one in again}
    reads = [region for b in blocks for region in b.reads if region.source not in copies]
    block = SBlock([], reads, [region for b in blocks for region in b.writes], "combined", body)
    own = chain.from_iterable(kernel.params[shared:-1] for kernel in kernels)
    params = [*common, *own, *(kernel.params[-1] for kernel in kernels)]
    merged = PrimFunc(params, SBlockRealize([], True, block), attrs=kernels[0].attrs).with_attr("op_pattern", OPAQUE)
    assert isinstance(merged, PrimFunc)
    return merged


def _split(body: Stmt) -> tuple[list[Stmt], For | None, list[Stmt]]:
    """Return the statements before the parallel loop, the loop, and those after it."""
    statements = list(body.seq) if isinstance(body, SeqStmt) else [body]
    loops = [(i, s) for i, s in enumerate(statements) if isinstance(s, For) and s.kind == ForKind.PARALLEL]
    if len(loops) > 1:
        raise InternalError(f"a kernel with {len(loops)} parallel loops cannot be combined with another")
    if not loops:
        return statements, None, []
    at, loop = loops[0]
    return statements[:at], loop, statements[at + 1 :]


def _one_loop(loops: Sequence[Any]) -> list[For]:
    """Return one parallel loop over the iterations of these loops, all of which begin at 0, or nothing for no loops."""
    if not loops:
        return []
    # Loop i has the iterations ends[i - 1] .. ends[i] - 1 of the common loop.
    ends = [sum(int(loop.extent) for loop in loops[: i + 1]) for i in range(len(loops))]
    every = Var("block", "int32")
    body: Any = None
    # From the last loop backwards, because every earlier loop is a branch in front of the later ones.
    for loop, end in zip(reversed(loops), reversed(ends), strict=True):
        mine = SeqStmt([Bind(loop.loop_var, every - (end - int(loop.extent))), loop.body])
        body = mine if body is None else IfThenElse(every < end, mine, body)
    return [For(every, IntImm("int32", 0), IntImm("int32", ends[-1]), ForKind.PARALLEL, body)]
