"""`fastcar train-gate`: a gate with weights of its own, trained for one decoder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fastcar_compile.cli.common import ExitCode, JsonOption, command, stages
from fastcar_compile.cli.evaluate import read_module
from fastcar_compile.cli.options import existing, parse_ids, read_tokens
from fastcar_compile.cli.output import print_fields, print_json
from fastcar_compile.cli.places import Writes
from fastcar_compile.errors import UserError

if TYPE_CHECKING:
    from fastcar_compile import TrainedGate


Decoder = Annotated[Path, typer.Argument(help="Folder of a Hugging Face decoder.")]
Videos = Annotated[Path, typer.Option(help="To train on: .safetensors, .npz or .npy, int64 [N, T], with prompt.")]
Target = Annotated[float, typer.Option(help="Share of the forwards t >= F that shall replay.")]
Gate = Annotated[str, typer.Option(help="learned, or tas (a weight per query head).")]
Start = Annotated[Path | None, typer.Option(help="A trained gate of the same kind and units to go on from.")]
Units = Annotated[int, typer.Option(help="Of the hidden layer of gate learned.")]
Steps = Annotated[int, typer.Option(help="Of the optimiser.")]
Batch = Annotated[int, typer.Option(help="Videos per step.")]
Seed = Annotated[int, typer.Option(help="Of first weights, order of videos and noise.")]
TokensPerFrame = Annotated[int | None, typer.Option(help="Default: the decoder's config.")]
Prompt = Annotated[int, typer.Option(min=1, help="Tokens before decoding starts.")]
Counted = Annotated[
    str | None, typer.Option(help="Token ids that the decoder predicts, FIRST:END; others are given. Default: all.")
]
Checkpoint = Annotated[
    Path | None, typer.Option(help="An interrupted training goes on from this file."), Writes("checkpoint")
]


@command
def train_gate_command(
    decoder: Decoder,
    videos: Videos,
    target_replay: Target,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the gate to this .safetensors file."), Writes("gate")
    ],
    gate: Gate = "learned",
    start: Start = None,
    units: Units = 16,
    steps: Steps = 200,
    batch: Batch = 4,
    seed: Seed = 0,
    tokens_per_frame: TokensPerFrame = None,
    prompt: Prompt = 1,
    counted: Counted = None,
    checkpoint: Checkpoint = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Train a gate for a decoder whose weights stay."""
    import fastcar_compile as fc

    not_compiled(decoder)
    tokens, first = read_tokens(videos, "video file", dims=(2,)), read_start(start)
    with stages(as_json, "train-gate") as show:
        show("reading the decoder")
        found = fc.train_gate(
            read_module(decoder),
            tokens,
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
        found.save(output)
    show_gate(found, output, as_json)
    return ExitCode.OK


def not_compiled(decoder: Path) -> None:
    """Raise UserError where the decoder is an artifact."""
    existing(decoder, "decoder")
    if (decoder / "manifest.json").is_file():
        hint = "give the decoder's Hugging Face folder, then compile with the gate"
        raise UserError("gates are trained before a decoder is compiled", where=str(decoder), hint=hint)


def read_start(path: Path | None) -> TrainedGate | None:
    """Return the gate to go on from, if there is one."""
    import fastcar_compile as fc

    return None if path is None else fc.TrainedGate.load(existing(path, "gate"))


def show_gate(found: TrainedGate, output: Path, as_json: bool) -> None:
    """Print what the last steps of a training measured."""
    if as_json:
        print_json(found.facts())
        return
    fields = {
        "gate": f"{found.gate}, written to {output}",
        "replay": f"{found.replay:.1%} of the forwards t >= F, in the last steps",
        "NLL": f"{found.nll:.4g} ({found.nll / found.nll_dense - 1:+.1%} of dense)",
    }
    for layer, heads in enumerate(found.heads() or []):
        fields[f"layer {layer}"] = "query heads " + ", ".join(
            f"{head}: {weight:+.3f}" for head, weight in heads.items()
        )
    print_fields(fields)


# `fastcar tune-decoder`: a decoder and its gate, trained together.


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
