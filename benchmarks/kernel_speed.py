"""GB/s of what a kernel streams, and the share of the read bandwidth: weights of linears and of gate `learned`, keys
and values of attention, of one token and of a prompt's chunk.

    python benchmarks/kernel_speed.py --json out.json
    python benchmarks/kernel_speed.py --sizes 4096x11008 --rows 1,4,64 --isa avx512-vnni,avx2
    python benchmarks/kernel_speed.py --kernels linear_w8a8 --rows 32 --active 1,8,16,32 --threads 1
    python benchmarks/kernel_speed.py --kernels attention_int8 --sizes 512x2048,2048x2048 --rows 1,2
    python benchmarks/kernel_speed.py --kernels chunk_float32,chunk_int8 --sizes 512x2048,2048x2048 --rows 64,512
    python benchmarks/kernel_speed.py --kernels gate_learned --sizes 16x2048 --rows 1,2 --threads 1

Every call of a kernel reads other weights than the one before, together more than the caches hold. The bandwidth is
that of a kernel that only reads, measured in turns with the others; times are the least of all calls. For attention n
is the context and k the width of the decoder, in heads of 128; rows are the batch, and for
a chunk its tokens, the last n of the context. For the gate n is its hidden units
and k the width.
"""

# pyright: reportInvalidTypeForm=false, reportMissingModuleSource=false
# TVMScript annotates buffers with calls; tvm.script.tirx is made when tvm is imported.

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from tvm.runtime import from_dlpack as adopt
from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import (
    INSTRUCTION_SETS,
    InstructionSet,
    cpu_flags,
    host_instruction_set,
    instruction_set,
)
from fastcar_compile.codegen.tvm.kernels.attention.chunk import chunk_attention
from fastcar_compile.codegen.tvm.kernels.attention.decode import decode_attention
from fastcar_compile.codegen.tvm.kernels.learned_score import learned_score
from fastcar_compile.codegen.tvm.kernels.registry import KERNELS
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.ir.ops.linear import group_count
from fastcar_compile.ir.ops.operator import stored
from fastcar_compile.runtime.guard import use_threads
from fastcar_compile.support.machine import usable_cores

KINDS = ("linear_w8a8", "linear_w4a8", "linear_float32", "linear_bfloat16")
KV_TYPES = ("int8", "float16", "bfloat16", "float32")
ATTENTION = {f"attention_{name}": getattr(torch, name) for name in KV_TYPES}
CHUNKS = {f"chunk_{name}": getattr(torch, name) for name in KV_TYPES}
HEAD_DIM = 128
GATE = "gate_learned"
FLOATS = {"linear_float32": torch.float32, "linear_bfloat16": torch.bfloat16}
STREAMED = 192 << 20
"""Bytes of weights that calls go through before they meet the same again: several times the largest cache."""

BLOCK = 1 << 15
Run = Callable[[int], None]
"""Calls a kernel with the weights of that number."""


@dataclass(frozen=True)
class Row:
    """One kernel on one shape; milliseconds of one call, gigabytes per second, share of read bandwidth.

    Bytes are those of weights and their scales, or of keys and values.
    """

    kernel: str
    isa: str
    m: int
    active: int
    n: int
    k: int
    threads: int
    ms: float
    gb_per_s: float
    share: float
    gmac_per_s: float


