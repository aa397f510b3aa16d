"""The TVM backend: one call of the VM per forward, state updated in place, weights shared without a copy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from torch import Tensor
from tvm import relax

from fastcar_compile.errors import BackendError
from fastcar_compile.ir import DecoderConfig, StateRole, StateSpec
from fastcar_compile.runtime.backends.base import Array, Backend, StepResult

_ALIGNMENT = 64
_ATTENTION_ROLES = (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def adopt(array: Array | Tensor) -> Any:
    """A TVM tensor over the array's own memory where that is aligned to 64 bytes, as the kernels want; else a copy."""
    if isinstance(array, Tensor):
        aligned = array.is_contiguous() and array.data_ptr() % _ALIGNMENT == 0
        own = array.detach()
        return tvm.runtime.from_dlpack(own if aligned else own.clone(memory_format=torch.contiguous_format))
    if array.flags.writeable and array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0:
        return tvm.runtime.from_dlpack(array)
    return tvm.runtime.tensor(np.asarray(array, order="C"))


class _Program:
    """One library and the order of its arguments."""

    def __init__(self, library: Path, spec: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        try:
            machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
        except (RuntimeError, OSError, ValueError) as error:
            raise BackendError(f"the library cannot be loaded: {error}", where=library.name) from error
        self._run = machine["run"]
        self.inputs: list[str] = spec["inputs"]
        self.outputs: list[str] = spec["outputs"]
        if lacking := [n for n in spec["params"] if n not in params]:
            raise BackendError(f"the library needs parameters that are not given: {lacking}", where=library.name)
        self._names: list[str] = spec["params"]
        self._params = [params[n] for n in self._names]

    def __call__(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        results = self._run(*[feeds[n] for n in self.inputs], *self._params)
        return dict(zip(self.outputs, results, strict=True))


class CpuBackend(Backend):
    """Decode and prefill through the artifact's TVM libraries.

    Args:
        root: the artifact's folder. programs: the manifest's `host.programs`. params: weights by name.
        state, config: of the program.
        threads: TVM threads; None: every core that the process may use. The pool is the calling thread's: of two
            backends on one thread, the one constructed last sets its size.
        decode: which of the programs is the decode step.

    Raises:
        BackendError: a library cannot be loaded, or needs a parameter that is not given.
    """

    def __init__(
        self,
        root: Path,
        programs: Mapping[str, Any],
        params: Mapping[str, Array | Tensor],
        state: Sequence[StateSpec],
        config: DecoderConfig,
        threads: int | None,
        decode: str = "decode",
    ) -> None:
        tvm.get_global_func("runtime.config_threadpool")(1, threads or usable_cores())
        tensors = {name: adopt(value) for name, value in params.items()}
        self._decode = _Program(root / programs[decode]["library"], programs[decode], tensors)
        prefill = programs.get("prefill")
        self._prefill = _Program(root / prefill["library"], prefill, tensors) if prefill else None
        self._specs, self._config = list(state), config
        self.prefill_chunk = config.prefill_chunk if self._prefill else 1
        self.reset()

    def reset(self) -> None:
        """Set every state to zero."""
        self._state = {s.name: tvm.runtime.tensor(s.zeros().numpy()) for s in self._specs}

    def prefill(self, inputs: Array, position: int) -> Array:
        """Without a prefill graph, one decode forward whose replay state is put back."""
        feeds = self._feeds(inputs, position)
        if self._prefill is not None:
            return self._prefill(feeds)["logits"].numpy()
        kept = {s.name: self._state[s.name].numpy() for s in self._specs if s.role not in _ATTENTION_ROLES}
        logits = self.decode(inputs, position, 0, np.full(self._config.num_layers, np.inf, np.float32)).logits
        self._state |= {name: tvm.runtime.tensor(value) for name, value in kept.items()}
        return logits

    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """One decode forward; see Backend.decode."""
        results = self._decode(self._feeds(inputs, position) | self._gate_feeds(step, thresholds))
        shape = (len(thresholds), inputs.shape[0])
        decisions = results["decisions"].numpy() if "decisions" in results else np.zeros(shape, bool)
        scores = results["scores"].numpy() if "scores" in results else np.zeros(shape, np.float32)
        return StepResult(results["logits"].numpy(), decisions, scores)

    def _gate_feeds(self, step: int, thresholds: Array) -> dict[str, Any]:
        return {
            "step": tvm.runtime.tensor(np.array([step], np.int64)),
            "thresholds": tvm.runtime.tensor(np.asarray(thresholds, np.float32)),
        }

    def _feeds(self, inputs: Array, position: int) -> dict[str, Any]:
        value = tvm.runtime.tensor(np.ascontiguousarray(inputs))
        return self._state | {
            "tokens": value,
            "inputs_embeds": value,
            "position": tvm.runtime.tensor(np.array([position], np.int64)),
        }
