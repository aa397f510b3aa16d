"""One start of the engine: what the closed form and the cycle model are asked about."""

from __future__ import annotations

from dataclasses import dataclass

from fastcar_compile.codegen.hls.design.loops import Load
from fastcar_compile.codegen.hls.design.product import WORD_BYTES, Product, float_words


@dataclass(frozen=True)
class NamedProduct:
    """A product of a call by name; `inner`: its values stay in the cores."""

    name: str
    product: Product
    inner: bool = False


@dataclass(frozen=True)
class EngineCall:
    """What one start of the engine has to do.

    Args:
        products: one, or the two of an MLP. load: of the array. ports: weight ports, 128 bits each.
        held: words of every port that the prefetch buffer holds. copied: rows that are copied from the cache.
    """

    products: tuple[NamedProduct, ...]
    load: Load
    ports: int
    held: int = 0
    copied: int = 0

    @property
    def words(self) -> int:
        """128-bit words of weights that pass one port, those of the prefetch buffer included."""
        return sum(p.product.port_words for p in self.products)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and scales that pass all ports."""
        return self.words * self.ports * WORD_BYTES

    @property
    def results(self) -> int:
        """128-bit words of one row of results."""
        return float_words(self.products[-1].product.channels)


@dataclass(frozen=True)
class CallPart:
    """A span of a call on the time line. unit: what it waits for: memory, ports, compute, or edge: rows in and out."""

    name: str
    unit: str
    seconds: float
    bytes: float = 0.0
