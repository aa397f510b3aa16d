"""The TVM backend: one call of the VM per forward, state updated in place, weights shared without a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from torch import Tensor
from tvm import relax

from fastcar_compile.artifact.tensor_files import ALIGNMENT
from fastcar_compile.errors import BackendError
from fastcar_compile.ir.program import DecoderConfig, StateRole, StateSpec
from fastcar_compile.parallel import usable_cores
from fastcar_compile.runtime.backends.base import Array, Backend, StepResult
from fastcar_compile.runtime.state import StateArena
from fastcar_compile.runtime.threads import use_threads

_ATTENTION_ROLES = (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)


def adopt(array: Array | Tensor) -> Any:
    """A TVM tensor over the array's own memory where that is aligned to 64 bytes, as the kernels want; else a copy."""
    if isinstance(array, Tensor):
        aligned = array.is_contiguous() and array.data_ptr() % ALIGNMENT == 0
        own = array.detach()
        return tvm.runtime.from_dlpack(own if aligned else own.clone(memory_format=torch.contiguous_format))
    if array.flags.writeable and array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return tvm.runtime.from_dlpack(array)
    return tvm.runtime.tensor(np.asarray(array, order="C"))


class _Program:
    """One library with its arguments in place: every call hands over the same list.

    Args:
        known: inputs and parameters by name; the library keeps those that it takes.

    Attributes:
        names, arguments: what the library takes, in its order.
    """

    def __init__(self, library: Path, spec: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        try:
            machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
        except (RuntimeError, OSError, ValueError) as error:
            raise BackendError(f"the library cannot be loaded: {error}", where=library.name) from error
        if lacking := [n for n in spec["params"] if n not in known]:
            raise BackendError(f"the library needs parameters that are not given: {lacking}", where=library.name)
        self._run = machine["run"]
        self._places = {name: i for i, name in enumerate(spec["outputs"])}
        self.names = (*spec["inputs"], *spec["params"])
        self.arguments = [known[n] for n in self.names]
        _check(machine, self.arguments, library)

    def __call__(self, *names: str) -> list[Array | None]:
        """Runs it; the results of these names (None: it has no such result).

        They are views of the VM's memory, which it uses again once they are gone.
        """
        results = self._run(*self.arguments)
        return [np.from_dlpack(results[self._places[n]]) if n in self._places else None for n in names]


def _check(machine: Any, arguments: Sequence[Any], library: Path) -> None:
    """Once is enough for arguments that stay. Libraries of earlier versions check in every step."""
    try:
        check = machine["check"]
    except AttributeError:
        return
    try:
        check(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BackendError(f"the library does not take these arguments: {error}", where=library.name) from error


class _Feeds:
    """Inputs that change from call to call, in memory that does not.

    Attributes:
        arrays: name -> array to write to. tensors: name -> the same memory for TVM.
    """

    def __init__(self, config: DecoderConfig, length: int) -> None:
        shape = (config.batch_size, length)
        blank = {
            "tokens": torch.zeros(shape, dtype=torch.int64),
            "position": torch.zeros(1, dtype=torch.int64),
            "step": torch.zeros(1, dtype=torch.int64),
            "thresholds": torch.zeros(config.num_layers),
        }
        if config.takes_embeddings:
            blank["inputs_embeds"] = torch.zeros(*shape, config.hidden_size)
        self.arrays = {name: tensor.numpy() for name, tensor in blank.items()}
        self.tensors = {name: adopt(tensor) for name, tensor in blank.items()}
        self._inputs = self.arrays[config.input_name]

    def set(self, inputs: Array, position: int) -> None:
        self._inputs[...] = inputs
        self.arrays["position"][0] = position


class CpuBackend(Backend):
    """Decode and prefill through the artifact's TVM libraries.

    Nothing is allocated per step: inputs, state and weights stay where they are, and the VM's buffers come from a pool.

    Args:
        root: the artifact's folder. programs: the manifest's `host.programs`. params: weights by name.
        state, config: of the program.
        threads: TVM threads; None: every core that the process may use.
        decode: which of the programs is the decode step.

    Raises:
        BackendError: a library cannot be loaded, or needs a parameter that is not given; or more threads than TVM's
            pool can have.
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
        self._threads = threads or usable_cores()
        use_threads(self._threads)
        self._state = StateArena(state)
        known = {name: adopt(value) for name, value in params.items()}
        known |= {name: adopt(value) for name, value in self._state.tensors.items()}
        self._step = _Feeds(config, 1)
        self._decode = _Program(root / programs[decode]["library"], programs[decode], known | self._step.tensors)
        self._chunk, self._prefill = _Feeds(config, config.prefill_chunk), None
        if prefill := programs.get("prefill"):
            self._prefill = _Program(root / prefill["library"], prefill, known | self._chunk.tensors)
        self._config = config
        self.prefill_chunk = config.prefill_chunk if self._prefill else 1

    def reset(self) -> None:
        """Set every state to zero."""
        self._state.clear()

    def prefill(self, inputs: Array, position: int) -> Array:
        """Without a prefill graph, one decode forward, number 0, whose replay state is put back: that of slot 0."""
        if self._prefill is None:
            with self._state.kept((r for r in StateRole if r not in _ATTENTION_ROLES), slot=0):
                return self.decode(inputs, position, 0, np.full(self._config.num_layers, np.inf, np.float32)).logits
        use_threads(self._threads)
        self._chunk.set(inputs, position)
        (logits,) = self._prefill("logits")
        assert logits is not None
        return logits

    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """One decode forward; see Backend.decode."""
        use_threads(self._threads)
        self._step.set(inputs, position)
        self._step.arrays["step"][0] = step
        self._step.arrays["thresholds"][:] = thresholds
        logits, decisions, scores = self._decode("logits", "decisions", "scores")
        assert logits is not None
        if decisions is None or scores is None:
            shape = (len(thresholds), inputs.shape[0])
            decisions, scores = np.zeros(shape, bool), np.zeros(shape, np.float32)
        return StepResult(logits, decisions, scores)
