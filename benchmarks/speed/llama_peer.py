"""llama.cpp through llama-cpp-python, with weights in a GGUF file."""

# pyright: reportMissingImports=false
# The extra "bench" installs the peers.

from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from speed.base import Engine, cache_elements
from speed.sizes import Job, Traffic


class LlamaCpp(Engine):
    """llama_decode with float16 keys and values and the attention that llama.cpp selects. Each row is a sequence."""

    package = "llama-cpp-python"
    notes = "built for this CPU, mmap, weights repacked by llama.cpp; float16 keys and values"

    @staticmethod
    def prepare(job: Job) -> None:
        """Write the GGUF file."""
        from speed.gguf_file import write_gguf
        from speed.weights import Weights

        kind = gguf.GGMLQuantizationType[job.precision]
        write_gguf(Path(job.folder) / "model.gguf", Weights(job.checkpoint), job.sizes, kind)

    def __init__(self, job: Job) -> None:
        self._job, self._path = job, Path(job.folder) / "model.gguf"
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(str(self._path).encode(), options)
        if not model:
            raise RuntimeError("llama.cpp cannot load the model that was written for it")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_seq_max = job.batch * job.sizes.cache_length, job.batch
        context.n_batch = max(context.n_batch, job.prompt)
        context.n_threads = context.n_threads_batch = job.sizes.threads
        opened = llama_cpp.llama_init_from_model(model, context)
        memory = llama_cpp.llama_get_memory(opened) if opened else None
        if not opened or not memory:
            raise RuntimeError(f"llama.cpp has no memory for {context.n_ctx} tokens")
        self._context, self._memory = opened, memory
        self._batch = llama_cpp.llama_batch_init(max(job.batch * job.prompt, job.sizes.context), 0, 1)
        self._filled = 0

    def _decode(self, tokens: np.ndarray) -> None:
        """Decode tokens [B, T] of sequences 0 to B - 1. Ask for the logits of the last ones."""
        batch, rows, length = self._batch, *tokens.shape
        batch.n_tokens = rows * length
        for at, (row, i) in enumerate(np.ndindex(rows, length)):
            batch.token[at], batch.pos[at] = int(tokens[row, i]), self._filled + i
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, row, i == length - 1
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code} after {self._filled} tokens")
        self._filled += length

    def rewind(self, position: int) -> None:
        """Drop the tokens from `position` on, or read a prompt up to it as the first sequence and copy that one."""
        if self._filled > position:
            llama_cpp.llama_memory_seq_rm(self._memory, -1, position, -1)
            self._filled = position
        elif self._filled < position:
            llama_cpp.llama_memory_clear(self._memory, True)
            self._filled = 0
            self._decode(np.arange(position)[None] % self._job.sizes.vocab)
            for row in range(1, self._job.batch):
                llama_cpp.llama_memory_seq_cp(self._memory, 0, row, -1, -1)

    def step(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Decode tokens after those of the memory, and return the last ones' logits."""
        self._decode(tokens)
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(len(tokens), self._job.sizes.vocab)).copy()

    def traffic(self) -> Traffic:
        """Return the bytes of the file's tensors without the embedding, and of the filled float16 cache."""
        found = {t.name: t.n_bytes for t in gguf.GGUFReader(self._path).tensors}
        mlp = sum(int(n) for name, n in found.items() if ".ffn_" in name and "norm" not in name)
        total = sum(int(n) for name, n in found.items() if name != "token_embd.weight")
        return Traffic(total - mlp, mlp, cache_elements(self._job) * 2)
