"""Inputs that are right, made from today's formats: a reader accepts each of them. The fuzzers begin from them."""

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fastcar_compile.ir.tensor_files import save_tensors

TARGETS = ("cpu.toml", "zcu102.toml", "u280.toml")
CONFIG: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
CONFIG |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 32}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-06}
CONFIG |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False}
CONFIG |= {"torch_dtype": "float32", "text_config": {"hidden_size": 64}}
PIPELINE = 'insert-replay{"thresholds": [0.5, null, "inf"], "max_chain": 3, "heads": [[[0, 0.5]], null]},offload-mlp'
THRESHOLDS: dict[str, object] = {"gate": "tas", "values": [0.5, None, "inf"], "per_layer": [0.5, 0.0, 0.25]}
THRESHOLDS |= {"replay": 0.5, "nll": 1.0, "nll_dense": 1.0, "goal": "none", "inputs": "ab"}
MESSAGES = (
    {"type": "visible", "value": True},
    {"type": "limit", "value": False},
    {"type": "keys", "held": ["left", "forward"]},
    {"type": "run", "value": True},
    {"type": "mode", "value": "both"},
    {"type": "threshold", "value": 0.5},
    {"type": "record", "value": True},
    {"type": "restart", "start": 1, "seed": 7, "temperature": 0.8, "top_k": 4},
    {"type": "threshold", "value": "compiled"},
    {"type": "threshold", "value": None},
    {"type": "drawn", "serial": 1},
    {"type": "record", "value": False},
)


def seeds(name: str) -> dict[str, bytes]:
    """File name -> content, for the fuzzer of this name."""
    return _SEEDS[name]()


def _manifest() -> dict[str, bytes]:
    from inputs.test_manifest import whole

    return {"whole.json": whole().to_bytes()}


def _table() -> dict[str, bytes]:
    from drs.tables import table_for

    from fastcar_compile.codegen.hls.control_table.builder import GateScore
    from fastcar_compile.codegen.hls.control_table.table import AttentionShape
    from fastcar_compile.gates.registry import GateKind

    heads = GateScore(heads=(None, ((0, 0.5), (3, -2.0)), None))
    made = {
        "plain": table_for(),
        "weighted": table_for(6, couple_cfg=True, attention=AttentionShape(4, 2, 6), gate=heads),
        "input_delta": table_for(gate=GateScore(GateKind.INPUT_DELTA, 10)),
    }
    return {f"{name}.bin": table.to_bytes() for name, table in made.items()}


def _toml() -> dict[str, bytes]:
    folder = files("fastcar_compile.config.targets")
    return {name: (folder / name).read_bytes() for name in TARGETS}


def _signature() -> dict[str, bytes]:
    from fuzz.signers import bundles

    return {f"{name}.json": data for name, data in bundles().items()}


def _model() -> dict[str, bytes]:
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "thresholds.json": json.dumps(THRESHOLDS).encode(),
        "pipeline.txt": PIPELINE.encode(),
    }


def _tensors() -> dict[str, bytes]:
    units, hidden = 2, 3
    shapes = {"w1": (units, 2 * hidden), "b1": (units,), "w2": (units,), "b2": (1,)}
    gate = {f"layer.0.{name}": np.ones(shape, np.float32) for name, shape in shapes.items()}
    plain = {"a": np.arange(6, dtype=np.int8).reshape(2, 3), "b": np.zeros((), np.float32), "c": np.ones(5, np.int64)}
    with TemporaryDirectory() as folder:
        path = Path(folder, "file")
        found = dict[str, bytes]()
        for name, arrays in {"gate": gate, "plain": plain}.items():
            save_tensors(path, arrays)
            found[f"{name}.safetensors"] = path.read_bytes()
    return found


def _world() -> dict[str, bytes]:
    from play.worlds import write_world

    with TemporaryDirectory() as name:
        folder = write_world(Path(name))
        return {file: (folder / file).read_bytes() for file in ("world.toml", "starts.safetensors")}


def _message() -> dict[str, bytes]:
    return {"all.jsonl": "\n".join(json.dumps(message) for message in MESSAGES).encode()}


def _session() -> dict[str, bytes]:
    from fuzz.targets.session import saved

    return {
        "rows.npz": saved((5, 2), 6),
        "level.npz": saved((1, 1), 0),
        "unrecorded.npz": saved((3, 3), 4, record=False),
    }


def _cache() -> dict[str, bytes]:
    from hashlib import sha256

    from fastcar_compile.artifact.cache import Entry
    from fastcar_compile.artifact.digest import FileEntry
    from fuzz.targets.cache import KEY, MADE

    file = FileEntry(sha256=sha256(MADE).hexdigest(), size=len(MADE))
    about = [["it is so", False], {"programs": {"decode": ["tokens", None, 0.5]}}]
    files = {"weights": {"made": file}, "build": dict.fromkeys(("manifest.json", "hls/a.cpp", "report.json"), file)}
    return {f"{name}.json": Entry(files=found, about=about).sealed(KEY) for name, found in files.items()}


_FORMATS = (_manifest, _table, _toml, _signature, _model, _tensors, _world, _message, _session, _cache)
_SEEDS: dict[str, Callable[[], dict[str, bytes]]] = {made.__name__.removeprefix("_"): made for made in _FORMATS}
PYTHON = tuple(_SEEDS)
"""Fuzzers of Python code: modules of `targets`."""
