"""Which port or bank of the board's memory every AXI port of the kernels is connected to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastcar_compile.errors import CompileError
from fastcar_compile.targets import Target
from fastcar_compile.targets.model import Connection, Memory

_NUMBERED = re.compile(r"(.+)\[(\d+)\]")


@dataclass(frozen=True)
class BankMap:
    """What the linker connects.

    Attributes:
        weights: one tag per weight port, `HBM[a:b]` for several banks.
        bank_bytes: bytes behind every weight port; None: all of them lead to the same memory.
        others: tags for the other ports, which take them in turn.
    """

    weights: tuple[str, ...]
    bank_bytes: int | None
    others: tuple[str, ...]


def bank_map(target: Target, ports: int) -> BankMap | None:
    """Return where `ports` weight ports (AXI ports, of the memory's width) are connected; None: the linker chooses.

    Where the memory has banks, a weight port gets as many neighbouring ones as there are for each, and no other port
    shares them. Else weight ports are spread over the ports of the memory controller before two share one.

    Raises:
        CompileError: the board has fewer connections than weight ports.
    """
    memory = target.weight_memories[0]
    if len(target.weight_memories) > 1 or not memory.connections:
        return None
    if ports > len(memory.connections):
        raise CompileError(
            f"{ports} weight ports are more than the {len(memory.connections)} ports of {memory.name} on {target.name}",
            hint="choose fewer weight ports",
        )
    if memory.bank_bytes is None:
        # Streams on one port of the memory controller share it, so they are spread over these ports first.
        order = [connection.tag for connection in spread(memory)]
        return BankMap(tuple(order[:ports]), None, _others(order[ports:], order, target))
    # Neighbouring banks go to one port, because the linker takes a range of banks and no list.
    tags, each = [connection.tag for connection in memory.connections], len(memory.connections) // max(ports, 1)
    weights = tuple(tag_range(tags[each * port], tags[each * port + each - 1]) for port in range(ports))
    return BankMap(weights, each * memory.bank_bytes, _others(tags[each * ports :], tags, target))


def spread(memory: Memory) -> list[Connection]:
    """Return the connections in the order that weight ports take them: first one per port of the memory controller."""
    seen: set[str] = set()
    first: list[Connection] = []
    again: list[Connection] = []
    for connection in memory.connections:
        (again if connection.controller in seen else first).append(connection)
        seen.add(connection.controller)
    return first + again


def tag_range(first: str, last: str) -> str:
    """Return the linker's word for the banks from one tag to another: `HBM[4:7]`, or the tag itself."""
    if first == last:
        return first
    low, high = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    if low is None or high is None or low[1] != high[1]:
        raise CompileError(
            f"the banks {first} to {last} have no common name with numbers",
            hint='name the connections of a target\'s banks "NAME[0]", "NAME[1]", ...',
        )
    return f"{low[1]}[{low[2]}:{high[2]}]"


def _others(spare: list[str], tags: list[str], target: Target) -> tuple[str, ...]:
    """Return what is spare; else the memories without weights, else the last connection of the weights."""
    elsewhere = [c.tag for m in target.memories if m not in target.weight_memories for c in m.connections]
    return tuple(spare or elsewhere or tags[-1:])
