"""Which engines run, in which groups: those of a group are interleaved, so that they meet the same machine."""

from __future__ import annotations

from pathlib import Path

from fastcar_compile.config import QUANT_MODES
from speed.engines import OURS
from speed.ours import QUANT
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
"""Our precision -> (engine, precision) of the peers that it is measured with."""

LONG = (2048, 4096)
"""Cache lengths at which the time of a step must be that of the default's."""


def groups(sizes: Sizes, checkpoint: Path, folder: Path, precisions: tuple[str, ...]) -> dict[str, list[Job]]:
    """Jobs by our precision."""
    found = {}
    for precision in precisions:
        base = default_length(sizes)

        def job(
            engine: str, name: str, tag: str, variants: tuple[str, ...] = (DENSE,), *, p: str = precision, **more: int
        ) -> Job:
            place = str(folder / p / f"{engine}-{name}{tag}".replace(" ", "-"))
            return Job(engine, name, sizes, str(checkpoint), place, variants, **more)

        jobs = []
        if QUANT[precision] in QUANT_MODES:
            jobs.append(job(OURS, precision, "", (DENSE, *RATIOS), max_seq_len=base))
        if precision == "w8a8":
            jobs.append(job(OURS, precision, "-pair", PAIR, batch=2, max_seq_len=base))
        if precision == "w4a8":
            jobs += [job(OURS, precision, f"-{n}", max_seq_len=n) for n in LONG if n > base]
        jobs += [job(engine, name, "") for engine, name in PEERS[precision]]
        found[precision] = jobs
    return found


def default_length(sizes: Sizes) -> int:
    """Our max_seq_len where nothing else is said: twice the context."""
    return 2 * sizes.context
