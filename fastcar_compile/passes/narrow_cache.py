"""Keys and values cached in fewer bytes: float16, or int8 with an exponent per block of 32."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from fastcar_compile.errors import CompileError
from fastcar_compile.formats import KV_TYPES
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, StateRole, StateSpec, where
from fastcar_compile.ir.rewrite import fake_like, fake_value, is_op, placeholder
from fastcar_compile.ops.cached import row_size

fastcar = torch.ops.fastcar
CACHES = (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)
TYPES = {name: getattr(torch, name) for name in KV_TYPES if name != "float32"}
"""float32 is what a captured decoder has."""


@dataclass(frozen=True)
class NarrowCache(Pass):
    """The key and value caches of both graphs become float16 or int8. No node is added: an operator that writes a
    cache rounds to its type (`ops.cached.stored`), one that reads it turns the rows back to float32.

    Args:
        dtype: "float16" or "int8"; a row of the latter is longer by its exponents.
    """

    name: ClassVar[str] = "narrow-cache"
    dtype: str = "float16"

    def apply(self, program: DecoderProgram) -> bool:
        """Raises CompileError for an unknown type, and where a cache is read by an operator that takes float32 only."""
        if self.dtype not in TYPES:
            hint = f"use one of: {', '.join(sorted(TYPES))}"
            raise CompileError(f"no cache has the type {self.dtype!r}", where=self.name, hint=hint)
        caches = [s for s in program.state if s.role in CACHES and s.dtype == torch.float32]
        for module in program.graphs():
            for spec in caches:
                self._narrow(module.graph, spec.name)
        names = {s.name for s in caches}
        program.state = [self._spec(s) if s.name in names else s for s in program.state]
        return bool(caches)

    def _spec(self, spec: StateSpec) -> StateSpec:
        shape = (*spec.shape[:3], row_size(spec.shape[3], self.dtype))
        return dataclasses.replace(spec, shape=shape, dtype=TYPES[self.dtype])

    def _narrow(self, graph: fx.Graph, name: str) -> None:
        """Gives a cache and what is written of it their new type."""
        cache = placeholder(graph, name)
        wide: Tensor = cache.meta["val"]
        shape = (*wide.shape[:3], row_size(wide.shape[3], self.dtype))
        cache.meta["val"] = fake_like(graph, torch.empty(shape, dtype=TYPES[self.dtype], device="meta"))
        for write in cache.users:
            if not is_op(write, fastcar.cache_write, fastcar.ring_write):
                raise self._unknown(cache, write)
            write.meta["val"] = fake_value(graph, write)
            for reader in write.users:
                if reader.op != "output" and getattr(reader.target, "namespace", "") != "fastcar":
                    raise self._unknown(write, reader)

    def _unknown(self, cache: fx.Node, user: fx.Node) -> CompileError:
        what = f"{self.dtype} caches: {user.target} reads {cache.name} itself"
        return CompileError(what, where=where(user), hint=f'use kv="float32", or run {self.name} after normalize-state')
