"""Drafts: a small surrogate of each layer's MLP, with what is left of the cached output, in a safetensors file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastcar_compile.errors import CompileError, count_text
from fastcar_compile.gates.weights import GateWeights, LayerTensors, StoredLayers
from fastcar_compile.support.values import checked

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "fastcar-draft"
MULTIPLE = 32
"""Neurons and ranks are multiples of this, which fill the vectors of every kernel."""

GAINS = 16
"""Values of the gain's table, one for each bin of the input's change."""

HINT = (
    f"give a safetensors file with metadata format {FORMAT!r}, as `fastcar fit-draft` writes it, with the tensors of "
    "docs/reference/gates.md for every layer that has a draft"
)
REQUIRED = ("up_proj", "inner", "outer", "bias", "edges", "gains")
PARTS = ("gate_proj", "gate_bias", "up_proj", "up_bias", "inner", "outer", "bias", "edges", "gains")
NETWORK = ("w1", "b1", "w2", "b2")


@dataclass(frozen=True)
class DraftSize:
    """Neurons n and rank k of a draft; both 0: a layer that replays plainly."""

    neurons: int
    rank: int

    def __str__(self) -> str:
        return f"{self.neurons} neurons, rank {self.rank}" if self.neurons else "plain replay"

    @classmethod
    def of_part(cls, part: float, intermediate: int, hidden: int) -> DraftSize:
        """Return neurons as a part of an MLP's, and the rank as that part of the hidden size; multiples of MULTIPLE."""
        return cls(*(max(MULTIPLE, round(part * n / MULTIPLE) * MULTIPLE) for n in (intermediate, hidden)))

    def share(self, intermediate: int, gated: bool) -> float:
        """Return the draft's weights as a share of those of an MLP with this many neurons, with a gate or without."""
        return ((2 + gated) * self.neurons + 2 * self.rank) / ((2 + gated) * intermediate)


@dataclass(frozen=True, eq=False)
class LayerDraft:
    """The surrogate of one MLP, m(x) = outer [a(x) ; inner x] + bias.

    a(x) = act(gate_proj x + gate_bias) * (up_proj x + up_bias), or act(up_proj x + up_bias) in an MLP without a gate.

    A row that replays gets m(x) + g(d) * (y_c - m(x_c)): x_c and y_c are input and output of the slot's last computed
    visit, d the score of `input_delta`. g is gains[i] for edges[i - 1] <= d < edges[i].

    Attributes:
        up_proj, gate_proj: float32 [n, H]; gate_proj None: an MLP without a gate. up_bias, gate_bias: float32 [n] or
            None. inner: float32 [k, H]. outer: float32 [H, n + k]. bias: float32 [H].
        edges: float32 [15], not falling. gains: float32 [16].
    """

    up_proj: Tensor
    inner: Tensor
    outer: Tensor
    bias: Tensor
    edges: Tensor
    gains: Tensor
    gate_proj: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None

    @property
    def size(self) -> DraftSize:
        """Neurons and rank."""
        return DraftSize(len(self.up_proj), len(self.inner))

    def params(self) -> dict[str, Tensor]:
        """Return the tensors by name, in the order of PARTS; without those that are not there."""
        return {name: tensor for name in PARTS if (tensor := getattr(self, name)) is not None}


@checked(CompileError)
@dataclass(frozen=True, eq=False)
class Draft(StoredLayers[LayerDraft]):
    """The drafts of a decoder's layers, and the gate that was fitted with them. A layer without one replays plainly.

    Attributes:
        gate: networks of gate `learned` that predict a replay's error; None where only the digest is known.
    """

    WHAT, FIELD, FORMAT, HINT = "layers of the draft", "draft", FORMAT, HINT

    gate: GateWeights | None = None

    @classmethod
    def of(cls, layers: Mapping[int, Mapping[str, Tensor]], where: str = "draft") -> Draft:
        """Return a draft from layer -> name -> float tensor: of the draft, if any, and w1, b1, w2, b2 of the gate.

        Raises:
            CompileError: missing or unknown tensors, shapes that do not fit, values that are not finite; all at once.
        """
        from fastcar_compile.gates.tensors import digest_of

        drafts = {i: {n: t for n, t in own.items() if n not in NETWORK} for i, own in sorted(layers.items())}
        problems = [p for i, own in drafts.items() if own for p in _problems_of(i, own)]
        if not any(drafts.values()):
            problems.append("there is no layer with a draft")
        CompileError.raise_all([CompileError(p, where=where, hint=HINT) for p in problems])
        gate = GateWeights.of({i: {n: own[n] for n in NETWORK if n in own} for i, own in layers.items()}, where)
        made = {
            i: LayerDraft(**{n: t.detach().float().contiguous() for n, t in own.items()})
            for i, own in drafts.items()
            if own
        }
        return cls(digest_of({**made, **{-1 - i: gate.layers[i] for i in gate.layers}}), made, gate)

    def _parts(self) -> Iterator[tuple[int, LayerTensors]]:
        yield from super()._parts()
        yield from self.gate.layers.items() if self.gate else ()

    def check(self, hidden: Sequence[int]) -> None:
        """Raise CompileError, with all that is wrong, where a layer is none of the decoder's or has another size."""
        self.require()
        problems = [
            f"layer {i} of the draft is for a hidden size of {own.up_proj.shape[1]}, but the decoder's is {hidden[i]}"
            for i, own in self.layers.items()
            if i < len(hidden) and own.up_proj.shape[1] != hidden[i]
        ]
        if extra := sorted(set(self.layers) - set(range(len(hidden)))):
            problems.append(f"the draft has a layer {extra[0]}, but the decoder has {count_text(len(hidden), 'layer')}")
        hint = "fit the draft on this decoder (fc.fit_draft, fastcar fit-draft)"
        CompileError.raise_all([CompileError(p, where="draft", hint=hint) for p in problems])


def _problems_of(layer: int, params: Mapping[str, Tensor]) -> list[str]:
    """Return the problems of one layer's tensors."""
    named = f"layer.{layer}."
    problems = [f"{named}{name} is missing" for name in REQUIRED if name not in params]
    problems += [f"unknown tensor {named + name!r}" for name in sorted(set(params) - set(PARTS))]
    if problems:
        return problems
    up, inner = params["up_proj"], params["inner"]
    if up.dim() != 2 or inner.dim() != 2 or 0 in (*up.shape, *inner.shape):
        return [f"{named}up_proj is {list(up.shape)} and {named}inner {list(inner.shape)}, expected [n, H] and [k, H]"]
    (n, hidden), k = up.shape, len(inner)
    expected = {
        **dict.fromkeys(("gate_bias", "up_bias"), (n,)),
        "gate_proj": (n, hidden),
        "inner": (k, hidden),
        "outer": (hidden, n + k),
        "bias": (hidden,),
        "edges": (GAINS - 1,),
        "gains": (GAINS,),
    }
    for name, tensor in params.items():
        if tuple(tensor.shape) != expected.get(name, tuple(tensor.shape)):
            problems.append(f"{named}{name} is {list(tensor.shape)}, expected {list(expected[name])}")
        elif not tensor.is_floating_point() or not tensor.float().isfinite().all():
            problems.append(f"{named}{name} has values that are no finite floats")
    if not problems and bool((params["edges"].diff() < 0).any()):
        problems.append(f"{named}edges are not in rising order")
    return problems
