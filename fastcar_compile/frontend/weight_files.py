"""Which files of a model folder hold its weights: those that `from_pretrained` of Transformers reads."""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from fastcar_compile.errors import CompileError, attempt, count_text
from fastcar_compile.support import limits
from fastcar_compile.support.strict_json import read_json
from fastcar_compile.support.values import warn

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
