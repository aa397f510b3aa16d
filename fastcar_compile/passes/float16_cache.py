"""Keys and values cached as float16: half the bytes that attention reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir import DecoderProgram, StateRole, where
from fastcar_compile.passes.base import Pass
from fastcar_compile.passes.edit import fake_like, fake_value, is_op, placeholder

fastcar = torch.ops.fastcar
CACHES = (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)


@dataclass(frozen=True)
class Float16Cache(Pass):
    """The key and value caches of both graphs become float16. No node is added: an operator that writes a cache rounds
    to its type (`ops.attention.stored`), one that reads it turns the values back to float32."""

    name: ClassVar[str] = "float16-cache"

    def apply(self, program: DecoderProgram) -> bool:
        """Raises CompileError where a cache is read by an operator that takes float32 only."""
        caches = [s for s in program.state if s.role in CACHES and s.dtype != torch.float16]
        if not caches:
            return False
        for module in program.graphs():
            for spec in caches:
                _narrow(module.graph, spec.name)
        names = {s.name for s in caches}
        program.state = [dataclasses.replace(s, dtype=torch.float16) if s.name in names else s for s in program.state]
        return True


def _narrow(graph: fx.Graph, name: str) -> None:
    """Gives a cache and what is written of it their new type."""
    cache = placeholder(graph, name)
    cache.meta["val"] = fake_like(graph, torch.empty_like(cache.meta["val"], dtype=torch.float16, device="meta"))
    for write in cache.users:
        if not is_op(write, fastcar.cache_write, fastcar.ring_write):
            raise _unknown(cache, write)
        write.meta["val"] = fake_value(graph, write)
        for reader in write.users:
            if reader.op != "output" and getattr(reader.target, "namespace", "") != "fastcar":
                raise _unknown(write, reader)


def _unknown(cache: fx.Node, user: fx.Node) -> CompileError:
    what = f"float16 caches: {user.target} reads {cache.name} itself"
    return CompileError(what, where=where(user), mend='use kv="float32", or run float16-cache after normalize-state')
