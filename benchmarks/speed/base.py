"""The interface of an engine in the comparison."""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from speed.sizes import Job, Sizes, Traffic

ROPE_THETA = 10000.0
NORM_EPSILON = 1e-6


class Engine(ABC):
    """One engine, opened in a worker process.

    Attributes:
        package: the package whose version the row gives. notes: facts for a reader of the row.
    """

    package: ClassVar[str]
    notes: str = ""

    @staticmethod
    @abstractmethod
    def prepare(job: Job) -> None:
        """Write the engine's own files in `job.folder`. Runs in another process, which then ends."""

    @abstractmethod
    def __init__(self, job: Job) -> None: ...

    @abstractmethod
    def rewind(self, position: int) -> None:
        """Set the cache to `position` tokens. Not timed."""

    @abstractmethod
    def step(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Return the logits float32 [B, V] of the last of tokens int64 [B, T], which stand from `position` on.

        T is `job.prompt` from position 0 on, and 1 everywhere else.
        """

    @abstractmethod
    def traffic(self) -> Traffic:
        """Return the bytes of a step of all rows."""

    def select(self, variant: str, tokens: int) -> None:
        """Set up a block of `tokens` steps; engines without replay have one variant."""
        del variant, tokens

    def replayed(self) -> float:
        """Return the share of rows and layers that replayed since the last `rewind`."""
        return 0.0

    def skipped(self) -> float:
        """Return the share of layers in which every row replayed since the last `rewind`."""
        return 0.0


def cache_elements(job: Job) -> int:
    """Return the elements of keys and values of one token of every row."""
    return 2 * job.sizes.layers * job.sizes.kv_size * job.batch


def cache_names(prefix: str, sizes: Sizes) -> list[str]:
    """Return the names of a graph's caches: key and value of each layer."""
    return [f"{prefix}.{i}.{kind}" for i in range(sizes.layers) for kind in ("key", "value")]
