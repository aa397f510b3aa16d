"""Parameters of a program: in memory, or read from a checkpoint and quantised when they are asked for."""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastcar_compile.config.formats import DTYPES
from fastcar_compile.errors import InternalError
from fastcar_compile.ir.tensor_files import Piece, TensorPlacement, TensorSpec, octets
from fastcar_compile.ir.weight_checks import lost, require_finite
from fastcar_compile.support.machine import streamed

Make = Callable[[Tensor], tuple[Tensor, ...]]
"""One tensor -> what is stored instead of it. A quantisation takes float32 [N, K] and gives tensors whose first axis is
N, row n of each from row n of the weight only; so it may see the weight in blocks of rows."""

BLOCK_ELEMENTS = 1 << 20
"""Elements of a weight that are quantised at once: 4 MiB of float32, so that its temporaries stay in the cache."""


def quantized(quantize: Make, value: Tensor) -> tuple[Tensor, ...]:
    """`quantize(value)`; of a value on the meta device shapes and dtypes only, once per shape."""
    shapes = _quantized_shapes(quantize, tuple(value.shape))
    if value.is_meta:
        return shapes
    made = tuple(torch.empty(t.shape, dtype=t.dtype) for t in shapes)
    for begin, end in blocks_of_rows(value.shape):
        for whole, part in zip(made, quantize(value[begin:end]), strict=True):
            whole[begin:end] = part
    return made


