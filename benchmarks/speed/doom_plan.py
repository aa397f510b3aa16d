"""The engines that benchmarks/doom.py compares: ours by precision and KV type, and peers, all in one group."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speed.engines import OURS
from speed.plan import PEER_KV
from speed.sizes import DENSE, PLAY, Job, Sizes

ALL = "1"
RATIOS = ("0.8", ALL)
"""Shares of replayed layers. All of them is the most that replay can gain."""

SESSION = 64
"""Frames that our artifacts can decode after the context."""

OWN = (("float32", "float32"), ("w8a8", "float32"), ("w8a8", "float16"), ("w8a8", "int8"), ("w4a8", "float16"))
"""Our precisions and KV types."""

PEERS = (
    ("pytorch eager", "float32"),
    ("torch.compile", "float32"),
    ("onnxruntime", "float32"),
    ("onnxruntime", "int8"),
    ("onnxruntime", "int8 blocks"),
    ("onnxruntime", "int4 block 32"),
    ("openvino", "float32"),
    ("openvino", "int8"),
    ("openvino", "int4"),
)

_PEER_KV = {**PEER_KV, ("openvino", "float32"): "u8"}

BITS = {"float32": 32, "w8a8": 8, "int8": 8, "int8 blocks": 8, "w4a8": 4, "int4": 4, "int4 block 32": 4}
"""Precision -> bits of a weight: what is compared with what."""


def sizes_of(decoder: Path, frames: int, threads: int, rounds: int) -> Sizes:
    """Return the shape of a decoder in a Hugging Face folder. A sample is one frame, the last of `frames` frames."""
    config = json.loads((decoder / "config.json").read_text("utf-8"))
    return Sizes(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        vocab=config["vocab_size"],
        context=frames * config["tokens_per_frame"],
        tokens_per_frame=config["tokens_per_frame"],
        threads=threads,
        rounds=rounds,
        samples=1,
        group=config["tokens_per_frame"],
        head_dim=config["head_dim"],
        kv_heads=config["num_key_value_heads"],
        qk_norm=True,
    )


@dataclass(frozen=True)
class DoomPlan:
    """A run.

    Args:
        checkpoint: folder of the decoder. contexts: file of real tokens. folder: of the engines' files.
        gate, thresholds: of the replay that "play" measures; no thresholds: it is left out.
    """

    sizes: Sizes
    checkpoint: Path
    contexts: Path
    folder: Path
    gate: str
    thresholds: tuple[float, ...]

    def jobs(self, own: tuple[tuple[str, str], ...] = OWN, peers: tuple[tuple[str, str], ...] = PEERS) -> list[Job]:
        """Return the group of all engines."""
        variants = (DENSE, *RATIOS, *([PLAY] if self.thresholds else []))
        length = self.sizes.context + SESSION * self.sizes.tokens_per_frame
        mine: dict[str, Any] = {
            "chunk": 1,
            "contexts": str(self.contexts),
            "gate": self.gate,
            "thresholds": self.thresholds,
        }
        jobs = [self._job(OURS, name, kv, variants, max_seq_len=length, **mine) for name, kv in own]
        return jobs + [self._job(engine, name, _PEER_KV[engine, name], (DENSE,)) for engine, name in peers]

    def _job(self, engine: str, name: str, kv: str, variants: tuple[str, ...], **more: Any) -> Job:
        place = self.folder / f"{engine}-{name}-{kv}".replace(" ", "-")
        return Job(engine, name, self.sizes, str(self.checkpoint), str(place), variants, kv=kv, **more)
