"""A safetensors file: read as an artifact's weights, and as a trained gate."""

import numpy as np
from tensor_maps import load_tensors

from fastcar_compile.errors import ArtifactError, UserError
from fastcar_compile.gates.weights import GateWeights
from fastcar_compile.ir.tensor_files import save_tensors
from fuzz.expect import accepted, as_file, folder, same


def run(data: bytes) -> bool:
    """Read the file as both; every byte of an accepted one is read."""
    path = as_file("file.safetensors", data)
    arrays = accepted(ArtifactError, lambda: load_tensors(path))
    gate = accepted(UserError, lambda: GateWeights.load(path))
    if arrays is not None:
        again = folder() / "again.safetensors"
        save_tensors(again, arrays)
        written = {name: array.tobytes() for name, array in load_tensors(again).items()}
        same(written, {name: np.asarray(array).tobytes() for name, array in arrays.items()}, "the tensors")
    return arrays is not None or gate is not None
