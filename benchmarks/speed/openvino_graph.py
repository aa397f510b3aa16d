"""The Llama step as optimum-intel exports it: a stateful model."""

# pyright: reportMissingImports=false
# The extra "bench" installs the peers.

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo

from speed.base import NORM_EPSILON
from speed.sizes import Sizes
from speed.weights import Weights, rope_tables


class StatefulStep:
    """Builds the decode step. Keys and values are variables, so that the plugin keeps them in place."""

    def __init__(self, weights: Weights, sizes: Sizes, prompt: bool) -> None:
        self._weights, self._sizes, self._prompt, self._assigns = weights, sizes, prompt, []
        self._beam = op.parameter([-1], np.int32, name="beam")

    def model(self) -> Any:
        """Return the model: token int64 [B, T], position int64 [1, T], beam int32 [B] -> logits [B, V]."""
        token, position = (op.parameter([n, -1], np.int64, name=m) for n, m in ((-1, "token"), (1, "position")))
        self._batch = op.gather(op.shape_of(token), op.constant([0]), op.constant(0))
        rope = []
        for t in rope_tables(self._sizes, self._sizes.table_length):
            rows = op.gather(op.constant(t.repeat(1, 2).numpy()), position, op.constant(0))
            rope.append(op.unsqueeze(rows, op.constant(1)))
        x = op.gather(self._constant("model.embed_tokens.weight"), token, op.constant(0))
        for i in range(self._sizes.layers):
            x = op.add(x, self._attention(i, x, rope))
            x = op.add(x, self._mlp(i, x))
        x = op.gather(x, op.constant(-1), op.constant(1))
        logits = self._linear(self._norm(x, "model.norm.weight"), "lm_head.weight")
        model: Any = ov.Model  # pyright finds no constructor of the class that it wraps
        return model([op.result(logits)], self._assigns, [token, position, self._beam], "step")

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
        y = op.scaled_dot_product_attention(q, keys, values, causal=self._prompt)
        y = op.transpose(y, op.constant([0, 2, 1, 3]))
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
        info.data_shape = ov.PartialShape([-1, self._sizes.groups, -1, self._sizes.head_dim])
        info.data_type, info.variable_id = ov.Type.f32, name
        variable = Variable(info)
        shape = op.concat([self._batch, op.constant([self._sizes.groups, 0, self._sizes.head_dim])], 0)
        empty = op.broadcast(op.constant(np.float32(0)), shape)
        past = op.gather(op.read_value(empty, variable), self._beam, op.constant(0))
        joined = op.concat([past, new], 2)
        self._assigns.append(op.assign(joined, variable))
        return joined

    def _mlp(self, i: int, x: Any) -> Any:
        at = f"model.layers.{i}"
        h = self._norm(x, f"{at}.post_attention_layernorm.weight")
        gate, up = (self._linear(h, f"{at}.mlp.{n}_proj.weight") for n in ("gate", "up"))
        return self._linear(op.multiply(op.swish(gate), up), f"{at}.mlp.down_proj.weight")
