"""A manifest is read only as it was written: damage, other types and contradictions are refused by name."""

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    "another frame": (put(*CONFIG, "tokens_per_frame", value=5), "options.tokens_per_frame is 4"),
    "no rows": (put(*CONFIG, "batch_size", value=0), "batch_size is 0, not 1 to"),
    "negative": (put(*CONFIG, "hidden_size", value=-1), "hidden_size is -1"),
    "a billion layers": (put(*CONFIG, "num_layers", value=10**9), "more than 1000"),
    "a prefill chunk beyond the cache": (put(*CONFIG, "prefill_chunk", value=2**28), "prefill_chunk is 268435456, max"),
    "a huge prefill call": (lambda data: data["decoder"]["config"].update(HUGE_CALL), "larger than 1 GiB"),
    "no size": (put(*CONFIG, "vocab_size", value="many"), "decoder.config.vocab_size"),
    "a shape of another rank": (put(*STATE, "shape", value=[2, 4, 32]), "layer 0 says"),
    "an empty shape": (put(*STATE, "shape", value=[2, 4, 0, 32]), "impossible shape"),
    "a negative shape": (put(*STATE, "shape", value=[2, 4, -32, 32]), "impossible shape"),
    "a huge shape": (put(*STATE, "shape", value=[2, 4, 32, 2**40]), "impossible shape"),
    "huge memory": (put("decoder", "state", value=HUGE), "larger than any machine's memory"),
    "fewer rows": (put(*STATE, "shape", value=[2, 4, 16, 32]), "layer 0 says"),
    "an unknown element type": (put(*STATE, "dtype", value="float8"), "there is no element type"),
    "an unknown role": (put(*STATE, "role", value="cache"), "decoder.state.0.role"),
    "a state of no layer": (put(*STATE, "layer", value=7), "is of layer 7 of 3"),
    "a state twice": (put(*STATE, "name", value="value_cache_0"), "two states have the name"),
    "cache rows": (put(*LAYER, "attention", "cache_rows", value=16), "has 16 rows, max_seq_len is 32"),
    "a ring that is a full cache": (put(*STATE, "sinks", value=2), "keeps 2 sinks, layer 0 says None"),
    "key heads": (put(*LAYER, "attention", "num_kv_heads", value=3), "query heads"),
    "layers in another order": (put(*LAYER, "layer", value=1), "layers are not those from 0 to 2"),
    "a layer too few": (drop("layers", "layers", 2), "layers are not those from 0 to 2"),
    "two gates": (put(*LAYER, "replay", "gate", value="input_delta"), "several gates"),
    "another gate than asked for": (put("options", "replay", "gate", value="always"), "options.replay.gate is always"),
    "replay that was not asked for": (put("options", "replay", value=None), "options.replay is null"),
    "sparse attention": (put("options", "sparse_attention", value=SPARSE), "are not both there"),
    "half of sparse attention": (put("options", "sparse_attention", value={"window": 8}), "lacks positions, sinks"),
    "replay that says nothing": (put("options", "replay", value={}), "options: replay lacks gate, threshold"),
    "thresholds of other layers": (put("thresholds", "values", value=[0.5]), "thresholds of gate tas for 1 layer"),
    "a threshold that is NaN": (put("thresholds", "values", 0, value="nan"), "thresholds.values"),
    "a file outside": (put("files", value={"../x": {"sha256": "ab" * 32, "size": 1}}), "files that are refused"),
    "the manifest among its files": (
        put("files", "manifest.json", value={"sha256": "ab" * 32, "size": 1}),
        "is reserved",
    ),
    "a negative size": (put("files", "a", "size", value=-1), "files.a.size"),
    "a digest in capitals": (put("files", "a", "sha256", value="AB" * 32), "files.a.sha256"),
    "no target": (drop("target"), "target: Field required"),
    "no options": (drop("options"), "options: Field required"),
    "options of a text": (put("options", value="x"), "options"),
    "an unknown field": (put("more", value=1), "more: Extra inputs"),
    "an unknown field inside": (put(*LAYER, "mlp", "more", value=1), "mlp.more: Unexpected keyword argument"),
    "a section of another version": (put("host", "version", value=99), "host: version 99"),
    "a version as a text": (put("decoder", "version", value="1"), "decoder: version 1"),
    "another schema": (put("schema_version", value=99), "schema version 99"),
    "a schema as a float": (put("schema_version", value=5.0), "schema version 5.0"),
    "no schema": (drop("schema_version"), "schema version None"),
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


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"1", b'"x"', b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe"])
def test_no_manifest_at_all(content: bytes) -> None:
    refused(content)


def test_another_form_is_refused() -> None:
    assert "damaged" in refused(json.dumps(DATA).encode())
    assert "damaged" in refused(BYTES + b"\n")
    assert "damaged" in refused(BYTES.replace(b'"replay": 0.5', b'"replay": 1e999'))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


PLACES = [place for place in places(DATA) if place]
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=9),
    st.just([]),
    st.just({}),
    st.just([[]]),
    st.just({"a": 1}),
    st.sampled_from([2**31, 2**63, 2**64, -1, 0, "inf", "nan", "../x", "/etc/passwd", "\x1b[2J"]),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PLACES), values)
def test_any_value_at_any_place(place: tuple[Any, ...], value: Any) -> None:
    content = resealed(put(*place, value=value))
    with suppress(ArtifactError):
        parse_manifest(content, "manifest.json")
