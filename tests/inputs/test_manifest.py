"""A manifest is read only as it was written: damage, other types and contradictions are refused by name."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from manifests import layer_part, sections, stored_thresholds

from fastcar_compile.artifact import sections as parts
from fastcar_compile.artifact.digest import FileEntry
from fastcar_compile.artifact.manifest import Manifest, sealed
from fastcar_compile.artifact.reader import parse_manifest
from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.errors import ArtifactError
from fastcar_compile.ir.types import ReplayFacts

from .evil import put

Json = dict[str, Any]


def whole() -> Manifest:
    """Replay, libraries of two CPUs, an ONNX model and thresholds, over a decoder that was never compiled."""
    replay = ReplayFacts(gate="tas", threshold=0.5)
    names = dict(sections().decoder)
    program = parts.ProgramPart(
        function="decode", check="check_decode", inputs=names["inputs"], params=("w",), outputs=names["outputs"]
    )
    programs = parts.ProgramsPart(library="host/a.so", decode=program)
    host = parts.HostSection(
        variants=(parts.VariantPart(instruction_set="avx2", triple="x86_64-linux-gnu", flags=(), programs=programs),),
        board=parts.BoardPart(
            triple="aarch64-linux-gnu", cpu="cortex-a53", instruction_set="neon", compiler="g++", linked=True,
            programs=programs,
        ),
    )  # fmt: skip
    changed = sections(
        options=CompileConfig(
            target="zcu102", tokens_per_frame=4, max_seq_len=32, batch_size=2, replay=ReplayConfig(threshold=0.5)
        ),
        layers=parts.LayersSection(layers=tuple(layer_part(layer, replay) for layer in range(3))),
        host=host,
        onnx=parts.OnnxSection(model="graph/decoder.onnx"),
        thresholds=stored_thresholds(0.5, None, float("inf")),
    )
    files = {name: FileEntry(sha256="ab" * 32, size=1) for name in ("host/a.so", "graph/decoder.onnx", "a")}
    return Manifest(producer={"python": "3.11"}, files=files, **dict(changed))


BYTES = whole().to_bytes()
DATA: Json = json.loads(BYTES)


def refused(content: bytes) -> str:
    with pytest.raises(ArtifactError) as caught:
        parse_manifest(content, "manifest.json")
    assert (caught.value.where, bool(caught.value.hint)) == ("manifest.json", True)
    return caught.value.what


def test_it_is_read_as_it_was_written() -> None:
    assert parse_manifest(BYTES, "") == whole()


def drop(*path: Any) -> Callable[[Json], None]:
    def edit(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return edit


CONFIG, STATE = ("decoder", "config"), ("decoder", "state", 0)
SPARSE = {"window": 8, "sinks": 0, "positions": "absolute"}
LAYER = ("layers", "layers", 0)
HUGE = [
    {"dtype": "float32", "layer": 0, "name": str(number), "role": "gate_cache", "shape": [4, 2, 2**30]}
    for number in range(40)
]
HUGE_CALL = {"max_seq_len": 2**28, "prefill_chunk": 2**28}
EDITS: dict[str, tuple[Callable[[Json], None], str]] = {
    "max_seq_len of a million": (put(*CONFIG, "max_seq_len", value=10**6), "options.max_seq_len is 32"),
    "no rows": (put(*CONFIG, "batch_size", value=0), "batch_size is 0, not 1 to"),
    "a billion layers": (put(*CONFIG, "num_layers", value=10**9), "more than 1000"),
    "a prefill chunk beyond the cache": (put(*CONFIG, "prefill_chunk", value=2**28), "prefill_chunk is 268435456, max"),
    "a huge prefill call": (lambda data: data["decoder"]["config"].update(HUGE_CALL), "larger than 1 GiB"),
    "a shape of another rank": (put(*STATE, "shape", value=[2, 4, 32]), "layer 0 says"),
    "a huge shape": (put(*STATE, "shape", value=[2, 4, 32, 2**40]), "impossible shape"),
    "huge memory": (put("decoder", "state", value=HUGE), "larger than any machine's memory"),
    "an unknown element type": (put(*STATE, "dtype", value="float8"), "there is no element type"),
    "a state of no layer": (put(*STATE, "layer", value=7), "is of layer 7 of 3"),
    "a state twice": (put(*STATE, "name", value="value_cache_0"), "two states have the name"),
    "a ring that is a full cache": (put(*STATE, "sinks", value=2), "keeps 2 sinks, layer 0 says None"),
    "key heads": (put(*LAYER, "attention", "num_kv_heads", value=3), "query heads"),
    "layers in another order": (put(*LAYER, "layer", value=1), "layers are not those from 0 to 2"),
    "two gates": (put(*LAYER, "replay", "gate", value="input_delta"), "several gates"),
    "replay that was not asked for": (put("options", "replay", value=None), "options.replay is null"),
    "sparse attention": (put("options", "sparse_attention", value=SPARSE), "are not both there"),
    "replay that says nothing": (put("options", "replay", value={}), "options: replay lacks gate, threshold"),
    "thresholds of other layers": (put("thresholds", "values", value=[0.5]), "thresholds of gate tas for 1 layer"),
    "a threshold that is NaN": (put("thresholds", "values", 0, value="nan"), "thresholds.values"),
    "a file outside": (put("files", value={"../x": {"sha256": "ab" * 32, "size": 1}}), "files that are refused"),
    "itself a file": (put("files", "manifest.json", value={"sha256": "ab" * 32, "size": 1}), "is reserved"),
    "a digest in capitals": (put("files", "a", "sha256", value="AB" * 32), "files.a.sha256"),
    "no target": (drop("target"), "target: Field required"),
    "an unknown field": (put("more", value=1), "more: Extra inputs"),
    "a section of another version": (put("host", "version", value=99), "host: version 99"),
    "a schema as a float": (put("schema_version", value=5.0), "schema version 5.0"),
    "an unknown quantisation": (put("options", "quant", value="w1a1"), "unknown quantisation"),
    "gate weights in a file": (put("options", "replay", "gate_weights", value="/dev/stdin"), "weights is not a digest"),
    "half of a surrogate pair": (put("pipeline", "passes", value="\ud800"), "not valid JSON"),
}


def resealed(edit: Callable[[Json], None]) -> bytes:
    """The manifest after an edit, as someone would write it who knows its form."""
    data = copy.deepcopy(DATA)
    edit(data)
    try:
        return sealed(data)
    except UnicodeEncodeError:
        return json.dumps(data).encode()


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_refused_by_name(name: str) -> None:
    edit, text = EDITS[name]
    assert text in refused(resealed(edit))


def test_another_form_is_refused() -> None:
    assert "damaged" in refused(json.dumps(DATA).encode())
    assert "damaged" in refused(BYTES + b"\n")
    assert "damaged" in refused(BYTES.replace(b'"replay": 0.5', b'"replay": 1e999'))
