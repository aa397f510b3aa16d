"""Groups of the workloads "batch" and "prefill": one precision and one size each, our engine and its peers."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speed.engines import OURS
from speed.plan import KV, PEER_KV, PEERS
from speed.sizes import BATCH, DENSE, PREFILL, Job, Sizes
from speed.work import weight_elements

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPTS = (256, 512, 2048)
LAYERS = 8
"""Fewer than for one video, so that the engines of a group fit into memory together."""

RATIOS = ("0.5", "0.8")
COUPLED = (2, 8, 32)
"""Batches that are measured with coupled pairs too. Each takes an artifact of its own."""

CHUNK = 256
"""Tokens of our prefill graph."""

BATCH_PEERS: dict[str, tuple[tuple[str, str], ...]] = {
    **PEERS,
    "float32": (*PEERS["float32"], ("openvino", "float32")),
    "bfloat16": (*PEERS["bfloat16"], ("openvino", "bfloat16")),
    "w8a8": (("onnxruntime", "int8"), ("openvino", "int8"), ("llama.cpp", "Q8_0")),
    "w4a8": (("onnxruntime", "int4 block 128"), ("openvino", "int4"), ("llama.cpp", "Q4_0")),
}
"""Our precision -> (engine, precision) of its peers. OpenVINO's float types count here too, because arithmetic does.
Of onnxruntime's integer forms the one that is faster with several rows stands here."""

_MORE_KV = {
    ("openvino", "float32"): "u8",
    ("openvino", "bfloat16"): "u8",
}
_KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1.04, "u8": 1}
_WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "w8a8": 1.05, "w4a8": 0.6}
_AS_STORED = (OURS, "pytorch eager")
"""Engines that hold the weights once. The others may hold them as stored and packed for their kernels."""

_PROCESS = 0.7e9
"""Bytes of a process with its libraries and working memory."""


@dataclass(frozen=True)
class Size:
    """One size of a workload: rows of a batch, or tokens of a prompt."""

    workload: str
    number: int

    @property
    def rounds(self) -> int:
        """Rounds of blocks: fewer where a block takes seconds."""
        return 2 if self.number >= 2048 else 3


@dataclass(frozen=True)
class BatchPlan:
    """A run.

    Args:
        checkpoint: folder of the weights. folder: of the engines' files.
        rounds: of blocks; 0: those of the size. chunk: tokens of our prefill graph. host_cpu: as in `Job`.
    """

    sizes: Sizes
    checkpoint: Path
    folder: Path
    rounds: int = 0
    chunk: int = CHUNK
    host_cpu: str = "native"

    def jobs(self, precision: str, size: Size) -> list[Job]:
        """Return the group of one precision and size."""
        mine = [self._ours(precision, size)]
        if size.workload == BATCH and size.number in COUPLED:
            mine.append(self._ours(precision, size, coupled=True))
        return mine + [self._peer(precision, size, engine, name) for engine, name in BATCH_PEERS[precision]]

    def _sizes(self, size: Size) -> Sizes:
        rounds = self.rounds or size.rounds
        if size.workload == PREFILL:
            return replace(self.sizes, context=size.number, rounds=rounds, samples=1, group=1, warm_up=0)
        return replace(self.sizes, rounds=rounds, samples=2 if size.number <= 4 else 1, warm_up=2)

    def _ours(self, precision: str, size: Size, coupled: bool = False) -> Job:
        prefill = size.workload == PREFILL
        rows = 1 if prefill else size.number
        # One artifact serves a batch of one and all prompts: only there is a prefill graph compiled.
        chunk = min(self.chunk, size.number) if prefill else (self.chunk if rows == 1 else 1)
        variants = (DENSE,) if prefill else (RATIOS[-1],) if coupled else (DENSE, *RATIOS)
        length = self._sizes(size).table_length if rows == 1 else 2 * self.sizes.context
        name = f"ours-{rows}{'-coupled' if coupled else ''}-{chunk}"
        more: dict[str, Any] = {"kv": KV[precision], "chunk": chunk, "max_seq_len": length, "coupled": coupled}
        more["host_cpu"] = self.host_cpu
        return self._job(precision, size, OURS, precision, name, variants=variants, **more)

    def _peer(self, group: str, size: Size, engine: str, name: str) -> Job:
        causal = f"-{size.workload}" if engine == "openvino" else ""  # its model of a prompt has a causal mask
        kv = {**PEER_KV, **_MORE_KV}[engine, name]
        return self._job(group, size, engine, name, f"{engine}-{name}{causal}".replace(" ", "-"), kv=kv)

    def _job(self, group: str, size: Size, engine: str, name: str, folder: str, **more: Any) -> Job:
        prefill = size.workload == PREFILL
        more |= {"workload": size.workload, "batch": 1 if prefill else size.number}
        more |= {"prompt": size.number if prefill else 1}
        place = str(self.folder / group / folder)
        return Job(engine, name, self._sizes(size), str(self.checkpoint), place, **more)


def memory_of(group: str, job: Job) -> float:
    """Return an upper estimate of the bytes of an opened engine. `group`: our precision."""
    rows = job.batch * job.sizes.cache_length
    cache = 2 * job.sizes.layers * job.sizes.kv_size * rows * _KV_BYTES[job.kv]
    replay = (
        job.batch * job.sizes.tokens_per_frame * job.sizes.layers * job.sizes.hidden * 4 if job.engine == OURS else 0
    )
    copies = 1 if job.engine in _AS_STORED else 2
    return _PROCESS + copies * sum(weight_elements(job.sizes)) * _WEIGHT_BYTES[group] + cache + replay


def together(group: str, jobs: list[Job], memory: float) -> list[list[Job]]:
    """Return the jobs in parts that fit into `memory` bytes. Every part has our dense step, the first also replay."""
    ours = [job for job in jobs if job.engine == OURS]
    parts = [ours]
    left = memory - sum(memory_of(group, job) for job in ours)
    for job in jobs[len(ours) :]:
        needed = memory_of(group, job)
        if needed > left:
            parts.append([replace(ours[0], variants=(DENSE,))])
            left = memory - memory_of(group, ours[0])
        parts[-1] = [*parts[-1], job]
        left -= needed
    return parts
