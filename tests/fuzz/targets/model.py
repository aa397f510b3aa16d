"""What a build is asked for: each input is read as config.json, as a thresholds file and as the text of a pipeline."""

from fastcar_compile.artifact.thresholds import Thresholds
from fastcar_compile.errors import ArtifactError, CompileError
from fastcar_compile.frontend.skeleton import CONFIG, read_config_json
from fastcar_compile.ir.pass_manager import pipeline_from_string, pipeline_to_string
from fastcar_compile.passes.pipeline import PASSES
from fuzz.expect import accepted, as_file, folder, same


def run(data: bytes) -> bool:
    """Read the bytes as all three; no model is built."""
    return _config(data) | _thresholds(data) | _pipeline(data)


def _config(data: bytes) -> bool:
    path = as_file(CONFIG, data)
    return accepted(CompileError, lambda: read_config_json(path.parent)) is not None


def _thresholds(data: bytes) -> bool:
    path = as_file("thresholds.json", data)
    found = accepted(ArtifactError, lambda: Thresholds.load(path))
    if found is None:
        return False
    again = folder() / "again.json"
    found.save(again)
    same(Thresholds.load(again), found, "the thresholds that are written again")
    accepted(ArtifactError, lambda: found.check([found.gate, None], "layers"))
    return True


def _pipeline(data: bytes) -> bool:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    passes = accepted(CompileError, lambda: pipeline_from_string(text, PASSES))
    if passes is None:
        return False
    again = pipeline_to_string(passes)
    same(pipeline_to_string(pipeline_from_string(again, PASSES)), again, "the pipeline that is written again")
    return bool(passes)
