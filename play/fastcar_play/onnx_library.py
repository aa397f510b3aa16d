"""An ONNX model as a library for WebAssembly, such as the one that makes a world's pictures of its tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import onnx
import tvm
from tvm import relax, te
from tvm.relax.frontend.onnx import from_onnx

from fastcar_compile.codegen.tvm.build import link_standalone
from fastcar_compile.codegen.tvm.isa import InstructionSet, cross_compiler, instruction_set
from fastcar_compile.codegen.tvm.kernels.registry import dispatch
from fastcar_compile.codegen.tvm.relax_api import shape_of, tensor_type, untyped
from fastcar_compile.codegen.tvm.standalone import standalone_sources
from fastcar_compile.errors import CompileError

ENTRY = "main"
"""Name of the library's function; its arguments are the model's inputs, its results the outputs."""


def write_onnx_library(model: bytes, shapes: Mapping[str, Sequence[int]], path: Path) -> None:
    """Write the library of a model, with its weights inside.

    Args:
        model: an ONNX file without external data. shapes: of every input.

    Raises:
        CompileError: TVM has no lowering for the model.
    """
    isa = instruction_set("wasm-simd128")
    try:
        module = from_onnx(cast(Any, onnx.load_from_string(model)), shape_dict={k: list(v) for k, v in shapes.items()})
        legal = {"relax.nn.conv2d": lambda builder, call: _convolution(builder, call, isa)}
        module = relax.transform.LegalizeOps(cast(Any, legal))(module)
        sources = standalone_sources(module, isa, [ENTRY])
    except (RuntimeError, NotImplementedError, ValueError, TypeError, KeyError) as error:  # what TVM raises, or ONNX
        what = f"the ONNX model has no lowering to WebAssembly: {str(error).strip().splitlines()[0][:200]}"
        raise CompileError(what, hint="export it with operators of fixed shapes") from error
    link_standalone(sources, isa, path, cross_compiler(isa.triple, ""))


def _convolution(builder: relax.BlockBuilder, call: relax.Call, isa: InstructionSet) -> relax.Expr:
    """Return a convolution of one image as a product: each pixel's neighbourhood is a row."""
    data, weight = call.args
    attributes: Any = call.attrs
    (count, channels, high, wide), (out, _, rows, columns) = shape_of(data), shape_of(weight)
    top, left, bottom, right = (int(p) for p in attributes.padding)
    plain = [int(s) for s in (*attributes.strides, *attributes.dilation, attributes.groups)] == [1, 1, 1, 1, 1]
    if not plain or count != 1 or (high, wide) != (high + top + bottom - rows + 1, wide + left + right - columns + 1):
        raise CompileError("a convolution of the ONNX model changes the size of its image", hint="use a stride of 1")
    pixels, size, area = high * wide, channels * rows * columns, rows * columns

    def neighbourhoods(image: te.Tensor) -> Any:
        def element(i: Any, k: Any) -> Any:
            y, x = i // wide + k % area // columns - top, i % wide + k % columns - left
            inside = tvm.tirx.all(y >= 0, y < high, x >= 0, x < wide)
            return tvm.tirx.if_then_else(inside, image[0, k // area, y, x], tvm.tirx.const(0, "float32"))

        return te.compute((pixels, size), element, name="neighbourhoods")

    kernel: Any = dispatch(isa, "linear_float32", pixels, out, size)
    product = untyped.call_tir(
        builder.add_func(kernel, kernel.__name__),
        [builder.emit_te(neighbourhoods, data), builder.emit(untyped.op.reshape(weight, (out, size)))],
        tensor_type((pixels, out), "float32"),
    )
    turned = untyped.op.permute_dims(builder.emit(product), [1, 0])
    return untyped.op.reshape(builder.emit(turned), (1, out, high, wide))
