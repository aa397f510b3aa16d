"""Whether a decoder fits the board's memory, all of it and every bank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastcar_compile.artifact.sections import ATTENTION_ROLES, CONTEXT_ROLES, StateRole
from fastcar_compile.codegen.hls.design.banks import bank_map
from fastcar_compile.errors import CompileError
from fastcar_compile.formats.quant import ACCELERATED, QUANT_FORMATS
from fastcar_compile.targets import Target

HOST_RESERVE = 128 * 2**20
"""Bytes left to the operating system and the program on a board whose memory is shared with the host. Estimate."""

GB = 1e9


class Tensor(Protocol):
    """A state tensor, of a program or of an artifact."""

    @property
    def role(self) -> StateRole: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Footprint:
    """Bytes of a decoder that are in memory at the same time; the weights of a gate are among the weights."""

    weights: int
    kv_cache: int
    mlp_cache: int
    gate_cache: int = 0

    @classmethod
    def of(cls, weights: int, state: Iterable[Tensor]) -> Footprint:
        """Return the bytes of a decoder with these weights and state tensors."""
        sizes = dict.fromkeys(StateRole, 0)
        for tensor in state:
            sizes[tensor.role] += tensor.nbytes
        kv, gate = sum(sizes[role] for role in (*ATTENTION_ROLES, *CONTEXT_ROLES)), sizes[StateRole.GATE_CACHE]
        return cls(weights, kv, sum(sizes.values()) - kv - gate, gate)

    @property
    def total(self) -> int:
        """All of it, bytes."""
        return self.weights + self.kv_cache + self.mlp_cache + self.gate_cache


def shares_memory(target: Target) -> bool:
    """Return whether the weight memories are also the host's, as on a Zynq board; a PCIe card has its own."""
    return target.shares_memory


def held(decoder: Footprint, target: Target, *, attends: bool = False) -> Footprint:
    """Return what of a decoder the weight memories hold, for `compile`, its dry run and `estimate` alike.

    That is all of it where the host has the same memory. A card holds the weights: attention and replay run on the
    host, and their caches are in its memory.

    Args:
        attends: the accelerator computes attention too, so that the caches are beside the weights.
    """
    return decoder if attends or shares_memory(target) else Footprint(decoder.weights, 0, 0)


def capacity(target: Target) -> int:
    """Return the bytes of the weight memories that a decoder may fill."""
    whole = sum(m.capacity_bytes for m in target.weight_memories)
    return whole - (HOST_RESERVE if shares_memory(target) else 0)


def require_fit(footprint: Footprint, target: Target, *, quant: str, positions: int) -> None:
    """Raise CompileError for what the board cannot hold.

    Args:
        positions: of the KV cache, tokens.

    Raises:
        CompileError: it does not fit; the text has the numbers and the options.
    """
    room = capacity(target)
    if footprint.total <= room:
        return
    narrowest = min(ACCELERATED, key=lambda name: QUANT_FORMATS[name].weight_bits)
    options = [] if quant == narrowest else [f'quant="{narrowest}" ({QUANT_FORMATS[narrowest].summary})']
    if footprint.kv_cache > footprint.total // 20:
        options.append(f"a shorter cache than {positions} positions, or attention over sinks and a sliding window")
    if footprint.gate_cache:
        options.append("a gate without a cache of its own, such as tas")
    options.append(f"a board with at least {footprint.total / GB:.2f} GB")
    gate = f"gate cache {footprint.gate_cache / GB:.2f} GB, " if footprint.gate_cache else ""
    raise CompileError(
        f"the decoder does not fit the memory of {target.name}: weights {footprint.weights / GB:.2f} GB ({quant}), "
        f"KV cache {footprint.kv_cache / GB:.2f} GB ({positions} positions), "
        f"MLP cache {footprint.mlp_cache / GB:.2f} GB, {gate}together {footprint.total / GB:.2f} GB; "
        f"the board has room for {room / GB:.2f} GB",
        hint="; or ".join(options),
    )


def bank_excess(target: Target, *, ports: int, stream_bytes: int) -> str | None:
    """Return how the banks behind a weight port fall short of its part of the weight streams; None: they do not.

    Args:
        ports: AXI ports that read weights, of the memory's width. stream_bytes: of all streams together, padding included.
    """
    memories = target.weight_memories
    if len(memories) == 1 and 0 < len(memories[0].connections) < ports:
        return f"{ports} weight ports, and {memories[0].name} has {len(memories[0].connections)} connections"
    banks = bank_map(target, ports)
    if banks is None or banks.bank_bytes is None:
        return None
    # Every port reads an equal section of each stream, so the banks behind one port hold its part of all.
    section = -(-stream_bytes // ports)
    if section <= banks.bank_bytes:
        return None
    return (
        f"each of {ports} weight ports has {section / GB:.3f} GB, the banks behind it hold {banks.bank_bytes / GB:.3f} GB "
        f"({banks.weights[0]} behind the first)"
    )


def require_banks(target: Target, excess: Sequence[str | None]) -> None:
    """Raise CompileError where every number of weight ports that was tried has an excess (`bank_excess`).

    Raises:
        CompileError: they do not fit; the text has all numbers and the options.
    """
    short = [text for text in dict.fromkeys(excess) if text is not None]
    if None in excess or not short:
        return
    raise CompileError(
        f"the weight streams do not fit the banks of {target.name}: {'; '.join(short)}",
        hint="use fewer bits or layers, or a board whose banks are larger",
    )
