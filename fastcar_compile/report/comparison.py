"""Two artifacts, or two graph files, side by side: options, graphs, weights and predicted figures."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.codegen.hls.model.system import estimate
from fastcar_compile.codegen.hls.model.workload import design_of, program_of, workload_of
from fastcar_compile.errors import ArtifactError
from fastcar_compile.support import limits
from fastcar_compile.support.values import path_of, read_json

PREDICTED = ("tokens_per_second", "bytes_per_step", "energy_per_token_j", "resources")
_NUMBER = re.compile(r"(?:(?<=[a-z]\.)|(?<=_)|(?<='layer': ))\d+(?![A-Za-z0-9])")  # of a layer or a node: `add_12`
_HINT = "`fastcar opt -o NAME.json` and an artifact's graph/ hold graph files"


class Change(NamedTuple):
    """A difference at a path; None: a side has no value. In `places` layers, "*" is the layer's number in the path."""

    path: str
    a: Any
    b: Any
    places: int = 1


def diff(a: str | Path, b: str | Path) -> dict[str, tuple[Change, ...]]:
    """Return the differences of two artifacts, or of two graph files, by part; empty: they are equal. No code is run.

    The parts are "options", "versions", "figures", "graphs", "weights", "sections" and "files". Every file is checked.

    Raises:
        ArtifactError: a side is damaged or malformed, or one side is an artifact and the other a graph file.
    """
    left, right = path_of("a", a), path_of("b", b)
    if left.is_dir() != right.is_dir():
        what = f"{left}, {right}: only one of them is an artifact"
        raise ArtifactError(what, hint="compare two artifacts, or two graph files")
    one, other = (_artifact(path) if path.is_dir() else _graph_file(path) for path in (left, right))
    same = one.get("files") == other.get("files")  # so are the weights, which need not be read for it
    one["weights"], other["weights"] = ({}, {}) if same else tensors(one["weights"], other["weights"])
    return {part: found for part in one if (found := changes(one[part], other[part]))}


def _artifact(path: Path) -> dict[str, Any]:
    artifact = StoredArtifact(path)
    manifest, sections = artifact.manifest, artifact.manifest.model_dump(mode="json")
    figures: dict[str, Any] = {"bytes": sum(entry.size for entry in manifest.files.values())}
    if manifest.accelerator is not None:  # the share of replays is not known, so all MLPs are computed
        design, program = design_of(manifest, manifest.target), program_of(artifact)
        found = estimate(workload_of(manifest), manifest.target, design=design, program=program).to_json()
        figures |= {name: found[name] for name in PREDICTED}
    return {
        "options": sections.pop("options"),
        "versions": sections.pop("producer"),
        "figures": figures,
        "graphs": {name: _nodes_of(artifact.json(f"graph/{name}.json")) for name in ("before", "after")},
        "weights": artifact.arrays(),
        "files": {name: entry["sha256"] for name, entry in sections.pop("files").items()},
        "sections": sections,
    }


def _graph_file(path: Path) -> dict[str, Any]:
    data: Any = read_json(path, "graph file", ArtifactError, size=limits.GRAPH_BYTES, hint=_HINT)
    return {"graphs": _nodes_of(data), "sections": data}


def changes(a: Any, b: Any) -> tuple[Change, ...]:
    """Return the differences of two JSON values. Lists are aligned by name; equal changes of layers count as one."""
    groups: dict[tuple[str, ...], list[Change]] = {}
    for change in _leaves("", a, b):
        groups.setdefault(tuple(_NUMBER.sub("*", str(part)) for part in change), []).append(change)
    several = {key: same[0]._replace(path=key[0], places=len(same)) for key, same in groups.items()}
    return tuple(same[0] if len(same) == 1 else several[key] for key, same in groups.items())


def _leaves(path: str, a: Any, b: Any) -> Iterator[Change]:
    one, other = a or {}, b or {}
    if isinstance(one, dict) and isinstance(other, dict) and (one or other):
        for key in sorted(one | other):
            yield from _leaves(f"{path}.{key}" if path else key, one.get(key), other.get(key))
    elif all(isinstance(side, list) and all(isinstance(item, str | dict) for item in side) for side in (a, b)):
        names = [[_name(item) for item in side] for side in (a, b)]
        for tag, a0, a1, b0, b1 in SequenceMatcher(None, *names, autojunk=False).get_opcodes():
            if tag == "equal":
                for x, y in zip(a[a0:a1], b[b0:b1], strict=True):
                    yield from _leaves(f"{path}[{_name(x)}]", x, y)
            else:
                yield from (Change(f"{path}[{_name(x)}]", x, None) for x in a[a0:a1])
                yield from (Change(f"{path}[{_name(y)}]", None, y) for y in b[b0:b1])
    elif repr(a) != repr(b):  # 1 is not True
        yield Change(path, a, b)


def _name(item: Any) -> str:
    keys = [key for key in ("name", "instruction_set", "layer") if key in item] if isinstance(item, dict) else []
    return f"{keys[0]}_{item[keys[0]]}".removeprefix("name_") if keys else str(item)


def _nodes_of(file: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the graphs of a graph file, each as name of a node -> its type and arguments."""
    try:
        prefill = file.pop("prefill", None)
        return {"decode": _nodes(file.pop("decode")), "prefill": _nodes(prefill) if prefill else {}}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"this is not a graph file: {type(error).__name__}: {error}", hint=_HINT) from error


def _nodes(graph: dict[str, Any], branch: str = "") -> dict[str, str]:
    """Return type and operands of nodes, named by module and operator, so that a new node renames no other node."""
    names, found, seen = dict[str, str](), dict[str, str](), Counter[str]()
    for entry in graph["nodes"]:
        op, target, module = entry["op"], entry["target"], f"{branch}{entry.get('module', '')}"
        name = f"{module} {target if op == 'call_function' else f'{op} {target}'}".strip()
        seen[name] += 1
        names[entry["name"]] = name = name if seen[name] == 1 else f"{name} #{seen[name]}"
        text = json.dumps([entry.get("type"), *entry.get("args", []), *entry.get("kwargs", {}).items()])[1:-1]
        text = re.sub(r'\["torch\.(\w+)", (\[[\d, ]*\])\]', r"\1\2", text)
        found[name] = re.sub(r'\{"node": "(\w+)"\}', lambda m, of=f"{module} ": names[m[1]].removeprefix(of), text)
        if op == "get_attr" and target in graph["branches"]:
            found |= _nodes(graph["branches"][target], f"{branch}{target}/")
    return found


def tensors(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return types and shapes; for b, where these are equal, also the count and the largest of the differences."""
    one, other = ({name: f"{value.dtype}{list(value.shape)}" for name, value in side.items()} for side in (a, b))
    for name in dict(one.items() & other.items()):
        x, y, bits = a[name], b[name], f"u{a[name].itemsize}"
        if (at := x.view(bits) != y.view(bits)).any():
            gap = np.nan_to_num(np.abs(y[at].astype(np.float64) - x[at].astype(np.float64)), nan=np.inf, posinf=np.inf)
            other[name] = f"{at.sum()} of {at.size} elements differ, by at most {gap.max():.3g}"
    return one, other
