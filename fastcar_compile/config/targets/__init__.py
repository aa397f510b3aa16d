"""The boards and CPUs that artifacts are compiled for: one TOML file each, data only, and its typed reader."""

import platform
import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from fastcar_compile.config import CompileConfig
from fastcar_compile.config.formats import quant_format
from fastcar_compile.errors import TargetError, count_text, describe_validation, names_text
from fastcar_compile.support import limits
from fastcar_compile.support.values import checked, file_bytes

_HINT = "compare with the files in fastcar_compile/config/targets/"
_FOLDER = Path(__file__).parent
MEASURED = "`fastcar run ARTIFACT --prompt TOKENS` prints tokens per second, `--threshold none` those of the dense one"
"""How fast a CPU is. The hardware model predicts boards."""

# The typed form of a target file. Each field has its unit in its name or in its docstring.


Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Line = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A name: it stands in tables, messages and comments of generated files."""
Name = Annotated[str, StringConstraints(strip_whitespace=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+() -]{0,79}$")]
"""A target's name: it also stands in generated code, where a quote, a slash or a dollar means something."""
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:\[\]\-]{0,99}$")]
"""A word of generated configurations, of a compiler's name or of its options."""
_EXACT = 1 << 53
"""Up to here a float holds every integer, so products with shares and rates can neither overflow nor round a count."""

Count = Annotated[int, Field(ge=0, le=_EXACT, strict=True)]
PositiveCount = Annotated[int, Field(gt=0, le=_EXACT, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


@checked(TargetError, _HINT)
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
    """Programmable logic: counts of each resource (BRAM36: 36 Kib blocks, URAM: 288 Kib blocks) and clock in MHz.

    Args:
        clock_uncertainty: share of the clock period that HLS leaves to routing; default: that of Vitis HLS (UG1399).
    """

    lut: Count
    ff: Count
    dsp: Count
    bram36: Count
    uram: Count
    clock_mhz: Positive
    clock_uncertainty: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.27
    source: Text


class Platform(_Frozen):
    """How Vivado and the board know each other, where the platform is built from the artifact (platform.tcl).

    Args:
        board: pattern of Vivado's board part, whose preset configures the processing system.
        connections: connector and carrier of a module, as Vivado's property board_connections has them; "": no module.
        loader: "sd": v++ packages a card that boots; "xmutil": Linux loads the fabric (Kria).
        source: origin of the names.
    """

    board: Annotated[str, StringConstraints(pattern=r"^\*:[a-z0-9_]+:\*$")]
    connections: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_:. ]*$")] = ""
    loader: Literal["sd", "xmutil"] = "sd"
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
    """Constants of the energy model: static W, pJ per byte of external memory, pJ per int8 multiply-accumulate.

    Args:
        lut_pj_per_clock: of the fabric, for each LUT of the design. Default: of decoders of 7B and 8B on KV260 at about
            the same bandwidth the later takes 67 % fewer LUTs and 42 % less power, 3.81 W (arXiv 2507.03308). That the
            earlier one has 78,000 LUTs is an assumption.
        uncertainty: share by which the power may be off. Default: both of them are within it.
    """

    static_w: NonNegative
    dram_pj_per_byte: Positive
    mac_int8_pj: Positive
    lut_pj_per_clock: NonNegative = 0.18
    uncertainty: Fraction = 0.35
    source: Text


class Target(_Frozen):
    """One board or CPU that an artifact is compiled for.

    Args:
        kind: "fpga" (with `part` and `fabric`) or "cpu" (without).
        estimate_only: the reason why no artifact can be built for the target; None: artifacts can be built.
        platform: what a platform is built from; None: its vendor has one, as of PCIe cards.
    """

    name: Name
    description: Text
    kind: Literal["fpga", "cpu"]
    part: Word | None = None
    estimate_only: Text | None = None
    host: Host
    fabric: Fabric | None = None
    memories: Annotated[tuple[Memory, ...], Field(min_length=1)]
    limits: Utilisation | None = None
    platform: Platform | None = None
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
        return f"{platform.machine()}-linux-gnu" if self.host.triple == "native" else self.host.triple

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


def available_targets() -> tuple[str, ...]:
    """Return the names of the targets that ship with the package, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_target(target: str | Path | Target) -> Target:
    """Return the target of a name or of a .toml file. A `Target` is returned unchanged.

    Raises:
        TargetError: the name or the file is unknown, or the file is malformed (every bad field is listed).
    """
    match target:
        case Target():
            return target
        case Path():
            return _read_file(target)
        case str() if target.endswith(".toml") or "/" in target:
            return _read_file(Path(target))
        case str() if target in available_targets():
            return _read_file(_FOLDER / f"{target}.toml")
        case str():
            raise _unknown(target)
        case _:
            kinds = "a name, a path to a .toml file or a fastcar_compile.Target"
            hint = f"use one of: {', '.join(available_targets())}"
            raise TargetError(f"a target is {kinds}, not {type(target).__name__}", hint=hint)


ON_A_BOARD = 'compile for a board, with quant w8a8 or w4a8: --target zcu102 (target="zcu102"); see `fastcar targets`'
"""Hint where an artifact has no hardware output."""


def require_buildable(target: Target) -> None:
    """Raise TargetError for a target that serves estimates only."""
    if target.estimate_only is None:
        return
    builds = [name for name in available_targets() if load_target(name).estimate_only is None]
    what = f"no artifact can be built for {target.name}, which serves estimates only: {target.estimate_only}"
    raise TargetError(what, hint=f"use `fastcar estimate`, or compile for one of: {', '.join(builds)}")


def has_accelerator(config: CompileConfig, board: Target) -> bool:
    """Return whether kernels are emitted: the target has a fabric, and the arithmetic is int8."""
    return board.kind == "fpga" and quant_format(config.quant).accelerated


def _unknown(name: str) -> TargetError:
    own = "your own board is a path to a .toml file like the shipped files"
    return TargetError(f"unknown target {name!r}", hint=f"{own}; available: {names_text(available_targets(), name)}")


def _read_file(path: Path) -> Target:
    try:
        data = tomllib.loads(file_bytes(path, limits.TOML_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise TargetError("the target file does not exist", where=str(path), hint="correct the path") from None
    except OSError as found:
        text = f"the target file cannot be read: {found.strerror or found}"
        raise TargetError(text, where=str(path), hint="correct the path") from found
    except (tomllib.TOMLDecodeError, RecursionError) as found:
        raise TargetError(f"the target file is not valid TOML: {found}", where=str(path), hint=_HINT) from found
    except ValueError as found:  # too large, no UTF-8, a path with a NUL, or a number of too many digits
        raise TargetError(f"the target file cannot be read: {found}", where=repr(str(path)), hint=_HINT) from found
    try:
        return Target.model_validate(data)
    except ValidationError as error:
        count = count_text(error.error_count(), "bad field")
        what = f"the target file has {count}: {describe_validation(error)}"
        raise TargetError(what, where=str(path), hint=_HINT) from error
