"""The typed form of one target file. Each field has its unit in its name or in its docstring."""

from __future__ import annotations

import platform
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from fastcar_compile.errors import TargetError, count_text
from fastcar_compile.support.values import checked

Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Line = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A name: it stands in tables, messages and comments of generated files."""
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:\[\]\-]{0,99}$")]
"""A word of generated configurations, of a compiler's name or of its options."""
_EXACT = 1 << 53
"""Up to here a float holds every integer, so products with shares and rates can neither overflow nor round a count."""

Count = Annotated[int, Field(ge=0, le=_EXACT, strict=True)]
PositiveCount = Annotated[int, Field(gt=0, le=_EXACT, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


@checked(TargetError, "compare with the files in fastcar_compile/config/targets/")
class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Connection(_Frozen):
    """One AXI port into a memory, or one bank of it, as the linker names it.

    Args:
        tag: what stands behind the colon of `sp=`.
        controller: the port of the memory controller behind it; connections to one controller port share its bandwidth.
    """

    tag: Word
    controller: Line


class Measurement(_Frozen):
    """A measurement of a memory. share: part of `peak_bandwidth` that sequential reads of the fabric reached."""

    share: Fraction
    source: Text


class Memory(_Frozen):
    """One external memory as the fabric (or the CPU) sees it.

    Args:
        capacity_bytes: bytes.
        peak_bandwidth: bytes per second, theoretical.
        ports: AXI ports into it from the fabric (or channels, for a CPU).
        width_bits: data width of one port, bits.
        channels: independent channels that `peak_bandwidth` is the sum of.
        technology: memory technology, whose timing the hardware model uses.
        streams_weights: the weight streams may be striped over it; where no memory has this, the first memory has them.
        burst_bytes: the longest burst that reaches the memory controller in one piece.
        reorder_bytes: pending reads that the controller may reorder to stay in an open row; 0: it serves them in order.
        connections: every port, in the linker's words; empty: the linker chooses. One per channel means that a channel
            is a bank of its own, of equal capacity.
        measured: the published measurement that caps the model; None: only the model's own losses limit it.
        source: origin of the figures.
    """

    name: Line
    capacity_bytes: PositiveCount
    peak_bandwidth: Positive
    ports: PositiveCount
    width_bits: PositiveCount
    channels: PositiveCount = 1
    technology: Literal["ddr4", "hbm2"] = "ddr4"
    streams_weights: bool = False
    burst_bytes: PositiveCount = 4096
    reorder_bytes: Count = 0
    connections: tuple[Connection, ...] = ()
    measured: Measurement | None = None
    source: Text

    @model_validator(mode="after")
    def _every_port_is_connected(self) -> Self:
        if self.connections and len(self.connections) != self.ports:
            raise ValueError(f"{len(self.connections)} connections are named for {count_text(self.ports, 'port')}")
        tags = [connection.tag for connection in self.connections]
        if len(set(tags)) != len(tags):
            raise ValueError(f"tags are not unique: {', '.join(tags)}")
        return self

    @property
    def bank_bytes(self) -> int | None:
        """Bytes of the bank behind one connection; None where all connections lead to the same bytes."""
        if self.channels > 1 and len(self.connections) == self.channels:
            return self.capacity_bytes // self.channels
        return None


class Fabric(_Frozen):
    """Programmable logic: counts of each resource (BRAM36: 36 Kib blocks, URAM: 288 Kib blocks) and clock in MHz."""

    lut: Count
    ff: Count
    dsp: Count
    bram36: Count
    uram: Count
    clock_mhz: Positive
    source: Text


class Utilisation(_Frozen):
    """The share of each resource that a generated design may take, in (0, 1]."""

    lut: Fraction = 0.70
    ff: Fraction = 0.50
    bram: Fraction = 0.80
    dsp: Fraction = 0.80
    uram: Fraction = 0.80
    source: Text


class Host(_Frozen):
    """The CPU that runs attention, norms and sampling.

    Args:
        triple: LLVM target triple; "native" is the build machine.
        cpu: LLVM CPU name.
        cores: cores that the runtime may use; 0: all cores.
    """

    triple: Word
    cpu: Word
    cores: Count
    source: Text


class Power(_Frozen):
    """Constants of the energy model: static W, pJ per byte of external memory, pJ per int8 multiply-accumulate."""

    static_w: NonNegative
    dram_pj_per_byte: Positive
    mac_int8_pj: Positive
    source: Text


class Target(_Frozen):
    """One board or CPU that an artifact is compiled for.

    Args:
        kind: "fpga" (with `part` and `fabric`) or "cpu" (without).
        estimate_only: the reason why no artifact can be built for the target; None: artifacts can be built.
    """

    name: Line
    description: Text
    kind: Literal["fpga", "cpu"]
    part: Word | None = None
    estimate_only: Text | None = None
    host: Host
    fabric: Fabric | None = None
    memories: Annotated[tuple[Memory, ...], Field(min_length=1)]
    limits: Utilisation | None = None
    power: Power

    @model_validator(mode="after")
    def _kind_has_its_parts(self) -> Self:
        fpga, verb = self.kind == "fpga", {"fpga": "needs", "cpu": "has no"}[self.kind]
        parts = {"part": self.part, "fabric": self.fabric, "limits": self.limits}
        if wrong := [name for name, value in parts.items() if (value is None) == fpga]:
            raise ValueError(f'kind = "{self.kind}" {verb} {", ".join(wrong)}')
        names = [memory.name for memory in self.memories]
        if len(set(names)) != len(names):
            raise ValueError(f"memory names are not unique: {', '.join(names)}")
        return self

    @property
    def host_triple(self) -> str:
        """The host's LLVM triple, with "native" resolved to this machine's."""
        if self.host.triple == "native":
            return f"{platform.machine()}-linux-gnu"
        return self.host.triple

    @property
    def peak_bandwidth(self) -> float:
        """Bytes per second of the fastest memory."""
        return max(memory.peak_bandwidth for memory in self.memories)

    @property
    def weight_memories(self) -> tuple[Memory, ...]:
        """The memories that hold the weight streams."""
        return tuple(m for m in self.memories if m.streams_weights) or self.memories[:1]

    @property
    def shares_memory(self) -> bool:
        """Whether the weight memories are also the host's, as on a Zynq board; a PCIe card has its own."""
        return self.kind == "fpga" and self.host_triple.startswith("aarch64")

    def budget(self) -> dict[str, int]:
        """Return what a generated design may use after the utilisation limits: lut, ff, dsp, bram36, uram.

        Empty for a CPU.
        """
        if self.fabric is None or self.limits is None:
            return {}
        shares = {"lut": "lut", "ff": "ff", "dsp": "dsp", "bram36": "bram", "uram": "uram"}
        return {name: int(getattr(self.fabric, name) * getattr(self.limits, share)) for name, share in shares.items()}
