"""Files whose code runs where they are loaded without care: it makes the folder that `Trap` names."""

import copy
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decoders import PlainDecoder

Json = Any
Parts = dict[str, bytes]
PROGRAM = "models/model.json"


class Trap:
    """Unpickling makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (source(self.place),)


def source(place: Path) -> str:
    """An expression that makes the folder."""
    return f"__import__('os').makedirs({str(place)!r}, exist_ok=True)"


def exported() -> torch.export.ExportedProgram:
    """The step of the plain decoder."""
    inputs = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "cache_position": torch.arange(1)}
    return torch.export.export(PlainDecoder().eval(), (), inputs, strict=False)


def parts_of(program: torch.export.ExportedProgram) -> Parts:
    """The parts of its .pt2 file by name."""
    file = io.BytesIO()
    torch.export.save(program, file)
    with zipfile.ZipFile(file) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write(path: Path, parts: Parts) -> Path:
    """Write the parts as torch lays them out."""
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in parts.items():
        if not name.startswith(".data/") and name != "byteorder":
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return path


def pickled(place: Path) -> bytes:
    """A file of torch.save whose unpickling makes the folder."""
    file = io.BytesIO()
    torch.save({"x": Trap(place)}, file)
    return file.getvalue()


def edited(parts: Parts, name: str, edit: Callable[[Json], object]) -> Parts:
    """The parts with one JSON part changed."""
    data = copy.deepcopy(json.loads(parts[name]))
    edit(data)
    return parts | {name: json.dumps(data).encode()}


def put(*path: Any, value: Any) -> Callable[[Json], None]:
    """Return the edit that sets one value of a JSON document."""

    def edit(data: Json) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return edit


def nodes(program: Json) -> list[Json]:
    return program["graph_module"]["graph"]["nodes"]


def evil_parts(parts: Parts, place: Path) -> dict[str, Parts]:
    """Files whose loading with torch.export.load makes the folder, by what is evil about them."""

    def first(**meta: Json) -> Callable[[Json], object]:
        return lambda data: next(iter(data["config"].values())).update(meta)

    weights, constants = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"
    code = source(place)

    def tree(data: Json) -> None:
        context = json.dumps([{"__enum__": True, "fqn": "this:s", "name": "x"}])
        spec = {"type": "builtins.dict", "context": context, "children_spec": []}
        data["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, spec])

    def sizes(data: Json) -> None:
        next(iter(data["graph_module"]["graph"]["tensor_values"].values()))["sizes"][0] = {
            "as_expr": {"expr_str": code, "hint": None}
        }

    def rename(data: Json) -> None:
        """The name of an argument, with a default that is evaluated where the code of the graph is made."""
        graph = data["graph_module"]["graph"]
        old = graph["inputs"][-1]["as_tensor"]["name"]
        new = f"x={code}"
        text = json.dumps(data).replace(json.dumps(old), json.dumps(new))
        data.clear()
        data.update(json.loads(text))

    evil = pickled(place)
    return {
        "sample inputs": parts | {"data/sample_inputs/model.pt": evil},
        "a pickled weight": edited(parts, weights, first(use_pickle=True)) | {"data/weights/weight_0": evil},
        "a pickled constant": edited(parts, constants, first(use_pickle=True)) | {"data/constants/tensor_0": evil},
        "weights of an older form": parts | {"data/weights/model.pt": evil},
        "constants of an older form": parts | {"data/constants/model.pt": evil},
        "an opaque constant": edited(parts, constants, first(path_name="opaque_obj_0", use_pickle=True))
        | {"data/constants/opaque_obj_0": pickle.dumps(Trap(place))},
        "a symbolic size": edited(parts, PROGRAM, sizes),
        "a name": edited(parts, PROGRAM, rename),
        "a module of a pytree": edited(parts, PROGRAM, tree),
    }


def refused_operators() -> list[str]:
    """Operators that no file may ask for."""
    return [
        "torch.os.system",
        "torch.load",
        "torch.ops.load_library",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.__class__.mro",
        "torch.ops.higher_order.triton_kernel_wrapper_functional",
        "_operator.methodcaller",
        "#x:y",
        "",
    ]
