"""Compare two artifacts, or two graph files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from fastcar_compile import limits
from fastcar_compile.artifact.layout import GRAPH_AFTER, GRAPH_BEFORE, weight_files
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.comparison.fields import field_changes
from fastcar_compile.comparison.figures import figures
from fastcar_compile.comparison.graphs import compare_graphs
from fastcar_compile.comparison.report import Comparison, GraphComparison, TensorChange
from fastcar_compile.comparison.weights import weight_changes
from fastcar_compile.errors import ArtifactError
from fastcar_compile.strict_json import read_json
from fastcar_compile.values import path_of

GRAPHS = ("decode", "prefill")
_APART = {"options", "files", "producer", "schema_version"}
"""Fields of a manifest that are compared by themselves."""


def diff(a: str | Path, b: str | Path) -> Comparison:
    """Compare two artifacts by options, graphs, weights and predicted figures; or two graph files.

    Nothing of the artifacts is run. Every file is checked first.

    Raises:
        ArtifactError: one is damaged or malformed, or one is an artifact and the other a graph file.
    """
    left, right = path_of("a", a), path_of("b", b)
    if left.is_dir() != right.is_dir():
        what = f"{left} and {right} are an artifact and a graph file"
        raise ArtifactError(what, hint="compare two artifacts, or two graph files")
    if left.is_dir():
        return _artifacts(StoredArtifact(left), StoredArtifact(right))
    one, other = _graph_file(left), _graph_file(right)
    rest = [{key: value for key, value in graph.items() if key not in GRAPHS} for graph in (one, other)]
    graphs = _graphs("", one, other)
    return Comparison(a=str(a), b=str(b), sections=field_changes(*rest), graphs=graphs)


def _artifacts(a: StoredArtifact, b: StoredArtifact) -> Comparison:
    one, other = (artifact.manifest.model_dump(mode="json") for artifact in (a, b))
    digests = [{name: entry.sha256 for name, entry in artifact.manifest.files.items()} for artifact in (a, b)]
    graphs: list[GraphComparison] = []
    for label, name in (("before", GRAPH_BEFORE), ("after", GRAPH_AFTER)):
        if digests[0].get(name) != digests[1].get(name):
            graphs += _graphs(f"{label}/", a.json(name), b.json(name))
    return Comparison(
        a=str(a.path),
        b=str(b.path),
        options=field_changes(one["options"], other["options"]),
        sections=field_changes(*({k: v for k, v in each.items() if k not in _APART} for each in (one, other))),
        versions=field_changes(one["producer"], other["producer"]),
        graphs=tuple(graphs),
        weights=_weights(a, b),
        figures=field_changes(figures(a), figures(b)),
        files=tuple(sorted(name for name, _ in dict(digests[0].items() ^ digests[1].items()).items())),
    )


def _weights(a: StoredArtifact, b: StoredArtifact) -> tuple[TensorChange, ...]:
    """Nothing where the files are equal, which is known without reading a tensor."""
    digests = [
        [artifact.manifest.files[name].sha256 for name in weight_files(artifact.manifest.files)] for artifact in (a, b)
    ]
    return () if digests[0] == digests[1] else weight_changes(a.arrays(), b.arrays())


def _graphs(prefix: str, a: dict[str, Any], b: dict[str, Any]) -> tuple[GraphComparison, ...]:
    try:
        found = [compare_graphs(f"{prefix}{name}", a[name], b[name]) for name in GRAPHS]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        hint = "compile the model again, or write the file again with `fastcar opt`"
        raise ArtifactError(f"a graph file is malformed: {type(error).__name__}: {error}", hint=hint) from error
    return tuple(graph for graph in found if graph is not None)


def _graph_file(path: Path) -> dict[str, Any]:
    hint = "`fastcar opt -o NAME.json` and an artifact's graph/ hold graph files"
    data: object = read_json(path, "graph file", ArtifactError, size=limits.GRAPH_BYTES, hint=hint)
    if not isinstance(data, dict) or "decode" not in data:
        raise ArtifactError("the file holds no graph", where=str(path), hint=hint)
    return {"prefill": None} | cast("dict[str, Any]", data)