@cache
def _quantized_shapes(quantize: Make, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return quantize(torch.empty(shape, device="meta"))


def blocks_of_rows(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Rows [begin, end) of a weight, `BLOCK_ELEMENTS` at a time."""
    rows, *rest = shape
    # A row that is longer than a block is a block of its own.
    step = max(1, BLOCK_ELEMENTS // max(1, torch.Size(rest).numel()))
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


Block = tuple[str, int, Tensor]
"""Rows of a weight: its name, the first row, the rows."""


@contextmanager
def _one_thread_per_operator() -> Generator[None]:
    """Blocks run side by side, so that an operator on one of them should not: its threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Source(Protocol):
    """Where weights come from; floating point of a checkpoint comes out as float32."""

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor of this name, or its rows [begin, end) along the first axis; from several threads at once."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        ...

    def origin(self, name: str, digest: Callable[[Path], str]) -> object:
        """What its values are, as JSON: the digest of a file, and where in the file they are."""
        ...


@dataclass(frozen=True)
class Recipe:
    """How `names` are made out of `source`, itself a weight or the result of a recipe.

    Attributes:
        source: its name. names: one for each result of `make`. make: the function.
        by_rows: whether `make` may be given blocks of rows.
    """

    source: str
    names: tuple[str, ...]
    make: Make
    by_rows: bool


@dataclass
class LazyWeights:
    """Weights of a checkpoint. Only the last result of a recipe is kept, so that its names cost one reading.

    Attributes:
        source: what they are read from.
        recipes: result name -> how it is made.
        masks: names of the source that may be infinite; None: what is read was checked before.
        lost: name of a weight and first row of a block -> the share of the weight's values that are lost in the block.
    """

    source: Source
    recipes: dict[str, Recipe] = field(default_factory=dict[str, Recipe])
    masks: AbstractSet[str] | None = None
    lost: dict[tuple[str, int], float] = field(default_factory=dict[tuple[str, int], float])
    _last: tuple[Recipe, tuple[Tensor, ...]] | None = None

    def derive(self, names: Sequence[str], source: str, make: Make, *, by_rows: bool = True) -> None:
        """Let `names` be the results of `make(source)`."""
        recipe = Recipe(source, tuple(names), make, by_rows)
        self.recipes |= dict.fromkeys(names, recipe)

    def repeat(self, old: str, new: str) -> None:
        """Copy the recipes of names below the module path `old` for the same names below `new`."""

        def moved(name: str) -> str:
            # A source outside of the layer, such as a shared weight, keeps its name.
            return f"{new}.{name.removeprefix(f'{old}.')}" if name.startswith(f"{old}.") else name

        for recipe in {id(r): r for n, r in self.recipes.items() if n.startswith(f"{old}.")}.values():
            self.derive([moved(n) for n in recipe.names], moved(recipe.source), recipe.make, by_rows=recipe.by_rows)

    def load(self, name: str) -> Tensor:
        """The tensor, made from its recipe if it has one."""
        recipe = self.recipes.get(name)
        if recipe is None:
            return self._read(name)
        # Names of one recipe are mostly asked for in turn: weight, then scales.
        if self._last is None or self._last[0] is not recipe:
            self._last = None  # before the next one is made, so that only one is in memory
            self._last = (recipe, self._cook(recipe))
        return self._last[1][recipe.names.index(name)]

    def origin(self, name: str, digest: Callable[[Path], str]) -> list[Any] | None:
        """Return what decides the values of a tensor, as JSON; None: a function of a recipe has no name of its own.

        Args:
            digest: path of a file -> its SHA-256.
        """
        recipe = self.recipes.get(name)
        if recipe is None:
            return ["stored", self.source.origin(name, digest)]
        module, function = (getattr(recipe.make, field, "") for field in ("__module__", "__qualname__"))
        origin = self.origin(recipe.source, digest)
        if origin is None or not module or not function or "<" in function:
            return None
        return [module, function, recipe.by_rows, recipe.names.index(name), origin]

    def blocks(self, names: Iterable[str]) -> Iterator[Block]:
        """Yield these tensors in blocks of rows, each row once; a recipe of several names is read once.

        Blocks are made on all cores, and only a few of them are in memory. A tensor without rows, or whose recipe wants
        a whole one, comes as one block.
        """
        wanted = set(names)
        parts = dict.fromkeys(self.recipes.get(name) or name for name in names)  # in order, each once
        # `groupby` joins neighbours only, so the order of the names is kept.
        for whole, some in groupby(parts, self._is_whole):
            if whole:
                found = (n for part in some for n in (part.names if isinstance(part, Recipe) else (part,)))
                yield from ((name, 0, self.load(name)) for name in found if name in wanted)
            else:
                with _one_thread_per_operator():
                    sources = ((part, part.source if isinstance(part, Recipe) else part) for part in some)
                    blocks = [
                        (part, rows) for part, name in sources for rows in blocks_of_rows(self.source.shape(name))
                    ]
                    for made in streamed(self._rows, blocks):
                        yield from (block for block in made if block[0] in wanted)

    def _is_whole(self, part: Recipe | str) -> bool:
        if isinstance(part, Recipe):
            return not part.by_rows or part.source in self.recipes
        return not self.source.shape(part)

    def _rows(self, job: tuple[Recipe | str, tuple[int, int]]) -> list[Block]:
        """Return rows of the results of a recipe, or of a tensor of the source."""
        part, rows = job
        if isinstance(part, str):
            return [(part, rows[0], self._read(part, rows))]
        made = self._make(part, self._read(part.source, rows), rows[0])
        return [(name, rows[0], tensor) for name, tensor in zip(part.names, made, strict=True)]

    def _read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        value = self.source.read(name, rows)
        if self.masks is not None:
            require_finite(name, value, is_mask=name in self.masks)
        return value

    def _make(self, recipe: Recipe, value: Tensor, row: int = 0) -> tuple[Tensor, ...]:
        made, name = recipe.make(value), recipe.source
        if recipe.by_rows and (count := lost(name, value, made)):
            # A recipe's source that is no weight of the file comes whole.
            whole = value.shape if name in self.recipes else self.source.shape(name)
            self.lost[name, row] = count / torch.Size(whole).numel()
        return made

    def losses(self) -> dict[str, float]:
        """Return the share of its values that each weight lost, of those that were made."""
        shares: dict[str, float] = {}
        for (name, _), share in sorted(self.lost.items()):
            shares[name] = shares.get(name, 0.0) + share
        return shares

    def _cook(self, recipe: Recipe) -> tuple[Tensor, ...]:
        if not recipe.by_rows or recipe.source in self.recipes:
            return self._make(recipe, self.load(recipe.source))
        shapes = _quantized_shapes(recipe.make, self.source.shape(recipe.source))
        results = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in zip(recipe.names, shapes, strict=True)}
        for name, row, part in self.blocks(recipe.names):
            results[name][row : row + len(part)] = part
        return tuple(results.values())


class Parameters(Mapping[str, Tensor]):
    """Parameters by attribute path. Indexing gives the values; a lazy one is read anew each time and not kept.

    Args:
        attributes: what the graphs hold; a lazy parameter is a tensor on the meta device there.
        lazy: where the values of those come from.
    """

    def __init__(self, attributes: Mapping[str, Tensor], lazy: LazyWeights | None = None) -> None:
        self._attributes, self._lazy = dict(attributes), lazy

    def __getitem__(self, name: str) -> Tensor:
        value = self._attributes[name]
        if not value.is_meta:
            return value
        made = self._source(name).load(name)
        _require_same(name, made, value)
        return made

    def blocks(self, names: Iterable[str]) -> Iterator[Block]:
        """Yield parameters in blocks of rows, each row once, and those that are in memory as one block."""
        lazy = list[str]()
        for name in names:
            value = self._attributes[name]
            if value.is_meta:
                lazy.append(name)
            else:
                yield name, 0, value
        for name, row, part in self._source(lazy[0]).blocks(lazy) if lazy else ():
            value = self._attributes[name]
            # A scalar has no rows to slice.
            _require_same(name, part, value[row : row + len(part)] if value.dim() else value)
            yield name, row, part

    def _source(self, name: str) -> LazyWeights:
        """Return where the values of parameters come from that have none, such as this one."""
        if self._lazy is None:
            raise InternalError(f"parameter {name} has no value and no source")
        return self._lazy

    def __contains__(self, name: object) -> bool:
        """Whether there is a parameter of this name; Mapping's own test would read it."""
        return name in self._attributes

    def __iter__(self) -> Iterator[str]:
        return iter(self._attributes)

    def __len__(self) -> int:
        return len(self._attributes)

    def spec(self, name: str) -> Tensor:
        """Shape and dtype of a parameter, without reading it; its values may be missing (meta device)."""
        return self._attributes[name]

    def specs(self) -> dict[str, TensorSpec]:
        """Element types and shapes as files have them, without reading the parameters."""
        return {name: _spec_of(value) for name, value in self._attributes.items()}

    def pieces(self, names: Iterable[str]) -> Iterator[Piece]:
        """Yield the bytes of parameters in blocks of rows; a block is made when it is asked for."""
        for name, row, part in self.blocks(names):
            yield name, row * self.spec(name)[:1].nbytes if row else 0, octets(to_numpy(part))

    def origins(self, names: Iterable[str], digest: Callable[[Path], str]) -> list[object] | None:
        """Return what decides the values of parameters, as JSON.

        None: they are all in memory, where a cache of them saves nothing, or it cannot be said.

        Args:
            digest: path of a file -> its SHA-256.
        """
        if self._lazy is None:
            return None
        found = list[object]()
        for name in names:
            value = self._attributes[name]
            lazy = value.is_meta
            origin = self._lazy.origin(name, digest) if lazy else hashlib.sha256(octets(to_numpy(value))).hexdigest()
            if origin is None:
                return None
            found.append([name, str(value.dtype), list(value.shape), origin])
        return found

    def nbytes(self) -> int:
        """Bytes of all parameters, without reading them."""
        return sum(t.numel() * t.dtype.itemsize for t in self._attributes.values())


def _require_same(name: str, made: Tensor, value: Tensor) -> None:
    if made.shape != value.shape or made.dtype != value.dtype:
        found, expected = (f"{t.dtype} {list(t.shape)}" for t in (made, value))
        raise InternalError(f"parameter {name} was read as {found}, but the graph has {expected}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch type in `formats.dtypes`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of this name."""
    return getattr(torch, name)


def _spec_of(tensor: Tensor) -> TensorSpec:
    """Return element type and shape; the values may be missing."""
    return TensorSpec(DTYPES[dtype_name(tensor.dtype)], tuple(tensor.shape))


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return an array over the tensor's memory, or over a contiguous copy. numpy has no bfloat16 of its own."""
    spec, flat = _spec_of(tensor), tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return np.empty(spec.shape, spec.dtype.numpy)
    # By way of bytes: numpy knows bfloat16 only as a type of ml_dtypes, to which torch does not convert.
    return flat.view(torch.uint8).numpy().view(spec.dtype.numpy).reshape(spec.shape)


def to_torch(array: NDArray[Any]) -> Tensor:
    """Return a tensor over the array's memory."""
    if not array.size:
        return torch.empty(array.shape, dtype=torch_dtype(array.dtype.name))
    octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    flat = torch.from_numpy(octets)  # pyright: ignore[reportUnknownMemberType]  (torch does not type its argument)
    return flat.view(torch_dtype(array.dtype.name)).reshape(array.shape)


@dataclass(frozen=True)
class WrittenTensors:
    """Tensors that were written to files, as a source of weights: nothing is made a second time.

    Attributes:
        root: folder of the files. places: where each tensor is. specs: its element type and shape.
    """

    root: Path
    places: Mapping[str, TensorPlacement]
    specs: Mapping[str, TensorSpec]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return the tensor as it was written, or its rows [begin, end): a private map of the file.

        A page is read when it is first touched. Writing to the tensor changes the tensor only.
        """
        place, spec = self.places[name], self.specs[name]
        if not place.length:
            return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype.name))
        # Mode "c" is copy on write: the file stays as it is.
        data = np.memmap(self.root / place.file, np.uint8, "c", offset=place.offset, shape=place.length)
        whole = to_torch(np.asarray(data).view(spec.dtype.numpy).reshape(spec.shape))
        return whole if rows is None else whole[slice(*rows)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return its shape."""
        return self.specs[name].shape

    def origin(self, name: str, digest: Callable[[Path], str]) -> list[object]:
        """Return its file's digest, and the bytes in the file."""
        place = self.places[name]
        return [digest(self.root / place.file), place.offset, place.length]
