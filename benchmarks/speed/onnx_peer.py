"""onnxruntime: the step of `onnx_graph.py` through IOBinding, with keys and values in place."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort

from speed.base import Engine, cache_elements, cache_names
from speed.sizes import Job, Traffic


class OnnxRuntime(Engine):
    """CPU execution provider, all graph optimisations, `threads` intra-op threads that spin within a step."""

    package = "onnxruntime"
    notes = "GroupQueryAttention with past and present in one buffer, IOBinding, fused qkv and gate/up"

    @staticmethod
    def prepare(job: Job) -> None:
        """Quantise the weights and write the model."""
        from speed.onnx_graph import LINEARS, write_model
        from speed.weights import Weights

        folder = Path(job.folder)
        sizes = write_model(folder, Weights(job.checkpoint), job.sizes, LINEARS[job.precision])
        (folder / "bytes.json").write_text(json.dumps(sizes))

    def __init__(self, job: Job) -> None:
        self._job, sizes = job, job.sizes
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = sizes.threads, 1
        model = str(Path(job.folder) / "model.onnx")
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._token = ort.OrtValue.ortvalue_from_numpy(np.zeros((job.batch, 1), np.int64))
        self._last = ort.OrtValue.ortvalue_from_numpy(np.zeros(job.batch, np.int32))
        self._total = ort.OrtValue.ortvalue_from_numpy(np.zeros((), np.int32))
        self._logits = ort.OrtValue.ortvalue_from_numpy(np.zeros((job.batch, sizes.vocab), np.float32))
        shape = (job.batch, sizes.groups, sizes.cache_length, sizes.head_dim)
        names = zip(cache_names("past", sizes), cache_names("present", sizes), strict=True)
        self._binding = self._session.io_binding()
        for name, value in (("token", self._token), ("last", self._last), ("total", self._total)):
            self._binding.bind_ortvalue_input(name, value)
        self._caches = []
        for past, present in names:
            cache = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
            self._caches.append(cache)
            self._binding.bind_ortvalue_input(past, cache)
            self._binding.bind_ortvalue_output(present, cache)
        self._binding.bind_ortvalue_output("head.y", self._logits)

    def rewind(self, position: int) -> None:
        """Do nothing: the position is an input."""

    def step(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Decode tokens and return the last one's logits."""
        if tokens.shape != tuple(self._token.shape()):
            self._token = ort.OrtValue.ortvalue_from_numpy(tokens)
            self._binding.bind_ortvalue_input("token", self._token)
        last = position + tokens.shape[1] - 1
        self._token.update_inplace(tokens)
        self._last.update_inplace(np.full(len(tokens), last, np.int32))
        self._total.update_inplace(np.array(last + 1, np.int32))
        self._session.run_with_iobinding(self._binding)
        return self._logits.numpy()

    def traffic(self) -> Traffic:
        """Return the bytes of the model's constants without the embedding, and of the filled float32 cache."""
        sizes: dict[str, int] = json.loads((Path(self._job.folder) / "bytes.json").read_text())
        mlp = sum(v for k, v in sizes.items() if ".gate_up." in k or ".down." in k)
        other = sum(v for k, v in sizes.items() if k not in ("embedding", "cos", "sin")) - mlp
        return Traffic(other, mlp, cache_elements(self._job) * 4)
