"""The device side of a backend: a function that opens an artifact, and the stepper that it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.errors import BackendError
from fastcar_compile.support.packages import Registry

Array = NDArray[Any]


@dataclass(frozen=True)
class StepResult:
    """One decode forward.

    Attributes:
        logits: float32 [B, 1, V], or hidden states [B, 1, H] of a headless decoder.
        decisions: bool [L, B], True where the row replayed.
        scores: float32 [L, B], the gate's score.
    """

    logits: Array
    decisions: Array
    scores: Array

    @classmethod
    def of(cls, logits: Array, decisions: Array | None, scores: Array | None, layers: int) -> StepResult:
        """Return a result; None stands for the parts that a dense decoder does not have."""
        shape = (layers, logits.shape[0])
        return cls(
            logits,
            np.zeros(shape, np.bool_) if decisions is None else decisions,
            np.zeros(shape, np.float32) if scores is None else scores,
        )


class Stepper(ABC):
    """Runs forwards and owns the state of one session. Two steppers share weights only.

    Attributes:
        prefill_chunk: tokens of one `prefill` call; 0: any number.
        single_tokens: up to this number, tokens are read faster by `prefill` calls of one token than by a padded chunk.
    """

    prefill_chunk: int = 0
    single_tokens: int = 0

    @abstractmethod
    def reset(self) -> None:
        """Set every state but the context's to zero."""

    def set_context(self, context: Array, mask: Array | None) -> None:
        """Compute the states that cross-attention reads. `reset` keeps them.

        Args:
            context: float32 [B, L, C]. mask: bool [B, L]; None: the decoder takes none.

        Raises:
            BackendError: the backend has no cross-attention.
        """
        raise BackendError(f"{type(self).__name__} has no cross-attention", hint="use the backend cpu or onnxruntime")

    @abstractmethod
    def prefill(self, inputs: Array, position: int) -> Array:
        """Write keys and values of tokens int64 [B, T] (or embeddings float32 [B, T, H]) from `position` on.

        Returns:
            logits float32 [B, T, V]. Replay state is not touched.
        """

    @abstractmethod
    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """Run one decode forward of tokens int64 [B, 1] (or embeddings float32 [B, 1, H]).

        Args:
            position: sequence position of the token. step: decode forward number t.
            thresholds: float32 [L].
        """


@dataclass(frozen=True)
class BackendOptions:
    """The options of a caller. threads: CPU threads; None: every core that the process may use."""

    threads: int | None = None


class OpenStepper(Protocol):
    """Opens an artifact on one backend."""

    def __call__(self, artifact: StoredArtifact, options: BackendOptions) -> Stepper:
        """Return a stepper whose state is zero.

        Raises:
            BackendError: the artifact has nothing for this backend, or the backend cannot run here.
        """
        ...


BACKENDS = Registry(
    "backend",
    "fastcar_compile.backends",
    {
        "cpu": "fastcar_compile.runtime.backends.cpu:open_stepper",
        "onnxruntime": "fastcar_compile.runtime.backends.ort:open_stepper",
        "hls-csim": "fastcar_compile.runtime.backends.hls_csim:open_stepper",
        "eager": "fastcar_compile.runtime.backends.eager:open_stepper",
        "board": "fastcar_compile.runtime.backends.board:open_stepper",
    },
    BackendError,
    {"onnxruntime": "onnxruntime"},
)
"""Name of a backend -> its `OpenStepper`."""
