"""The typed interface of the engine's top."""

from __future__ import annotations

from fastcar_compile.codegen.hls.engine_design import EngineDesign
from fastcar_compile.codegen.hls.interface import KernelInterface, KernelPort

OP_MLP, OP_LINEAR, OP_LINEAR_BIAS = 0, 1, 2
"""Values of `op`; with any other the engine reads and writes nothing."""


def engine_interface(design: EngineDesign) -> KernelInterface:
    """The engine. Argument weights_p takes section p of the call's stream.

    `inputs`, `channels`, `tile` and `tiles` describe a linear; they play no part in an MLP. `prefetch` is as for
    `mlp_interface`; a linear's weights are always read from memory.
    """
    mlp = design.mlp
    rows = mlp.spec.batch * design.max_row_words
    depth = design.max_section_words
    weights = [
        KernelPort(f"weights_{p}", "fastcar::word_t", "m_axi", f"gmem_w{p}", depth, streamed=True)
        for p in range(mlp.ports)
    ]
    sizes = [KernelPort(name, "int32_t") for name in ("inputs", "channels", "tile", "tiles")]
    return KernelInterface(
        "fastcar_engine",
        (
            *weights,
            KernelPort("x", "fastcar::word_t", "m_axi", "gmem_x", rows),
            KernelPort("cached", "fastcar::word_t", "m_axi", "gmem_y", rows),
            KernelPort("y", "fastcar::word_t", "m_axi", "gmem_y", rows, writable=True),
            KernelPort("index_register", "uint32_t"),
            KernelPort("prefetch", "uint32_t"),
            KernelPort("op", "uint32_t"),
            *sizes,
        ),
    )
