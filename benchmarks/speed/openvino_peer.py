"""OpenVINO: a stateful model as optimum-intel makes it, with weights compressed by nncf."""

# pyright: reportMissingImports=false
# The extra "bench" installs the peers.

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from speed.base import Engine, cache_elements
from speed.sizes import PREFILL, Job, Traffic

_WEIGHTS = {"i4": 0.5, "u4": 0.5, "i8": 1, "u8": 1, "f16": 2, "f32": 4}


class OpenVino(Engine):
    """CPU plugin, latency hint; keys and values in the plugin's own precision."""

    package = "openvino"
    notes = "stateful SDPA, nncf.compress_weights for int8 and int4; the plugin keeps keys and values as u8"

    @staticmethod
    def prepare(job: Job) -> None:
        """Compress the weights and save the model."""
        import nncf

        from speed.openvino_graph import StatefulStep
        from speed.weights import Weights

        modes = {"int8": nncf.CompressWeightsMode.INT8_SYM, "int4": nncf.CompressWeightsMode.INT4_SYM}
        model = StatefulStep(Weights(job.checkpoint), job.sizes, job.workload == PREFILL).model()
        if job.precision in modes:
            options: dict[str, Any] = {"mode": modes[job.precision]}
            if job.precision == "int4":
                options |= {"group_size": 128, "ratio": 1.0}
            model = nncf.compress_weights(model, **options)
        ov.save_model(model, str(Path(job.folder) / "step.xml"), compress_to_fp16=job.precision != "float32")

    def __init__(self, job: Job) -> None:
        self._job = job
        options = {"INFERENCE_NUM_THREADS": job.sizes.threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        if job.precision == "float32":
            options["INFERENCE_PRECISION_HINT"] = "f32"
        model = ov.Core().read_model(str(Path(job.folder) / "step.xml"))
        self._traffic = _count(model, job)
        batch, length = job.batch, job.prompt
        model.reshape({"token": [batch, length], "position": [1, length], "beam": [batch]})
        self._request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
        self._token, self._position = np.zeros((batch, length), np.int64), np.zeros((1, length), np.int64)
        beam = np.arange(batch, dtype=np.int32)
        for name, value in (("token", self._token), ("position", self._position), ("beam", beam)):
            self._request.set_tensor(name, ov.Tensor(value, shared_memory=True))

    def rewind(self, position: int) -> None:
        """Set the variables to `position` tokens of zeros."""
        sizes = self._job.sizes
        shape = (self._job.batch, sizes.groups, position, sizes.head_dim)
        filled = ov.Tensor(np.zeros(shape, np.float32)) if position else None
        for state in self._request.query_state():
            state.reset()
            if filled is not None:
                state.state = filled

    def step(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Decode tokens and return the last one's logits."""
        self._token[...], self._position[0] = tokens, np.arange(position, position + tokens.shape[1])
        self._request.infer()
        return self._request.get_output_tensor(0).data

    def traffic(self) -> Traffic:
        """Return the bytes of the saved model's constants, and one byte per element of keys and values."""
        return self._traffic


def _count(model: ov.Model, job: Job) -> Traffic:
    """Return the bytes of the weights without the embedding, which a Gather reads."""
    total = sum(
        _WEIGHTS[node.get_element_type().get_type_name()] * int(np.prod(node.get_shape()))
        for node in model.get_ops()
        if node.get_type_name() == "Constant" and node.get_element_type().get_type_name() in _WEIGHTS
    )
    return Traffic(total - job.sizes.vocab * job.sizes.hidden, 0, cache_elements(job))
