"""Names of the files of an artifact, and of the calls of its accelerator, each written once.

```
manifest.json       typed sections, sha256 and size of every other file
graph/              before and after the rewrite, as text and as JSON
decoder.onnx        its weights are the files under weights/; beside it context.onnx with cross-attention
weights/            safetensors, packed for the kernels
host/               a folder per instruction set with its library; host/src: the C++ host program, or fastcar.mjs
hls/                HLS C++ project
drs/                DRS control table, binary and JSON
gpu/                program.json: shaders and dispatches, of target webgpu
step/               step program, binary and JSON, where the accelerator runs whole decode steps
report.json
README.md           for a board: what to run first
signature.json      where the artifact is signed: the only file that the manifest does not list
```
"""

from collections.abc import Iterable
from pathlib import PurePosixPath

MANIFEST = "manifest.json"
SIGNATURE = "signature.json"
RESERVED = (MANIFEST, SIGNATURE)
"""Names that no file of a manifest has."""

GRAPH_BEFORE, GRAPH_AFTER = "graph/before.json", "graph/after.json"
TEXT_BEFORE, TEXT_AFTER = "graph/before.txt", "graph/after.txt"

ONNX, ONNX_CONTEXT = "decoder.onnx", "context.onnx"
"""The ONNX models. Their weights are the artifact's weight files, which must lie below the models' folder."""

WEIGHTS = "weights/model"
"""Stem of the weight files."""

ACCELERATOR_WEIGHTS = "weights/accelerator.safetensors"

HLS = "hls"
DRS_TABLE, DRS_TABLE_JSON = "drs/table.bin", "drs/table.json"

HOST_SOURCES = "host/src"
WEB_MODULES = tuple(f"{HOST_SOURCES}/{name}" for name in ("fastcar.mjs", "wasm.mjs", "gpu.mjs"))
"""What decodes in a browser or in Node, and its parts; see fastcar_compile/runtime/web."""

GPU_PROGRAM = "gpu/program.json"
"""The decode step as a list of dispatches, of target webgpu; see fastcar_compile/codegen/tvm/gpu/program.py."""

REPORT_JSON, README = "report.json", "README.md"


def weight_file(shard: int | None = None) -> str:
    """Return the name of the only weight file, or of shard number 1, 2, … of several."""
    return f"{WEIGHTS}.safetensors" if shard is None else f"{WEIGHTS}-{shard:05d}.safetensors"


def weight_files(files: Iterable[str]) -> list[str]:
    """Return the weight files among an artifact's files, in order."""
    shard = f"{WEIGHTS}-[0-9][0-9][0-9][0-9][0-9].safetensors"
    return sorted(f for f in files if f == weight_file() or PurePosixPath(f).match(shard))


def host_library(triple: str, instruction_set: str) -> str:
    """Return the name of the library for one instruction set."""
    return f"host/{triple}/{instruction_set}/decoder.{'wasm' if triple.startswith('wasm') else 'so'}"


def board_library(triple: str, cpu: str | None, *, linked: bool) -> str:
    """Return the name of the library for the board's CPU, or of the archive of its object files.

    cpu: its LLVM name where the build machine has the same triple, so that the folders differ; else None.
    """
    folder = f"host/{triple}" if cpu is None else f"host/{triple}-{cpu}"
    return f"{folder}/decoder.{'so' if linked else 'tar'}"


# How the host calls an accelerator: values that compiler, backends and C++ host program share.


MLP_FUNCTION = "fastcar.offloaded_mlp"
"""Packed function (x [B, H], replay [B], cached [B, H], layer, out [B, H]). The offload program calls it and the two
below. A library that has this program can be loaded only where they are registered."""

LINEAR_FUNCTION = "fastcar.offloaded_linear"
"""Packed function (x [B, K], name, out [B, N])."""

GATE_FUNCTION = "fastcar.offloaded_gate"
"""Packed function (query [B, Hq, 1, D], key cache [B, Hkv, S, D], x [B, H], cached x [B, H], chain [B], position [1],
step [1], stride, layer, replay [B], score [B], new chain [B]). The last three are its results. Query and key cache are
the integer 0 where the gate compares no query, x and the cached x where it does not read the MLP's input."""

FUNCTIONS = {"MLP_FUNCTION": MLP_FUNCTION, "LINEAR_FUNCTION": LINEAR_FUNCTION, "GATE_FUNCTION": GATE_FUNCTION}
"""The packed functions by their names in the C++ host program."""

EMBEDDED = "embedded"
"""Name of the result of the program `embed`: the rows that the step kernel is given, float32 [B, 1, H]."""

CONSTANTS = "constants"
"""The step kernel's argument for constants, and their name among the accelerator's weights."""
