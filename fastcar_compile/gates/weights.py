"""Weights of the gate `learned`: one small network per layer, in a safetensors file."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, Self, TypeVar

from fastcar_compile.errors import CompileError, count_text

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, VERSION = "fastcar-gate", "1"
HINT = (
    f"give a safetensors file with metadata format {FORMAT!r}, version {VERSION!r}, and for every layer l "
    "layer.l.w1 [units, 2 H], layer.l.b1 [units], layer.l.w2 [units], layer.l.b2 [1] (docs/reference/gates.md)"
)
PARAMETERS = ("w1", "b1", "w2", "b2")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The network of one layer: score = w2 . relu(w1 @ [x ; |x - x_cached|] + b1) + b2.

    Attributes:
        w1: bfloat16 [units, 2 H], rounded when it is given (`exact_weights`): only w1 costs memory traffic.
        b1, w2: float32 [units]. b2: float32 [1].
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    @property
    def units(self) -> int:
        """The number of hidden units."""
        return len(self.b1)

    def params(self) -> dict[str, Tensor]:
        """Return the tensors by name, in the order of PARAMETERS."""
        return {name: getattr(self, name) for name in PARAMETERS}


class LayerTensors(Protocol):
    """What a file holds for one layer."""

    def params(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        ...


L = TypeVar("L", bound=LayerTensors)


@dataclass(frozen=True, eq=False)
class StoredLayers(Generic[L]):
    """What a file holds for the layers of one decoder; equal where the digests are.

    Attributes:
        digest: SHA-256 of all values as the compiled program has them. Without layers it names what is kept elsewhere,
            as a manifest does.
        layers: layer -> what it has.
    """

    WHAT: ClassVar[str]
    FIELD: ClassVar[str]
    """The argument that takes it."""
    FORMAT: ClassVar[str]
    HINT: ClassVar[str]

    digest: str
    layers: Mapping[int, L] = field(default_factory=dict[int, L], repr=False)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def name(self) -> str:
        """The digest as `sha256:…`, which stands for the file in JSON."""
        return f"sha256:{self.digest}"

    @classmethod
    @abstractmethod
    def of(cls, layers: Mapping[int, Mapping[str, Tensor]], where: str = "") -> Self:
        """Return what tensors of layers are, or raise CompileError with all that is wrong."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return what is in a file that `save` wrote.

        Raises:
            UserError: it cannot be read. CompileError: format, version, tensors; all that is wrong at once.
        """
        from fastcar_compile.gates.tensors import read_layers

        return read_layers(path, cls.FORMAT, cls.HINT, cls.of)

    def save(self, path: str | Path) -> None:
        """Write the file with all values in float32. The same values give the same bytes."""
        from fastcar_compile.gates.tensors import write_gate_file

        self.require()
        named = {f"layer.{i}.{n}": t.float().contiguous() for i, own in self._parts() for n, t in own.params().items()}
        write_gate_file(path, named, {}, self.FORMAT)

    def _parts(self) -> Iterator[tuple[int, LayerTensors]]:
        """Yield layers with tensors of the file."""
        yield from self.layers.items()

    def require(self) -> None:
        """Raise CompileError where only the digest is known."""
        if not self.layers:
            what = f"the {self.WHAT} are known only by their digest, {self.name}"
            option = self.FIELD.replace("_", "-")
            raise CompileError(what, where=self.FIELD, hint=f"give the file: {self.FIELD}=…, or --{option} FILE")


@dataclass(frozen=True, eq=False)
class GateWeights(StoredLayers[LayerWeights]):
    """The networks of a decoder's layers."""

    WHAT, FIELD, FORMAT, HINT = "weights of the gate", "gate_weights", FORMAT, HINT

    @classmethod
    def of(cls, layers: Mapping[int, Mapping[str, Tensor]], where: str = "gate weights") -> GateWeights:
        """Return weights from layer -> name (of PARAMETERS) -> float tensor of any precision.

        Raises:
            CompileError: missing or unknown tensors, shapes that do not fit, values that are not finite; all at once.
        """
        from fastcar_compile.gates.tensors import digest_of, layer_weights, problems_of

        problems = [p for layer, params in sorted(layers.items()) for p in problems_of(layer, params)]
        if not layers:
            problems.append("there is no layer")
        CompileError.raise_all([CompileError(p, where=where, hint=HINT) for p in problems])
        made = {layer: layer_weights(params) for layer, params in sorted(layers.items())}
        return cls(digest_of(made), made)

    def check(self, hidden: Sequence[int]) -> None:
        """Raise CompileError, with all that is wrong, unless there is a network for every layer's hidden size."""
        self.require()
        problems: list[str] = []
        for layer, width in enumerate(hidden):
            if layer not in self.layers:
                problems.append(f"the gate's weights have no layer {layer}; they have {_ranges(self.layers)}")
            elif self.layers[layer].w1.shape[1] != 2 * width:
                units, inputs = self.layers[layer].w1.shape
                what = f"layer {layer}: w1 is [{units}, {inputs}], but the decoder's hidden size is {width}"
                problems.append(f"{what}: it must be [units, {2 * width}]")
        if extra := sorted(set(self.layers) - set(range(len(hidden)))):
            own = count_text(len(hidden), "layer")
            problems.append(f"the gate's weights have a layer {extra[0]}, but the decoder has {own}")
        hint = "train the gate on this decoder"
        CompileError.raise_all([CompileError(p, where="gate_weights", hint=hint) for p in problems])

    def layer(self, layer: int) -> LayerWeights:
        """Return one layer's network.

        Raises:
            CompileError: it is not there.
        """
        self.require()
        if layer not in self.layers:
            what = f"the gate's weights have no layer {layer}; they have {_ranges(self.layers)}"
            raise CompileError(what, where="gate_weights", hint="train the gate on this decoder")
        return self.layers[layer]


def gate_parameter(name: str, layer: int) -> str:
    """Return the name that a gate's parameter has in the program, for example gate_w1_0."""
    return f"gate_{name}_{layer}"


def weights_in(params: Mapping[str, Tensor], layers: int) -> GateWeights | None:
    """Return the gate's weights among a rewritten program's parameters; None: the program has no gate weights."""
    found: dict[int, dict[str, Tensor]] = {}
    for layer in range(layers):
        names = {name: gate_parameter(name, layer) for name in PARAMETERS}
        if names["w1"] in params:
            found[layer] = {name: params[n] for name, n in names.items()}
    return GateWeights.of(found) if found else None


def weight_bytes(units: int, hidden: int) -> int:
    """Return the bytes of one layer's network, which every decision reads: w1 in bfloat16, the rest in float32."""
    return 2 * units * 2 * hidden + 4 * (2 * units + 1)


def _ranges(layers: Mapping[int, LayerWeights]) -> str:
    return ", ".join(str(layer) for layer in sorted(layers))
