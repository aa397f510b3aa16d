"""`python -m fuzz.engine NAME [libFuzzer's options and corpora]`: one fuzzer of Python code, under atheris."""

import importlib
import os
import sys
import traceback

import atheris
from atheris.import_hook import instrument_imports

from fuzz import mutate

STRUCTURED = {
    "manifest": mutate.json_text,
    "signature": mutate.json_text,
    "model": mutate.json_text,
    "tensors": mutate.tensor_file,
    "world": mutate.tensor_file,
    "session": mutate.session_file,
    "cache": mutate.json_text,
}
"""Fuzzers whose inputs are changed as values; those of the others as bytes."""


def main() -> None:
    """Fuzz until the engine ends the process."""
    name = sys.argv[1]
    # Only what the target imports of these packages: instrumenting torch or transformers takes minutes.
    with instrument_imports(include=["fastcar_compile", "fastcar_play"]):
        run = importlib.import_module(f"fuzz.targets.{name}").run

    def one(data: bytes) -> None:
        try:
            run(data)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os.abort()  # the engine keeps the input now; at Python's own end its alarm may come first

    arguments = [sys.argv[0], *sys.argv[2:]]
    if name in STRUCTURED:
        change = STRUCTURED[name]

        def mutator(data: bytes, most: int, seed: int) -> bytes:
            return change(data, most, seed, atheris.Mutate)

        atheris.Setup(arguments, one, custom_mutator=mutator)
    else:
        atheris.Setup(arguments, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
