"""OpenVINO: a stateful model as optimum-intel makes it, with weights compressed by nncf."""

# pyright: reportMissingImports=false
# The extra "bench" installs the peers.

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo

from speed.base import NORM_EPSILON, Engine, Weights, cache_elements, rope_tables
from speed.sizes import Job, Sizes, Traffic

_WEIGHTS = {"i4": 0.5, "u4": 0.5, "i8": 1, "u8": 1, "f16": 2, "f32": 4}


class _Step:
    """Builds the decode step. Keys and values are variables, so that the plugin keeps them in place."""

    def __init__(self, weights: Weights, sizes: Sizes) -> None:
        self._weights, self._sizes, self._assigns = weights, sizes, []
        self._beam = op.parameter([1], np.int32, name="beam")

    def model(self) -> ov.Model:
        """Return the model: token int64 [1, 1], position int64 [1, 1], beam int32 [1] -> logits."""
        token, position = (op.parameter([1, 1], np.int64, name=n) for n in ("token", "position"))
        rope = []
        for t in rope_tables(self._sizes, self._sizes.cache_length):
            rows = op.gather(op.constant(t.repeat(1, 2).numpy()), position, op.constant(0))
            rope.append(op.unsqueeze(rows, op.constant(1)))
        x = op.gather(self._constant("model.embed_tokens.weight"), token, op.constant(0))
        for i in range(self._sizes.layers):
            x = op.add(x, self._attention(i, x, rope))
            x = op.add(x, self._mlp(i, x))
        logits = self._linear(self._norm(x, "model.norm.weight"), "lm_head.weight")
        return ov.Model([op.result(logits)], self._assigns, [token, position, self._beam], "step")

    def _constant(self, *names: str) -> Any:
        return op.constant(np.concatenate([self._weights[n].float().numpy() for n in names]))

    def _linear(self, x: Any, *names: str) -> Any:
        return op.matmul(x, self._constant(*names), False, True)

    def _norm(self, x: Any, name: str) -> Any:
        mean = op.reduce_mean(op.power(x, op.constant(np.float32(2))), op.constant([-1]), keep_dims=True)
        root = op.sqrt(op.add(mean, op.constant(np.float32(NORM_EPSILON))))
        return op.multiply(op.multiply(x, op.divide(op.constant(np.float32(1)), root)), self._constant(name))

    def _attention(self, i: int, x: Any, rope: list[Any]) -> Any:
        at, sizes = f"model.layers.{i}", self._sizes
        h = self._norm(x, f"{at}.input_layernorm.weight")

        def heads(name: str) -> Any:
            y = self._linear(h, f"{at}.self_attn.{name}_proj.weight")
            y = op.reshape(y, op.constant([0, 0, -1, sizes.head_dim]), True)
            if sizes.qk_norm and name != "v":
                y = self._norm(y, f"{at}.self_attn.{name}_norm.weight")
            return op.transpose(y, op.constant([0, 2, 1, 3]))

        q, k = self._rotate(heads("q"), rope), self._rotate(heads("k"), rope)
        keys, values = (self._repeated(self._cached(f"{i}.{n}", x)) for n, x in (("key", k), ("value", heads("v"))))
        y = op.transpose(op.scaled_dot_product_attention(q, keys, values), op.constant([0, 2, 1, 3]))
        return self._linear(op.reshape(y, op.constant([0, 0, sizes.hidden]), True), f"{at}.self_attn.o_proj.weight")

    def _repeated(self, x: Any) -> Any:
        """Return keys or values once for each query head, in the pattern that the plugin leaves out again."""
        sizes = self._sizes
        if sizes.groups == sizes.heads:
            return x
        each = sizes.heads // sizes.groups
        ones = op.constant(np.ones((1, 1, each, 1, 1), np.float32))
        spread = op.multiply(op.unsqueeze(x, op.constant(2)), ones)
        return op.reshape(spread, op.constant([0, sizes.heads, -1, sizes.head_dim]), True)

    def _rotate(self, x: Any, rope: list[Any]) -> Any:
        half = self._sizes.head_dim // 2
        split = op.variadic_split(x, op.constant(3), op.constant([half, half]))
        rotated = op.concat([op.multiply(split.output(1), op.constant(np.float32(-1))), split.output(0)], -1)
        return op.add(op.multiply(x, rope[0]), op.multiply(rotated, rope[1]))

    def _cached(self, name: str, new: Any) -> Any:
        info = VariableInfo()
        info.data_shape = ov.PartialShape([1, self._sizes.groups, -1, self._sizes.head_dim])
        info.data_type, info.variable_id = ov.Type.f32, name
        variable = Variable(info)
        empty = op.constant(np.zeros((1, self._sizes.groups, 0, self._sizes.head_dim), np.float32))
        past = op.gather(op.read_value(empty, variable), self._beam, op.constant(0))
        joined = op.concat([past, new], 2)
        self._assigns.append(op.assign(joined, variable))
        return joined

    def _mlp(self, i: int, x: Any) -> Any:
        at = f"model.layers.{i}"
        h = self._norm(x, f"{at}.post_attention_layernorm.weight")
        gate, up = (self._linear(h, f"{at}.mlp.{n}_proj.weight") for n in ("gate", "up"))
        return self._linear(op.multiply(op.swish(gate), up), f"{at}.mlp.down_proj.weight")


