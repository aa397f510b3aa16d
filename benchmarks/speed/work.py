"""Multiply-accumulates and bytes of a forward, and the roofline: the least time that memory and arithmetic allow."""

from collections.abc import Iterable
from dataclasses import dataclass

from speed.sizes import PREFILL, Job, Sizes, Traffic

PEAKS = {"float32": "float32", "bfloat16": "bfloat16", "w8a8": "int8", "w4a8": "int8"}
"""Our precision -> arithmetic whose peak bounds it."""


def weight_elements(sizes: Sizes) -> tuple[int, int]:
    """Return the elements of the linears outside the MLPs (with the head), and of the MLPs."""
    attention = 2 * sizes.hidden**2 + 2 * sizes.hidden * sizes.kv_size
    other = sizes.layers * attention + sizes.vocab * sizes.hidden
    return other, sizes.layers * 3 * sizes.hidden * sizes.intermediate


@dataclass(frozen=True)
class Part:
    """Bytes and multiply-accumulates of a part of a forward. Parts run one after the other."""

    bytes: float
    macs: float


def parts_of(job: Job, traffic: Traffic, replay: float, skipped: float) -> tuple[Part, Part]:
    """Return the linears with the MLPs, and attention with the replay state, of one forward of all rows.

    A prompt reads the weights once, writes its keys and values once, and computes the logits of its last token.

    Args:
        replay: share of the rows and layers that replay. skipped: share of the layers in which every row replays.
    """
    sizes, tokens, prompt = job.sizes, job.batch * job.prompt, job.workload == PREFILL
    head = sizes.vocab * sizes.hidden
    other, mlp = weight_elements(sizes)
    linears = tokens * (other - head + mlp * (1 - replay)) + job.batch * head
    # A token of a prompt sees itself and those before it. A decoded token sees the context.
    seen = (job.prompt + 1) / 2 if prompt else sizes.context
    attention = tokens * 2 * sizes.layers * sizes.hidden * seen
    cached = traffic.per_position * (job.prompt if prompt else sizes.context) + (0 if prompt else traffic.state)
    return Part(traffic.weights + traffic.mlp * (1 - skipped), linears), Part(cached, attention)


@dataclass(frozen=True)
class Roofline:
    """What this machine can do at most: gigabytes read, and billions of multiply-accumulates, per second."""

    gigabytes: float
    gigamacs: float

    def milliseconds(self, parts: Iterable[Part]) -> float:
        """Return the least time of the parts. In each, reading and multiplying overlap."""
        return sum(max(p.bytes / self.gigabytes, p.macs / self.gigamacs) for p in parts) / 1e6

    def bound_by(self, parts: Iterable[Part]) -> str:
        """Return what most of the least time goes to: "memory" or "arithmetic"."""
        both = [(p.bytes / self.gigabytes, p.macs / self.gigamacs) for p in parts]
        memory = sum(read for read, multiplied in both if read >= multiplied)
        return "memory" if memory >= sum(max(pair) for pair in both) / 2 else "arithmetic"
