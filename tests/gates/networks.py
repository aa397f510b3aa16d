"""Random weights for the gate `learned`."""

import torch

from fastcar_compile.gates import GateWeights


def networks(hidden: int, *units: int, seed: int = 5) -> GateWeights:
    """One network per entry of `units`, which says how many hidden units it has."""
    torch.manual_seed(seed)
    return GateWeights.of(
        {
            layer: {
                "w1": torch.randn(n, 2 * hidden) / hidden**0.5,
                "b1": torch.randn(n),
                "w2": torch.randn(n),
                "b2": torch.randn(1),
            }
            for layer, n in enumerate(units)
        }
    )
