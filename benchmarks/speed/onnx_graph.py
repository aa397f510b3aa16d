"""The Llama step as onnxruntime's model builder writes it: fused norms, GroupQueryAttention over shared buffers.

Products are MatMul (float32), DynamicQuantizeLinear + MatMulInteger as `quantize_dynamic` writes them (int8), or
MatMulNBits (4 or 8 bits in blocks, accuracy_level 4: int8 arithmetic).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from speed.base import NORM_EPSILON, cache_names
from speed.sizes import Sizes
from speed.weights import Weights, rope_tables

_PAGE = 4096
MICROSOFT = "com.microsoft"


class GraphWriter:
    """Nodes in memory, and weights in a file beside the model. Each weight starts on a page, so that it is mapped."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[Any] = []
        self._folder, self._initializers = folder, []
        self._data = (folder / "weights.bin").open("wb")
        self.bytes: dict[str, int] = {}

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add an initializer and return its name."""
        value = np.ascontiguousarray(value)
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(value.dtype), dims=value.shape)
        self._data.seek(-(-self._data.tell() // _PAGE) * _PAGE)
        tensor.data_location = TensorProto.EXTERNAL
        for key, entry in (("location", "weights.bin"), ("offset", self._data.tell()), ("length", value.nbytes)):
            tensor.external_data.add(key=key, value=str(entry))
        self._data.write(value.data)
        self._initializers.append(tensor)
        self.bytes[name] = value.nbytes
        return name

    def numbers(self, name: str, *values: int) -> str:
        """Add int64 numbers that shape inference reads, and return their name."""
        value = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
        return self.node("Constant", [], [name], value=value)

    def node(self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        """Add a node and return its first output."""
        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def save(self, inputs: list[Any], outputs: list[Any]) -> None:
        """Write model.onnx."""
        self._data.close()
        graph = helper.make_graph(self.nodes, "step", inputs, outputs, initializer=self._initializers)
        imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), self._folder / "model.onnx")


Linear = Callable[[GraphWriter, str, str, np.ndarray], str]
"""(writer, input, name, weight float32 [N, K]) -> output."""


def float_linear(w: GraphWriter, x: str, name: str, weight: np.ndarray) -> str:
    """Add a MatMul and return its output."""
    return w.node("MatMul", [x, w.constant(f"{name}.weight", weight.T)], [f"{name}.y"])


def integer_linear(w: GraphWriter, x: str, name: str, weight: np.ndarray) -> str:
    """Add a linear of int8 weights per channel. onnxruntime fuses scales and cast into the product."""
    scale = np.maximum(np.abs(weight).max(1), 1e-12) / 127
    quantized = np.clip(np.rint(weight / scale[:, None]), -127, 127).astype(np.int8)
    q = [f"{name}.{part}" for part in ("q", "xs", "xz")]
    w.node("DynamicQuantizeLinear", [x], q)
    zero = w.constant(f"{name}.zero", np.zeros(len(scale), np.int8))
    stored = w.constant(f"{name}.weight", quantized.T)
    product = w.node("MatMulInteger", [q[0], stored, q[2], zero], [f"{name}.i"])
    scales = w.node("Mul", [q[1], w.constant(f"{name}.scale", scale.astype(np.float32))], [f"{name}.s"])
    cast = w.node("Cast", [product], [f"{name}.f"], to=TensorProto.FLOAT)
    return w.node("Mul", [cast, scales], [f"{name}.y"])


def block_linear(bits: int, block: int) -> Linear:
    """Return a builder of MatMulNBits: symmetric blocks along the reduction, float32 scales, default zero point."""

    def linear(w: GraphWriter, x: str, name: str, weight: np.ndarray) -> str:
        n, k = weight.shape
        count, zero = -(-k // block), 1 << (bits - 1)
        blocks = np.pad(weight, [(0, 0), (0, count * block - k)]).reshape(n, count, block)
        extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(2)[..., None], 2)
        scale = np.where(extreme == 0, 1, extreme / -zero).astype(np.float32)
        q = np.clip(np.rint(blocks / scale) + zero, 0, 2 * zero - 1).astype(np.uint8)
        packed = q if bits == 8 else q[..., ::2] | q[..., 1::2] << 4
        stored = [w.constant(f"{name}.weight", packed), w.constant(f"{name}.scale", scale.reshape(n, count))]
        sizes = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": 4}
        return w.node("MatMulNBits", [x, *stored], [f"{name}.y"], MICROSOFT, **sizes)

    return linear


LINEARS: dict[str, Linear] = {
    "float32": float_linear,
    "int8": integer_linear,
    "int8 blocks": block_linear(8, 32),
    "int4 block 32": block_linear(4, 32),
    "int4 block 128": block_linear(4, 128),
}


def write_model(folder: Path, weights: Weights, sizes: Sizes, linear: Linear) -> dict[str, int]:
    """Write the decode step and return constant -> bytes."""
    w = GraphWriter(folder)
    cos, sin = (
        w.constant(n, t.numpy()) for n, t in zip(("cos", "sin"), rope_tables(sizes, sizes.table_length), strict=True)
    )
    hidden = w.node("Gather", [w.constant("embedding", _float(weights, "model.embed_tokens.weight")), "token"], ["h"])
    norms = [_float(weights, f"model.layers.{i}.input_layernorm.weight") for i in range(sizes.layers)]
    norms.append(_float(weights, "model.norm.weight"))
    first = w.constant("norm.0", norms[0])
    x = w.node("SimplifiedLayerNormalization", [hidden, first], ["x.0"], epsilon=NORM_EPSILON)
    decoder = _Decoder(w, weights, sizes, linear)
    for i in range(sizes.layers):
        x, hidden = _layer(decoder, i, (x, hidden, cos, sin), norms[i + 1])
    last = w.node("Constant", [], ["last_token"], value=helper.make_tensor("last_token", TensorProto.INT64, [], [-1]))
    linear(w, w.node("Gather", [x, last], ["x.last"], axis=1), "head", _float(weights, "lm_head.weight"))
    cache = ["batch", sizes.groups, "positions", sizes.head_dim]
    inputs = [helper.make_tensor_value_info("token", TensorProto.INT64, ["batch", "length"])]
    inputs += [helper.make_tensor_value_info("last", TensorProto.INT32, ["batch"])]
    inputs += [helper.make_tensor_value_info("total", TensorProto.INT32, [])]
    inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, cache) for n in cache_names("past", sizes)]
    outputs = [helper.make_tensor_value_info("head.y", TensorProto.FLOAT, ["batch", sizes.vocab])]
    outputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, cache) for n in cache_names("present", sizes)]
    w.save(inputs, outputs)
    return w.bytes


def _float(weights: Weights, *names: str) -> np.ndarray:
    return np.concatenate([weights[n].float().numpy() for n in names])


@dataclass(frozen=True)
class _Decoder:
    writer: GraphWriter
    weights: Weights
    sizes: Sizes
    linear: Linear


def _layer(decoder: _Decoder, i: int, values: tuple[str, str, str, str], next_norm: np.ndarray) -> tuple[str, str]:
    """Add one layer: (normed input, residual, cos, sin) -> (normed input of the next layer, residual)."""
    x, residual, cos, sin = values
    w, weights, sizes, linear = decoder.writer, decoder.weights, decoder.sizes, decoder.linear

    def read(*names: str) -> np.ndarray:
        return _float(weights, *(f"model.layers.{i}.{n}.weight" for n in names))

    qkv = linear(w, x, f"{i}.qkv", read("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
    past, present = ([f"{p}.{i}.{kind}" for kind in ("key", "value")] for p in ("past", "present"))
    heads = {"num_heads": sizes.heads, "kv_num_heads": sizes.groups, "do_rotary": 1, "rotary_interleaved": 0}
    parts = _normed_heads(decoder, i, qkv) if sizes.qk_norm else [qkv, "", ""]
    inputs = [*parts, *past, "last", "total", cos, sin]
    y = w.node("GroupQueryAttention", inputs, [f"{i}.attention", *present], MICROSOFT, **heads)
    y = linear(w, y, f"{i}.out", read("self_attn.o_proj"))
    x, residual = _add_norm(w, y, residual, f"{i}.mlp_norm", read("post_attention_layernorm"))
    gate_up = linear(w, x, f"{i}.gate_up", read("mlp.gate_proj", "mlp.up_proj"))
    gate, up = f"{i}.gate", f"{i}.up"
    w.node("Split", [gate_up], [gate, up], axis=-1, num_outputs=2)
    sigmoid = w.node("Sigmoid", [gate], [f"{i}.sigmoid"])
    silu = w.node("Mul", [gate, sigmoid], [f"{i}.silu"])
    y = linear(w, w.node("Mul", [silu, up], [f"{i}.product"]), f"{i}.down", read("mlp.down_proj"))
    return _add_norm(w, y, residual, f"{i}.next_norm", next_norm)


def _normed_heads(decoder: _Decoder, i: int, qkv: str) -> list[str]:
    """Split queries, keys and values, and normalise the heads of the first two, as the model builder does."""
    w, sizes = decoder.writer, decoder.sizes
    parts = [f"{i}.{name}" for name in ("q", "k", "v")]
    widths = w.numbers(f"{i}.widths", sizes.hidden, sizes.kv_size, sizes.kv_size)
    w.node("Split", [qkv, widths], parts, axis=-1)
    normed = []
    for part, name in zip(parts, ("q_norm", "k_norm"), strict=False):
        heads = w.node("Reshape", [part, w.numbers(f"{part}.heads", 0, -1, sizes.head_dim)], [f"{part}.h"])
        weight = w.constant(f"{part}.norm", _float(decoder.weights, f"model.layers.{i}.self_attn.{name}.weight"))
        y = w.node("SimplifiedLayerNormalization", [heads, weight], [f"{part}.n"], epsilon=NORM_EPSILON)
        normed.append(w.node("Reshape", [y, w.numbers(f"{part}.row", 0, 1, -1)], [f"{part}.y"]))
    return [*normed, parts[2]]


def _add_norm(w: GraphWriter, y: str, residual: str, name: str, norm: np.ndarray) -> tuple[str, str]:
    inputs, outputs = [residual, y, w.constant(name, norm)], [f"{name}.y", "", "", f"{name}.sum"]
    w.node("SkipSimplifiedLayerNormalization", inputs, outputs, MICROSOFT, epsilon=NORM_EPSILON)
    return outputs[0], outputs[3]