class OpenVino(Engine):
    """CPU plugin, latency hint; keys and values in the plugin's own precision."""

    package = "openvino"
    notes = "stateful SDPA, nncf.compress_weights for int8 and int4; the plugin keeps keys and values as u8"

    @staticmethod
    def prepare(job: Job) -> None:
        """Compress the weights and save the model."""
        import nncf

        modes = {"int8": nncf.CompressWeightsMode.INT8_SYM, "int4": nncf.CompressWeightsMode.INT4_SYM}
        model = _Step(Weights(job.checkpoint), job.sizes).model()
        if job.precision in modes:
            options: dict[str, Any] = {"mode": modes[job.precision]}
            if job.precision == "int4":
                options |= {"group_size": 128, "ratio": 1.0}
            model = nncf.compress_weights(model, **options)
        ov.save_model(model, str(Path(job.folder) / "step.xml"), compress_to_fp16=job.precision in modes)

    def __init__(self, job: Job) -> None:
        self._job = job
        options = {"INFERENCE_NUM_THREADS": job.sizes.threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        if job.precision == "float32":
            options["INFERENCE_PRECISION_HINT"] = "f32"
        model = ov.Core().read_model(str(Path(job.folder) / "step.xml"))
        self._traffic = _count(model, job.sizes)
        self._request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
        self._token, self._position = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
        for name, value in (("token", self._token), ("position", self._position), ("beam", np.zeros(1, np.int32))):
            self._request.set_tensor(name, ov.Tensor(value, shared_memory=True))

    def rewind(self, position: int) -> None:
        """Set the variables to `position` tokens of zeros."""
        sizes = self._job.sizes
        for state in self._request.query_state():
            state.reset()
            if position:
                state.state = ov.Tensor(np.zeros((1, sizes.groups, position, sizes.head_dim), np.float32))

    def step(self, token: int, position: int) -> np.ndarray:
        """Decode one token and return its logits."""
        self._token[:], self._position[:] = token, position
        self._request.infer()
        return self._request.get_output_tensor(0).data[0, 0]

    def traffic(self) -> Traffic:
        """Return the bytes of the saved model's constants, and one byte per element of keys and values."""
        return self._traffic


def _count(model: ov.Model, sizes: Sizes) -> Traffic:
    """Return the bytes of the weights without the embedding, which a Gather reads."""
    total = sum(
        _WEIGHTS[node.get_element_type().get_type_name()] * int(np.prod(node.get_shape()))
        for node in model.get_ops()
        if node.get_type_name() == "Constant" and node.get_element_type().get_type_name() in _WEIGHTS
    )
    return Traffic(total - sizes.vocab * sizes.hidden, 0, cache_elements(sizes))
