"""A Hugging Face folder, checked as a whole before anything is read, then read tensor by tensor."""

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from fastcar_compile.errors import CompileError, InternalError, attempt, count_text
from fastcar_compile.frontend.skeleton import CONFIG, Skeleton, StoredNames, load_config, read_config_json
from fastcar_compile.ir.weights import blocks_of_rows
from fastcar_compile.support import limits
from fastcar_compile.support.values import model_hint, read_json, refuse_pipe, warn

ADAPTERS = "adapter_config.json"
"""peft's file. Transformers then loads more than the weights of the model."""
FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is: file name in the folder, safetensors dtype, shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """A decoder on disk. Only headers are read when it is opened; a tensor is in memory only while it is used.

    Args:
        folder: config.json and *.safetensors, in one file or in shards with model.safetensors.index.json.

    Attributes:
        skeleton: the model of config.json without values.

    Raises:
        CompileError: everything that is wrong with the folder, at once: config, architecture, index, shards, and every
            tensor that is missing or whose shape or dtype is not what the config implies.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CompileError("there is no model folder", where=str(folder), hint=model_hint(folder))
        self.folder = folder
        problems: list[CompileError] = []
        skeleton = attempt(problems, partial(read_skeleton, folder))
        stated = getattr(skeleton.config, "transformers_weights", None) if skeleton else None
        files, listed = weight_files(folder, stated, problems)
        self.tensors = _headers(folder, files, problems, repeats=bool(listed))
        if skeleton is not None:
            self.skeleton = skeleton
            skeleton.untie(list(self._untied()))
            # Tensors of a shard that is missing or damaged are missing for that reason, which is reported already.
            unreadable = {PurePosixPath(p.where).name for p in problems}
            gone = [tensor for tensor, file in listed.items() if file in unreadable]
            names = skeleton.stored_names(gone)
            lost = {*names.stored, *names.converted}
            # Without an index, nobody knows which tensors an unreadable file held.
            if listed or not problems:
                problems += self._tensor_problems(lost)
        CompileError.raise_all(problems)

    @property
    def config(self) -> Any:
        """The transformers config."""
        return self.skeleton.config

    @cached_property
    def names(self) -> dict[str, str]:
        """Parameter path in the model -> tensor name in the files; tied parameters share one."""
        groups = [(group, self._stored(group)) for group in self.skeleton.parameter_groups]
        return {name: stored for group, stored in groups if stored is not None for name in group}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter at this path."""
        return self.tensors[self.names[name]].shape

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Value of the parameter at this path, or its rows [begin, end); floating point as float32.

        The file is closed again, so that what was read of it is not held in memory.

        Raises:
            CompileError: the file cannot be read any more.
        """
        return self._read(self.names[name], rows)

    def _read(self, stored: str, rows: tuple[int, int] | None = None) -> Tensor:
        place = self.folder / self.tensors[stored].file
        try:
            with safetensors.safe_open(place, framework="pt") as file:
                # A view of the mapped file must not outlive it here: `clone` copies where `float` would not.
                part = file.get_tensor(stored) if rows is None else file.get_slice(stored)[rows[0] : rows[1]]
                return part.float() if part.dtype in (torch.bfloat16, torch.float16) else part.clone()
        except (OSError, safetensors.SafetensorError) as error:
            raise CompileError(f"{stored} cannot be read: {error}", where=str(place), hint=HINT_COPY) from error

    def origin(self, name: str, digest: Callable[[Path], str]) -> list[str]:
        """Return the digest of the file that holds a parameter, and the tensor's name there."""
        stored = self.names[name]
        return [digest(self.folder / self.tensors[stored].file), stored]

    def model(self) -> PreTrainedModel:
        """The part of the model that is captured: `skeleton.captured_layers` layers, persistent buffers filled in."""
        model = self.skeleton.model(self.skeleton.captured_layers)
        stored = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            # Buffers that are not saved, such as rotary frequencies, were computed when the model was built.
            if name in stored:
                buffer.copy_(self.read(name))
        return model

    @cached_property
    def _names(self) -> StoredNames:
        return self.skeleton.stored_names(self.tensors)

    def _stored(self, group: Iterable[str]) -> str | None:
        """The name in the files of the first of a group of tied parameters that is there."""
        return next((self._names.stored[name] for name in group if name in self._names.stored), None)

    def _untied(self) -> Iterator[str]:
        """Yield the parameters that config.json ties to others, and of which the files have another value.

        Transformers ties parameters of which the files have one, or several with equal values.
        """
        for group in self.skeleton.parameter_groups:
            first, *others = [name for name in group if name in self._names.stored] or [""]
            yield from (name for name in others if not self._is_equal(self._names.stored[first], name))

    def _is_equal(self, first: str, name: str) -> bool:
        """Whether a stored tensor and a parameter are both as the config implies, and equal."""
        both, shape = (first, self._names.stored[name]), self.skeleton.shapes[name]
        if any(self.tensors[stored].shape != shape or self.tensors[stored].dtype not in FLOATS for stored in both):
            return False
        return all(torch.equal(*(self._read(stored, rows) for stored in both)) for rows in blocks_of_rows(shape))

    def _tensor_problems(self, skip: set[str]) -> list[CompileError]:
        problems: list[CompileError] = []
        for group in self.skeleton.parameter_groups:
            stored, shape = self._stored(group), self.skeleton.shapes[group[0]]
            if stored is None:
                problems += self._missing(group, skip)
                continue
            found = self.tensors[stored]
            place = str(self.folder / found.file)
            if found.shape != shape:
                what = f"{stored} has shape {list(found.shape)}, but config.json implies {list(shape)}"
                hint = "give the config.json that belongs to these weights"
                problems.append(CompileError(what, where=place, hint=hint))
            elif group[0] in self.skeleton.parameters and found.dtype not in FLOATS:
                hint = "save the model unquantised, in float32, bfloat16 or float16"
                problems.append(CompileError(f"{stored} holds {found.dtype}", where=place, hint=hint))
        return problems

    def _missing(self, group: tuple[str, ...], skip: set[str]) -> list[CompileError]:
        """Return the error of a parameter that no file has; none where its shard is lost, which is an error already."""
        what, hint = f"tensor {group[0]} is missing", HINT_COPY
        # Transformers computes such a parameter when it loads it. Here a parameter is read as it is stored.
        if converted := [self._names.converted[name] for name in group if name in self._names.converted]:
            what = f"transformers computes {group[0]} out of {converted[0]} when it loads this checkpoint"
            hint = "load it with from_pretrained, and compile the module, or save it again in today's form"
        elif not skip.isdisjoint(group):
            return []
        return [CompileError(what, where=str(self.folder), hint=hint)]


