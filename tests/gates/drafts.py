"""Random drafts for tests."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fastcar_compile.gates.draft import Draft


def layer_of_draft(
    hidden: int, neurons: int = 8, rank: int = 4, gated: bool = True, seed: int = 0
) -> dict[str, Tensor]:
    """Tensors of one layer and its gate; with biases where the MLP has no gate. Gains fall with the change."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) * 0.2

    own = {"gate_proj": draw(neurons, hidden)} if gated else {"up_bias": draw(neurons)}
    own |= {"up_proj": draw(neurons, hidden), "inner": draw(rank, hidden)}
    own |= {"outer": draw(hidden, neurons + rank), "bias": draw(hidden)}
    own |= {"edges": torch.linspace(0.1, 1.5, 15), "gains": torch.linspace(1, 0, 16)}
    return own | {"w1": draw(4, 2 * hidden), "b1": draw(4), "w2": draw(4), "b2": draw(1)}


def random_draft(hidden: int, layers: Iterable[int] = (0, 1), gated: bool = True, seed: int = 0) -> Draft:
    """Of these layers. Layers 0 and 1 always have a gate."""
    whole = {i: layer_of_draft(hidden, gated=gated, seed=seed + i) for i in (0, 1)}
    gates = {i: {n: own[n] for n in ("w1", "b1", "w2", "b2")} for i, own in whole.items()}
    return Draft.of({i: whole[i] if i in layers else gates[i] for i in whole})
