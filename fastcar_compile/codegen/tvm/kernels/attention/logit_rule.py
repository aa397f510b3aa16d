"""From a product of query and key to its logit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fastcar_compile.codegen.tvm.kernels.simd.functions import tanh


@dataclass(frozen=True)
class LogitRule:
    """What a product of query and key becomes: times `scale`, and limited softly to `softcap` where there is one."""

    scale: float
    softcap: float | None = None

    def logit(self, product: Any) -> Any:
        """Return the logit of a product."""
        return self.capped(product * T.float32(self.scale))

    def capped(self, scaled: Any) -> Any:
        """Return softcap * tanh(scaled / softcap); without a soft-cap what is scaled."""
        if self.softcap is None:
            return scaled
        return T.float32(self.softcap) * tanh(scaled * T.float32(1 / self.softcap))