def read_skeleton(folder: Path) -> Skeleton:
    """Return the model of config.json without values.

    Raises:
        CompileError: config.json is missing, or cannot be compiled; or the folder has adapters.
    """
    if (folder / ADAPTERS).exists():
        what = f"the folder has adapters ({ADAPTERS}), which the compiler does not merge"
        hint = "merge them with peft's merge_and_unload, and save the model"
        raise CompileError(what, where=str(folder / ADAPTERS), hint=hint)
    data = read_config_json(folder)
    return Skeleton(load_config(folder), data["architectures"][0], str(folder / CONFIG))


def _headers(
    folder: Path, files: Iterable[str], problems: list[CompileError], *, repeats: bool
) -> dict[str, StoredTensor]:
    """Every tensor of the files, from their headers; a file that cannot be read is a problem.

    Args:
        repeats: a tensor may be in several files.
    """
    found: dict[str, StoredTensor] = {}
    for name in files:
        try:
            refuse_pipe(folder / name)
            with safetensors.safe_open(folder / name, framework="pt") as file:
                for tensor in file.keys():  # noqa: SIM118  (not a mapping)
                    if tensor in found and not repeats:
                        what = f"{tensor} is in {found[tensor].file} and in {name}, and there is no index"
                        hint = "remove the file that does not belong to the model"
                        problems.append(CompileError(what, where=str(folder), hint=hint))
                        break
                    view = file.get_slice(tensor)
                    found[tensor] = StoredTensor(name, view.get_dtype(), tuple(view.get_shape()))
        except (OSError, safetensors.SafetensorError) as error:
            what = f"{name} is damaged, or not a safetensors file: {error}"
            problems.append(CompileError(what, where=str(folder / name), hint=HINT_COPY))
    return found


