"""Trained gates as files, and the state of an interrupted training."""

import json
from dataclasses import field
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError, UserError
from fastcar_compile.gates.tensors import HINT, read_gate_file, write_gate_file
from fastcar_compile.gates.weights import GateWeights
from fastcar_compile.support import limits
from fastcar_compile.support.files import replace_file
from fastcar_compile.support.values import checked, parse_json, refuse_pipe

SAVE_EVERY = 10
"""Steps between two saved states of a training."""


@checked()
@dataclass(frozen=True, eq=False, config=ConfigDict(arbitrary_types_allowed=True))
class TrainedGate:
    """Trained gates of all layers of one decoder. Calibrate their thresholds afterwards.

    Attributes:
        gate: "learned" or "tas".
        layers: the float32 tensors of each layer. "learned": w1 [units, 2 H], b1 [units], w2 [units], b2 [1]. "tas":
            heads [Hq].
        thresholds: those of the training, one per layer. Calibration finds better ones, and ones for other ratios.
        target: the share of the forwards t >= F that the gate was trained to replay.
        replay, nll, nll_dense: replayed share, and nats per token with and without replay, over the last steps.
        price: the last price of replay in relative NLL. A later training continues from it.
        inputs: SHA-256 of weights, options and videos.
    """

    gate: str
    layers: tuple[dict[str, Tensor], ...] = field(repr=False)
    thresholds: tuple[float, ...]
    target: float
    replay: float
    nll: float
    nll_dense: float
    price: float
    inputs: str

    def heads(self) -> list[dict[int, float]] | None:
        """Return the heads of "tas" as `ReplayConfig` takes them; None for another gate."""
        if self.gate != "tas":
            return None
        return [dict(enumerate(layer["heads"].tolist())) for layer in self.layers]

    def replay_config(self, **options: Any) -> ReplayConfig:
        """Return a config with this gate and its thresholds. `ReplayConfig` defines `options` (max_chain, …)."""
        trained: dict[str, Any] = {"threshold": self.thresholds}
        if self.gate == "tas":
            trained["heads"] = self.heads()
        else:
            trained["gate_weights"] = GateWeights.of(dict(enumerate(self.layers)))
        return ReplayConfig(gate=self.gate, **{**trained, **options})

    def facts(self) -> dict[str, Any]:
        """Return everything but the network's weights as JSON-safe values."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        named = {"gate": self.gate, "inputs": self.inputs, "heads": self.heads(), "thresholds": self.thresholds}
        return named | numbers

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with tensors `layer.{l}.{name}`. The same gate gives the same bytes."""
        tensors = {f"layer.{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer.items()}
        facts = {name: repr(getattr(self, name)) for name in _NUMBERS}
        metadata = {"gate": self.gate, "inputs": self.inputs, **facts}
        metadata["thresholds"] = json.dumps(self.thresholds)
        write_gate_file(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the gate of a file written by `save`.

        Raises:
            UserError: the file is missing or malformed, or has another format or version.
        """
        metadata, tensors = read_gate_file(path)
        layers: dict[int, dict[str, Tensor]] = {}
        try:
            for name, tensor in tensors.items():
                _, index, part = name.split(".")
                layers.setdefault(int(index), {})[part] = tensor
            numbers = {name: float(metadata[name]) for name in _NUMBERS}
            thresholds = tuple(parse_json(metadata["thresholds"].encode(), constants=True))
            ordered = tuple(layers[i] for i in range(len(layers)))
            return cls(metadata["gate"], ordered, thresholds, inputs=metadata["inputs"], **numbers)
        except (ValueError, KeyError, TypeError, InputError) as error:
            text = error.what if isinstance(error, InputError) else repr(error)
            raise UserError(f"the gate is malformed: {text:.300}", where=str(path), hint=HINT) from error


_NUMBERS = ("target", "replay", "nll", "nll_dense", "price")


class TrainingState:
    """Weights, optimiser state and log of a training, in a file, so that an interrupted training continues.

    Args:
        path: the file; None keeps nothing. key: hash of everything that the training depends on. A file with another
            key is ignored.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self._path, self._key = path, key

    def load(self, scorers: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Restore weights and optimiser and return the saved log; None if there is no saved state.

        Raises:
            UserError: the file is no saved state.
        """
        if self._path is None or not self._path.exists():
            return None
        try:
            return self._restored(self._path, scorers, optimizer)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            text = str(error).partition("\n")[0][: limits.TEXT_ERROR]
            hint = "give the checkpoint of an interrupted training, or a new file"
            raise UserError(f"the checkpoint cannot be read: {text}", where=str(self._path), hint=hint) from error

    def _restored(self, path: Path, scorers: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        refuse_pipe(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("key") != self._key:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        scorers.load_state_dict({n[2:]: t for n, t in tensors.items() if n.startswith("s/")})
        state: dict[int, dict[str, Tensor]] = {}
        for name in (n for n in tensors if n.startswith("o/")):
            _, index, part = name.split("/")
            state.setdefault(int(index), {})[part] = tensors[name]
        # Learning rates and groups come from the new optimiser; only the moments are restored.
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        log = parse_json(metadata["log"].encode(), constants=True)
        right = all(len(step) == 3 and all(value >= 0 for value in (*step[:2], *step[2])) for step in log["steps"])
        if not right or type(log["price"]) is not float:
            raise ValueError("its log is damaged")
        return log

    def save(self, scorers: nn.Module, optimizer: torch.optim.Optimizer, log: dict[str, Any]) -> None:
        """Save the state. The file is replaced as a whole."""
        if self._path is None:
            return
        tensors = {f"s/{name}": t.detach().clone().contiguous() for name, t in scorers.state_dict().items()}
        for index, values in optimizer.state_dict()["state"].items():
            tensors |= {f"o/{index}/{part}": t.clone() for part, t in values.items()}
        replace_file(self._path, save(tensors, {"key": self._key, "log": json.dumps(log)}))
