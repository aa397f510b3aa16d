"""The inspection page: one HTML file that holds its data, style and scripts, and loads nothing."""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np

from fastcar_compile.artifact.explain import order_text, rows_text
from fastcar_compile.artifact.layout import GRAPH_AFTER, GRAPH_BEFORE, HLS
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.errors import InputError, count_text
from fastcar_compile.report.page.graphs import Json, PageGraph, facts_of, page_graphs, prefill_graphs
from fastcar_compile.report.page.tables import Decisions, memory_page, replay_page, speed_page
from fastcar_compile.support.values import check_kind, path_of

LINK = f"{HLS}/link.cfg"
STYLES = ("parts.css", "page.css", "graph.css")
BASE = "base.css"
"""Styles that all pages of fastcar share, before the styles of this page."""
SCRIPTS = (
    *("dagre.min.js", "core.js", "navigation.js", "layout.js", "draw.js", "overview.js", "graph.js", "details.js"),
    *("search.js", "replay.js", "time_drawing.js", "time_line.js", "speed.js", "memory.js", "main.js"),
)
"""Scripts in the order in which the page runs them. dagre is a library (dagre.LICENSE.txt)."""


def inspect(artifact: StoredArtifact, path: str | Path, decisions: Decisions | None = None) -> None:
    """Write an artifact's inspection page, one HTML file. The same artifact and decisions give the same bytes.

    Args:
        artifact: an artifact that `compile` or `load` returned.
        decisions: replay decisions of a run, bool [forwards, layers, rows], such as `session.stats.decisions`; None:
            the page has no heat map.

    Raises:
        InputError: the decisions belong to another decoder, or the file cannot be written.
    """
    check_kind("the artifact", artifact, StoredArtifact, "what `compile` or `load` returns")
    page = path_of("the page", path)
    text = page_html(page_data(artifact, decisions))
    try:
        page.write_text(text, "utf-8")
    except OSError as error:
        raise InputError(f"the page cannot be written: {error.strerror}", where=str(page)) from error


def page_data(artifact: StoredArtifact, decisions: Decisions | None = None) -> Json:
    """Return the content of the page.

    Raises:
        InputError: the decisions belong to another decoder.
    """
    manifest = artifact.manifest
    if decisions is not None:
        _check(decisions, manifest)
    files_of_graphs = artifact.json(GRAPH_BEFORE), artifact.json(GRAPH_AFTER)
    before, after = page_graphs(*files_of_graphs)
    prefill_before, prefill_after = prefill_graphs(*files_of_graphs) or (None, None)
    passes = [*_passes(manifest, after)]
    graphs = [graph for graph in (before, after, prefill_before, prefill_after) if graph is not None]
    keys = {n.reason for graph in graphs for n in graph.nodes} | {line["name"] for line in passes}
    # The linker's configuration; an artifact without kernels has none.
    link = artifact.files.data(LINK).decode("utf-8") if LINK in manifest.files else ""
    layer_of = {node.op: node.layer for node in after.nodes if node.kind == "weight"}
    named = {"before": before, "after": after, "prefill_before": prefill_before, "prefill_after": prefill_after}
    return {
        "name": artifact.path.resolve().name,
        "facts": _facts(manifest),
        "passes": passes,
        **{name: graph.model_dump(mode="json", exclude_defaults=True) for name, graph in named.items() if graph},
        "reasons": {key: manifest.pipeline.reason(*key.split(":", 1)) for key in sorted(keys - {""})},
        "replay": replay_page(manifest, decisions),
        "speed": speed_page(artifact, decisions),
        "memory": memory_page(manifest, artifact.arrays(), layer_of, link),
        "files": [{"name": n, "bytes": f.size, "sha256": f.sha256} for n, f in sorted(manifest.files.items())],
    }


def page_html(data: Json) -> str:
    """Return the page. Its policy allows the scripts and styles inside of it, and no request.

    Data is JSON in a block that no browser runs; `<` is escaped, so no text of a model can end the block. Half of a
    surrogate pair, which no encoding has, is escaped too: a name of a file can hold one.
    """
    folder = files("fastcar_compile.report.page") / "static"
    sheets = (folder / BASE, *(folder / name for name in STYLES))
    style = "\n".join(sheet.read_text("utf-8") for sheet in sheets)
    script = "\n".join((folder / name).read_text("utf-8") for name in SCRIPTS)
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    safe = re.sub("[&<>\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)
    parts = {"style": style, "script": script, "style_hash": _hash(style), "script_hash": _hash(script)}
    return Template((folder / "page.html").read_text("utf-8")).substitute(parts, data=safe)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _check(decisions: Decisions, manifest: Manifest) -> None:
    """Raise InputError for decisions of another decoder."""
    check_kind("decisions", decisions, np.ndarray, "bool [forwards, layers, rows], or None")
    expected = (manifest.decoder.config.num_layers, manifest.decoder.config.batch_size)
    if decisions.dtype != np.bool_ or decisions.ndim != 3 or decisions.shape[1:] != expected or not len(decisions):
        sizes = f"{count_text(expected[0], 'layer')} and {count_text(expected[1], 'row')}"
        what = f"the decisions are {decisions.dtype} {list(decisions.shape)}, the artifact has {sizes}"
        raise InputError(what, hint="record them with `fastcar run --trace` on this artifact")


def _passes(manifest: Manifest, after: PageGraph) -> Iterator[Json]:
    """Yield the work of every pass; made: nodes of the rewritten graph that the pass made."""
    made = Counter(node.made_by for node in after.nodes)
    for entry in manifest.pipeline.log:
        spec, _, outcome = entry.rpartition(": ")
        name, brace, options = spec.partition("{")
        modified = outcome == "modified"
        yield {"name": name, "options": brace + options, "modified": modified, "made": made[name], "reason": name}


def _facts(manifest: Manifest) -> list[Json]:
    """Return target, sizes, numbers and versions."""
    options, config, target = manifest.options, manifest.decoder.config, manifest.target
    sparse = options.sparse_attention
    window = "all positions" if sparse is None else f"the first {sparse.sinks} and the last {sparse.window} tokens"
    head = "none (hidden states out)" if config.vocab_size is None else f"{config.vocab_size} tokens"
    rows = {
        "key": {
            "target": target.name,
            "layers": config.num_layers,
            "hidden size": config.hidden_size,
            "a decode step": rows_text(config.batch_size, config.rows),
            "order": order_text(options),
            "positions": config.max_seq_len,
            "tokens per frame": config.tokens_per_frame,
        },
        "decoder": {"input": config.input_name, "vocabulary": head, "prefill chunk": config.prefill_chunk or "none"},
        "options": {
            "board": target.description,
            "offload": options.offload,
            "weights": "float32" if options.quant == "none" else options.quant,
            "keys and values": options.kv,
            "numerics": options.numerics,
            "attention reads": window,
            "libraries": "; ".join(v.instruction_set for v in manifest.host.variants) or "none",
        },
        "written by": dict(sorted(manifest.producer.items())),
    }
    return [fact for group, lines in rows.items() for fact in facts_of(lines, group)]