class ConfigFolder(Checkpoint):
    """The decoder of a config.json. Its weights have shapes, and random values where a pass has to look at some.

    Args:
        folder: with config.json.

    Raises:
        CompileError: config.json is missing, or cannot be compiled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.tensors = folder, {}
        self.skeleton = read_skeleton(folder)
        self._dtype = getattr(self.config, "dtype", None) or torch.float32

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter at this path."""
        return self.skeleton.shapes[name]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Random values in the config's dtype, as float32; all rows are alike, so that they take no memory.

        Raises:
            InternalError: a scalar is asked for, which no pass looks at.
        """
        count, *rest = self.shape(name) or (0,)
        if not count:
            raise InternalError(f"{name} has no rows to make up")
        begin, end = rows or (0, count)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        row = torch.randn(rest, generator=generator).to(self._dtype).float()
        return row.expand(end - begin, *rest)

    def model(self) -> PreTrainedModel:
        """The part of the model that is captured; persistent buffers are as the architecture makes them."""
        return self.skeleton.model(self.skeleton.captured_layers)


def open_folder(folder: Path, *, weights: bool = True) -> Checkpoint:
    """Return the decoder of a folder; where no weights are needed, it may have none.

    Raises:
        CompileError: everything that is wrong with the folder.
    """
    has_weights = (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))
    if weights or not folder.is_dir() or has_weights:
        return Checkpoint(folder)
    return ConfigFolder(folder)


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HINT_COPY = "copy the whole folder again, or save it again with model.save_pretrained(folder)"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_PICKLED = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def weight_files(folder: Path, stated: str | None, problems: list[CompileError]) -> tuple[list[str], Mapping[str, str]]:
    """Return the files to read, of which the last one that has a tensor counts; and the index: tensor name -> file.

    Transformers reads the file that config.json states, else model.safetensors, else the shards of the index, else
    pickled weights. A folder that has none of these, which Transformers refuses, may have one whole set of shards, or
    other files. Weights that are left aside are warned of.

    Args:
        stated: `transformers_weights` of config.json.
        problems: gets what is wrong with the index, and shards that are missing.
    """
    first = next((name for name in ([stated] if stated else [SINGLE, INDEX]) if (folder / name).is_file()), None)
    listed: Mapping[str, str] = {}
    if first is None:
        files = attempt(problems, partial(_files_without_index, folder, stated)) or []
    elif first.endswith(".json"):
        listed = attempt(problems, partial(_weight_map, folder / first)) or {}
        files = _shards(folder, first, listed, problems)
    else:
        files = [first]
    found = {file.name for pattern in _WEIGHTS for file in folder.glob(pattern)}
    if files and (aside := sorted(found - {first, *files})):
        read = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        warn(f"the weights of {folder} are those of {read}; left aside: {', '.join(aside)}", 3)
    return files, listed


def _weight_map(file: Path) -> Mapping[str, str]:
    """Tensor name -> shard, of the index."""
    try:
        index = read_json(file, "index of the shards", CompileError, size=limits.INDEX_BYTES, hint=HINT_COPY)
        listed = index["weight_map"]
        if not all(isinstance(v, str) and PurePosixPath(v).name == v for v in listed.values()):
            raise ValueError("a shard is not a plain file name")
        return listed
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"the index of the shards is malformed: {error}"
        raise CompileError(what, where=str(file), hint=HINT_COPY) from error


def _files_without_index(folder: Path, stated: str | None) -> list[str]:
    """The weight files of a folder that has neither `SINGLE` nor an index."""
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin") if _PICKLED.fullmatch(file.name))
    if stated:
        what = f"the model folder has no {stated}, which transformers_weights of config.json names"
        raise CompileError(what, where=str(folder), hint=HINT_COPY)
    if pickled or not files:
        what = f"the weights are in {pickled[0]}" if pickled else "the model folder has no *.safetensors file"
        hint = "save it with model.save_pretrained(folder, safe_serialization=True)"
        raise CompileError(f"{what} (pickled weights are not read)", where=str(folder), hint=hint)
    shards: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in files:
        if (match := _SHARD.fullmatch(name)) and 0 < int(match[2]) <= int(match[3]):
            shards[match[1], match[3]].append(name)
    whole = [names for (_, count), names in shards.items() if len(names) == int(count)]
    # Several sets cannot be told apart: a tensor is in two files then, which is refused.
    return whole[0] if len(whole) == 1 else files


def _shards(folder: Path, index: str, listed: Mapping[str, str], problems: list[CompileError]) -> list[str]:
    """The shards that are there; those that the index names but the folder lacks are problems."""
    names = sorted(set(listed.values()))
    present = [n for n in names if (folder / n).is_file()]
    for name in sorted(set(names) - set(present)):
        held = sum(shard == name for shard in listed.values())
        what = f"shard {name} is missing; {index} puts {count_text(held, 'tensor')} there"
        problems.append(CompileError(what, where=str(folder / name), hint=HINT_COPY))
    return present
