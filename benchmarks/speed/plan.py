"""Engines by group. The engines of a group alternate, so that they meet the same machine."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speed.engines import OURS
from speed.sizes import DENSE, Job, Sizes

RATIOS = ("0.5", "0.8", "0.875")
PAIR = (DENSE, "0.8")

PEERS: dict[str, tuple[tuple[str, str], ...]] = {
    "float32": (("pytorch eager", "float32"), ("torch.compile", "float32"), ("onnxruntime", "float32")),
    "bfloat16": (("pytorch eager", "bfloat16"), ("torch.compile", "bfloat16")),
    "w8a8": (("onnxruntime", "int8"), ("onnxruntime", "int8 blocks"), ("openvino", "int8"), ("llama.cpp", "Q8_0")),
    "w4a8": (
        ("onnxruntime", "int4 block 32"),
        ("onnxruntime", "int4 block 128"),
        ("openvino", "int4"),
        ("llama.cpp", "Q4_0"),
    ),
}
"""Our precision -> (engine, precision) of its peers."""

KV = {"float32": "float32", "bfloat16": "float16", "w8a8": "int8", "w4a8": "int8"}
"""Our precision -> KV type: no wider than the weights, or int8 for int4 weights."""

PEER_KV = {
    ("pytorch eager", "float32"): "float32",
    ("torch.compile", "float32"): "float32",
    ("pytorch eager", "bfloat16"): "bfloat16",
    ("torch.compile", "bfloat16"): "bfloat16",
    ("onnxruntime", "float32"): "float32",
    ("onnxruntime", "int8"): "float32",
    ("onnxruntime", "int8 blocks"): "float32",
    ("onnxruntime", "int4 block 32"): "float32",
    ("onnxruntime", "int4 block 128"): "float32",
    ("openvino", "int8"): "u8",
    ("openvino", "int4"): "u8",
    ("llama.cpp", "Q8_0"): "float16",
    ("llama.cpp", "Q4_0"): "float16",
}
"""(engine, precision) -> KV type: the engine's default."""

WIDE = "w4a8"
"""Our precision that is also measured with float16 keys and values."""

WINDOW = 256
PAIRED = ("w8a8", "w4a8")
"""Our precisions that are also measured with a coupled pair of rows."""

LONG = (2048, 4096)
"""Cache lengths at which a step must take the time of the default length."""


@dataclass(frozen=True)
class Plan:
    """A run of the benchmark.

    Args:
        checkpoint: folder of the weights. folder: of the engines' files.
        extras: also float16 keys and values, longer contexts and longer caches.
    """

    sizes: Sizes
    checkpoint: Path
    folder: Path
    extras: bool = True

    def jobs(self, precision: str) -> list[Job]:
        """Return the group of one of our precisions: our engine and its peers."""
        base, ours = 2 * self.sizes.context, OURS
        jobs = [self._job(precision, ours, precision, "", (DENSE, *RATIOS), max_seq_len=base)]
        if self.extras and precision == WIDE:
            jobs.append(self._job(precision, ours, precision, "-kv16", PAIR, max_seq_len=base, kv="float16"))
        if precision in PAIRED:
            jobs.append(self._job(precision, ours, precision, "-pair", PAIR, batch=2, coupled=True, max_seq_len=base))
        if self.extras and precision == "w8a8":
            jobs += self._far(precision)
        if self.extras and precision == "w4a8":
            jobs += [self._job(precision, ours, precision, f"-{n}", max_seq_len=n) for n in LONG if n > base]
        return jobs + [self._job(precision, engine, name, "") for engine, name in PEERS[precision]]

    def _far(self, precision: str) -> list[Job]:
        """Return jobs at four times the context, with attention to all of it and to a window."""
        far = replace(self.sizes, context=4 * self.sizes.context)
        length = far.context + far.tokens_per_frame
        whole = self._job(precision, OURS, precision, "-far", max_seq_len=length)
        window = self._job(
            precision, OURS, precision, "-window", (DENSE, RATIOS[-1]), max_seq_len=length, window=WINDOW
        )
        return [replace(job, sizes=far) for job in (whole, window)]

    def _job(
        self, group: str, engine: str, name: str, tag: str, variants: tuple[str, ...] = (DENSE,), **more: Any
    ) -> Job:
        more = {"kv": KV[name], "chunk": 1, **more} if engine == OURS else {"kv": PEER_KV[engine, name], **more}
        place = self.folder / group / f"{engine}-{name}{tag}".replace(" ", "-")
        return Job(engine, name, self.sizes, str(self.checkpoint), str(place), variants, **more)