def read_kernel(size: int) -> Any:
    """The exclusive or of all 64-byte words of every block of 32 KiB: as fast as this machine reads."""
    blocks = size // BLOCK

    @T.prim_func(s_tir=True)
    def read(w: T.Buffer((blocks, BLOCK // 4), "int32"), y: T.Buffer((blocks, 16), "int32")):
        T.func_attr({"tir.noalias": True, "global_symbol": "read"})
        for b in T.parallel(blocks):
            with T.sblock("block"):
                T.reads(w[0:blocks, 0 : BLOCK // 4])
                T.writes(y[0:blocks, 0:16])
                acc = T.alloc_buffer((128,), "int32")
                for u in T.unroll(8):
                    acc[T.Ramp(u * 16, 1, 16)] = T.Broadcast(0, 16)
                for c in range(BLOCK // 512):
                    for u in T.unroll(8):
                        acc[T.Ramp(u * 16, 1, 16)] = T.bitwise_xor(
                            acc[T.Ramp(u * 16, 1, 16)], w[b, T.Ramp(c * 128 + u * 16, 1, 16)]
                        )
                for u in T.unroll(7):
                    acc[T.Ramp(0, 1, 16)] = T.bitwise_xor(acc[T.Ramp(0, 1, 16)], acc[T.Ramp(u * 16 + 16, 1, 16)])
                y[b, T.Ramp(0, 1, 16)] = acc[T.Ramp(0, 1, 16)]

    return read


def compiled(name: str, kernel: Any, isa: InstructionSet) -> Any:
    """The function of a kernel."""
    module = tvm.IRModule({name: kernel.with_attr("global_symbol", name)})
    return tvm.compile(module, target=host_target(isa))[name]


def reader(isa: InstructionSet) -> tuple[Run, int]:
    """Reads one eighth of the streamed bytes per call; bytes of a call."""
    size = STREAMED // 8
    parts = [tvm.runtime.tensor(np.full((size // BLOCK, BLOCK // 4), i, np.int32)) for i in range(8)]
    y = tvm.runtime.tensor(np.zeros((size // BLOCK, 16), np.int32))
    function = compiled("read", read_kernel(size), isa)
    return lambda i: function(parts[i % 8], y), size


def linear(kind: str, isa: InstructionSet, m: int, n: int, k: int, active: int) -> tuple[Run, int]:
    """One linear on weights in turn, of whose m rows the last `active` are not zero; bytes of weights and scales."""
    function = compiled(kind, KERNELS[kind](m, n, k, isa=isa), isa)
    y = torch.zeros(m, n)
    if kind in FLOATS:
        x, shape, dtype, scales = torch.randn(m, k), (n, k), FLOATS[kind], None
    else:
        four = kind == "linear_w4a8"
        x, shape = torch.randint(-127, 128, (m, k), dtype=torch.int8), (n, group_count(k) * 64 if four else k)
        dtype = torch.uint8 if four else torch.int8
        scales = torch.ones(n, group_count(k), dtype=torch.float16) if four else torch.ones(n)
    x[: m - active] = 0
    bytes_of_call = math.prod(shape) * dtype.itemsize + (0 if scales is None else scales.nbytes)
    copies = -(-STREAMED // bytes_of_call)
    weights = [adopt(torch.randint(0, 127, shape).to(dtype)) for _ in range(copies)]
    if scales is None:
        given = [adopt(x)], [adopt(y)]
    else:
        given = [adopt(x), adopt(torch.ones(m))], [adopt(scales), adopt(y)]
    return lambda i: function(*given[0], weights[i % copies], *given[1]), bytes_of_call


def attend(kind: str, isa: InstructionSet, m: int, n: int, k: int) -> tuple[Run, int]:
    """Decode attention at the last of n positions on caches in turn; bytes of keys and values of a call."""
    shape, heads = (m, k // HEAD_DIM, n, HEAD_DIM), k // HEAD_DIM
    dtype = ATTENTION[kind]
    scale = HEAD_DIM**-0.5
    function = compiled(
        kind, decode_attention((m, heads, 1, HEAD_DIM), shape, scale, str(dtype).split(".")[1], isa=isa), isa
    )
    rows = stored(torch.randn(shape), dtype)
    copies = -(-STREAMED // (2 * rows.nbytes))
    caches = [(adopt(rows.clone()), adopt(rows.clone())) for _ in range(copies)]
    query, position = adopt(torch.randn(m, heads, 1, HEAD_DIM)), adopt(torch.tensor([n - 1]))
    y = adopt(torch.zeros(m, heads, 1, HEAD_DIM))
    return lambda i: function(query, *caches[i % copies], position, y), 2 * rows.nbytes


def attend_chunk(kind: str, isa: InstructionSet, m: int, n: int, k: int) -> tuple[Run, int]:
    """Causal attention of the last m of n positions on caches in turn; bytes of keys and values of a call."""
    heads, dtype = k // HEAD_DIM, CHUNKS[kind]
    query, cache, text = (1, heads, m, HEAD_DIM), (1, heads, n, HEAD_DIM), str(dtype).split(".")[1]
    function = compiled(kind, chunk_attention(query, cache, HEAD_DIM**-0.5, text, isa=isa), isa)
    rows = stored(torch.randn(cache), dtype)
    caches = [(adopt(rows.clone()), adopt(rows.clone())) for _ in range(4)]
    q, y, position = adopt(torch.randn(query)), adopt(torch.zeros(query)), adopt(torch.tensor([n - m]))
    return lambda i: function(q, *caches[i % 4], position, y), 2 * rows.nbytes


def products(kind: str, m: int, n: int, k: int) -> float:
    """Products of a call: attention has those with keys and with values, the gate of the input and of its change."""
    if kind in CHUNKS:
        return 2 * k * m * (n - (m - 1) / 2)
    return (2 if kind in ATTENTION or kind == GATE else 1) * m * n * k


def decide(kind: str, isa: InstructionSet, m: int, n: int, k: int) -> tuple[Run, int]:
    """The score of gate `learned` with n hidden units on networks in turn; bytes of a network."""
    function = compiled(kind, learned_score(m, k, n), isa)
    size = n * (2 * 2 * k + 2 * 4) + 4
    copies = -(-STREAMED // size)
    networks = [[adopt(w) for w in network(n, k)] for _ in range(copies)]
    x, cached = torch.randn(m, k), torch.randn(m, k)
    rows, y = (adopt(x), adopt(cached)), adopt(torch.zeros(m))
    return lambda i: function(*rows, *networks[i % copies], y), size


def network(n: int, k: int) -> tuple[torch.Tensor, ...]:
    """w1, b1, w2 and b2 of n hidden units."""
    return torch.randn(n, 2 * k).bfloat16(), torch.zeros(n), torch.randn(n), torch.zeros(1)


def least(runs: Sequence[Run], seconds: float) -> list[float]:
    """Seconds of the fastest call of each, which take turns of a few calls until the time is over."""
    best, number, end = [float("inf")] * len(runs), 0, time.perf_counter() + seconds
    while time.perf_counter() < end or number < 8:
        for which, run in enumerate(runs):
            for i in range(4):
                start = time.perf_counter()
                run(number + i)
                best[which] = min(best[which], time.perf_counter() - start)
        number += 4
    return best


def measure(isa: InstructionSet, kind: str, shape: tuple[int, int, int, int], threads: int, seconds: float) -> Row:
    """One row. `shape` is m, n, k and the active rows, which only linears know: the others compute every row."""
    m, n, k, active = shape
    makers = dict.fromkeys(ATTENTION, attend) | dict.fromkeys(CHUNKS, attend_chunk) | {GATE: decide}
    if kind in makers:
        run, size = makers[kind](kind, isa, m, n, k)
    else:
        run, size = linear(kind, isa, m, n, k, active)
    read, read_size = reader(isa)
    taken, reading = least([run, read], seconds)
    speed = size / taken
    share = speed / (read_size / reading)
    work = products(kind, m if kind in makers else active, n, k)
    return Row(kind, isa.name, m, active, n, k, threads, taken * 1e3, speed / 1e9, share, work / taken / 1e9)


def numbers(text: str) -> list[int]:
    """ "1,4" -> [1, 4]."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2048x5504,5504x2048", help="n x k of the weights; context x width")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 64], help="activation rows; batch")
    parser.add_argument("--active", type=numbers, help="rows of a linear's x that are not zero; default: all")
    parser.add_argument("--isa", help="names; default: the best one of this CPU")
    parser.add_argument("--kernels", default=",".join(KINDS), help=f"also {', '.join([*ATTENTION, *CHUNKS, GATE])}")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--seconds", type=float, default=2.0, help="per row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sets = [instruction_set(name) for name in options.isa.split(",")] if options.isa else [host_instruction_set()]
    if lacking := [isa.name for isa in sets if not isa.flags <= cpu_flags()]:
        able = ", ".join(isa.name for isa in INSTRUCTION_SETS if isa.flags <= cpu_flags())
        parser.error(f"this CPU does not run {', '.join(lacking)}; it runs {able}")
    use_threads(options.threads)
    rows = []
    for isa in sets:
        for kind in options.kernels.split(","):
            for size in options.sizes.split(","):
                n, k = map(int, size.split("x"))
                for m, active in [(all_, c) for all_ in options.rows for c in options.active or [all_] if c <= all_]:
                    rows.append(row := measure(isa, kind, (m, n, k, active), options.threads, options.seconds))
                    text = f"{row.ms:8.3f} ms {row.gb_per_s:6.1f} GB/s {row.share:6.1%} {row.gmac_per_s:7.1f} GMAC/s"
                    print(f"{kind} {isa.name} m={m} active={active} {size}: {text}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
