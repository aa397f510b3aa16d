"""Read bandwidth of this process: a sum over a buffer much larger than the caches, on all threads."""

# pyright: reportInvalidTypeForm=false, reportMissingModuleSource=false
# TVMScript annotates buffers with calls; tvm.script.tirx is made when tvm is imported.

import time

import numpy as np
import tvm
from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.isa import NATIVE, instruction_sets
from fastcar_compile.codegen.tvm.target import host_target

READ_BYTES = 1 << 28
_STREAM = 256
"""Bytes of one loop body: four registers of 64 bytes."""


def _read_kernel(size: int, parts: int) -> object:
    """Return a kernel in which each of `parts` threads sums its own part of x, int32: y int32 [parts, 64]."""
    words = _STREAM // 4
    stretch = size // 4 // parts

    @T.prim_func(s_tir=True)
    # TVM parses the signature of a TVMScript function; it holds no Python types
    def read(x: T.Buffer((parts, stretch), "int32"), y: T.Buffer((parts, words), "int32")):
        T.func_attr({"tir.noalias": True, "global_symbol": "read"})
        for p in T.parallel(parts):
            with T.sblock("stretch"):
                T.reads(x[0:parts, 0:stretch])
                T.writes(y[0:parts, 0:words])
                acc = T.alloc_buffer((words,), "int32", scope="local")
                # p: threads; i: blocks of 256 bytes; u: four accumulators, unrolled; v: lanes of one register
                for u in T.unroll(4):
                    for v in T.vectorized(16):
                        acc[u * 16 + v] = 0
                for i in range(stretch // words):
                    for u in T.unroll(4):
                        for v in T.vectorized(16):
                            acc[u * 16 + v] += x[p, i * words + u * 16 + v]
                for u in T.unroll(4):
                    for v in T.vectorized(16):
                        y[p, u * 16 + v] = acc[u * 16 + v]

    return read


class ReadBandwidth:
    """Reads `size` bytes per call through TVM's thread pool, by vectors of `host_cpu`. Configure the pool before."""

    def __init__(self, threads: int, size: int = READ_BYTES, host_cpu: str = NATIVE) -> None:
        self._size = size
        module, target = tvm.IRModule({"read": _read_kernel(size, threads)}), host_target(*instruction_sets([host_cpu]))
        self._run = tvm.compile(module, target=target)["read"]
        memory = np.ones(size // 4 + 16, np.int32)
        begin = -(memory.ctypes.data // 4) % 16  # TVM wants 64-byte alignment
        self._x = tvm.runtime.from_dlpack(memory[begin:][: size // 4].reshape(threads, -1))
        self._y = tvm.runtime.tensor(np.zeros((threads, _STREAM // 4), np.int32))

    def gigabytes_per_second(self, repeats: int) -> list[float]:
        """Return one figure per repeat, without the first read."""
        found = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            self._run(self._x, self._y)
            found.append(self._size / (time.perf_counter() - start) / 1e9)
        if int(self._y.numpy().sum()) != self._size // 4:
            raise RuntimeError("the read kernel did not read everything")
        return found[1:]
