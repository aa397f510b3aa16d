"""What a host has to know of a kernel to call it, from its typed interface; kept in the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastcar_compile.codegen.hls.interface import KernelInterface, KernelPort
from fastcar_compile.errors import InternalError

TYPE_BYTES = {"fastcar::word_t": 16, "uint32_t": 4, "int32_t": 4, "float": 4, "uint64_t": 8}
"""Bytes of the element types that kernels take."""


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel, in the order of the kernel's signature.

    Args:
        kind: memory that the kernel reads (`in`) or writes (`out`), or a scalar.
        bytes: size of the buffer or of the scalar.
    """

    name: str
    kind: Literal["in", "out", "scalar"]
    bytes: int

    @classmethod
    def of(cls, port: KernelPort) -> Argument:
        """The argument behind a port.

        Raises:
            InternalError: an element type that no host knows the size of.
        """
        size = TYPE_BYTES.get(port.ctype)
        if size is None:
            raise InternalError(f"argument {port.name} has the type {port.ctype}, whose size is not known")
        if port.mode == "s_axilite":
            return cls(port.name, "scalar", size)
        return cls(port.name, "out" if port.writable else "in", size * port.depth)


@dataclass(frozen=True)
class Kernel:
    """A kernel as the host sees it."""

    name: str
    arguments: tuple[Argument, ...]

    @classmethod
    def of(cls, interface: KernelInterface) -> Kernel:
        """The kernel behind an interface."""
        return cls(interface.name, tuple(Argument.of(port) for port in interface.ports))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Kernel:
        """The inverse of `to_json`."""
        return cls(data["name"], tuple(Argument(**a) for a in data["arguments"]))

    def to_json(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return {"name": self.name, "arguments": [vars(a) for a in self.arguments]}

    def index(self, argument: str) -> int:
        """Position of an argument in the signature.

        Raises:
            InternalError: the kernel has no such argument.
        """
        names = [a.name for a in self.arguments]
        if argument not in names:
            raise InternalError(f"kernel {self.name} has no argument {argument}, only {', '.join(names)}")
        return names.index(argument)

    def weights(self) -> list[str]:
        """The arguments that take a section of a weight stream each, in the order of the sections."""
        return [a.name for a in self.arguments if a.name.startswith("weights_")]
