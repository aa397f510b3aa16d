"""`fastcar tune-decoder`: a decoder and its gate, trained together."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fastcar_compile.cli.common import ExitCode, JsonOption, command, stages
from fastcar_compile.cli.evaluate import read_module
from fastcar_compile.cli.options import parse_ids, read_tokens
from fastcar_compile.cli.places import Writes
from fastcar_compile.cli.train_gate import (
    Batch,
    Checkpoint,
    Counted,
    Decoder,
    Gate,
    Prompt,
    Seed,
    Start,
    Steps,
    Target,
    TokensPerFrame,
    Units,
    Videos,
    not_compiled,
    read_start,
    show_gate,
)
from fastcar_compile.errors import UserError


@command
def tune_decoder_command(
    decoder: Decoder,
    videos: Videos,
    target_replay: Target,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="New folder: the decoder in model/, the gate in gate.safetensors."),
        Writes(folder=True),
    ],
    rate: Annotated[float, typer.Option(help="Peak learning rate of the decoder's weights.")] = 1e-3,
    gate: Gate = "learned",
    start: Start = None,
    units: Units = 16,
    steps: Steps = 400,
    batch: Batch = 4,
    seed: Seed = 0,
    tokens_per_frame: TokensPerFrame = None,
    prompt: Prompt = 1,
    counted: Counted = None,
    checkpoint: Checkpoint = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Fine-tune a decoder together with its gate.

    The tuned decoder predicts well where its MLPs replay.
    """
    import fastcar_compile as fc

    not_compiled(decoder)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError("the output exists already", where=str(output), hint="give a new folder")
    tokens, first = read_tokens(videos, "video file", dims=(2,)), read_start(start)
    with stages(as_json, "tune-decoder") as show:
        show("reading the decoder")
        found = fc.tune_decoder(
            read_module(decoder),
            tokens,
            rate=rate,
            gate=gate,
            target_replay=target_replay,
            units=units,
            steps=steps,
            batch=batch,
            seed=seed,
            tokens_per_frame=tokens_per_frame,
            prompt=prompt,
            counted=parse_ids(counted),
            start=first,
            checkpoint=checkpoint,
        )
        output.parent.mkdir(parents=True, exist_ok=True)
        # A kill while writing leaves no half of a decoder under the name that was asked for.
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.tuning-") as scratch:
            whole, model = Path(scratch, "whole"), cast(Any, found.model)
            model.save_pretrained(whole / "model")
            found.gate.save(whole / "gate.safetensors")
            os.replace(whole, output)
    show_gate(found.gate, output / "gate.safetensors", as_json)
    return ExitCode.OK
