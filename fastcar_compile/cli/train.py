"""`fastcar train-gate`: a gate with weights of its own, trained for one decoder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from fastcar_compile.artifact.layout import MANIFEST
from fastcar_compile.cli.common import ExitCode, JsonOption, command, stages
from fastcar_compile.cli.evaluate import read_module
from fastcar_compile.cli.options import (
    CountedOption,
    PromptOption,
    TokensPerFrameOption,
    VideosOption,
    existing,
    parse_ids,
    read_videos,
)
from fastcar_compile.cli.output import print_fields, print_json
from fastcar_compile.cli.places import Writes
from fastcar_compile.errors import UserError

if TYPE_CHECKING:
    from fastcar_compile import TrainedGate, TunedDecoder

T = TypeVar("T")

Decoder = Annotated[Path, typer.Argument(help="Folder of a Hugging Face decoder.")]
TargetReplay = Annotated[float, typer.Option(help="Share of the forwards t >= F that shall replay.")]
Gate = Annotated[str, typer.Option(help="learned, or tas (a weight per query head).")]
Start = Annotated[Path | None, typer.Option(help="A trained gate of the same kind and units to go on from.")]
Units = Annotated[int, typer.Option(help="Of the hidden layer of gate learned.")]
Steps = Annotated[int, typer.Option(help="Of the optimiser.")]
Batch = Annotated[int, typer.Option(help="Videos per step.")]
Seed = Annotated[int, typer.Option(help="Of first weights, order of videos and noise.")]
Checkpoint = Annotated[
    Path | None, typer.Option(help="An interrupted training goes on from this file."), Writes("checkpoint")
]


@command
def train_gate_command(
    decoder: Decoder,
    videos: VideosOption,
    target_replay: TargetReplay,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the gate to this .safetensors file."), Writes("gate")
    ],
    gate: Gate = "learned",
    start: Start = None,
    units: Units = 16,
    steps: Steps = 200,
    batch: Batch = 4,
    seed: Seed = 0,
    tokens_per_frame: TokensPerFrameOption = None,
    prompt: PromptOption = 1,
    counted: CountedOption = None,
    checkpoint: Checkpoint = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Train a gate for a decoder whose weights stay."""
    import fastcar_compile as fc

    def save(found: TrainedGate) -> None:
        found.save(output)

    show_gate(_trained("train-gate", fc.train_gate, locals(), save), output, as_json)
    return ExitCode.OK


def _trained(title: str, train: Callable[..., T], given: Mapping[str, Any], save: Callable[[T], None]) -> T:
    """Return what `train` makes of a command's options, saved.

    Raises:
        UserError: the decoder is an artifact.
    """
    decoder = existing(given["decoder"], "decoder")
    if (decoder / MANIFEST).is_file():
        hint = "give the decoder's Hugging Face folder, then compile with the gate"
        raise UserError("gates are trained before a decoder is compiled", where=str(decoder), hint=hint)
    videos = read_videos(given["videos"])
    options = {name: given[name] for name in signature(train).parameters if name in given}
    options |= {"counted": parse_ids(given["counted"]), "start": read_start(given["start"]), "videos": videos}
    with stages(given["as_json"], title) as show:
        show("reading the decoder")
        found = train(read_module(decoder), **options)
        save(found)
    return found


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


@command
def tune_decoder_command(
    decoder: Decoder,
    videos: VideosOption,
    target_replay: TargetReplay,
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
    tokens_per_frame: TokensPerFrameOption = None,
    prompt: PromptOption = 1,
    counted: CountedOption = None,
    checkpoint: Checkpoint = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Fine-tune a decoder together with its gate.

    The tuned decoder predicts well where its MLPs replay.
    """
    import fastcar_compile as fc

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError("the output exists already", where=str(output), hint="give a new folder")

    def save(found: TunedDecoder) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        # A kill while writing leaves no half of a decoder under the name that was asked for.
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.tuning-") as scratch:
            whole, model = Path(scratch, "whole"), cast(Any, found.model)
            model.save_pretrained(whole / "model")
            found.gate.save(whole / "gate.safetensors")
            os.replace(whole, output)

    found = _trained("tune-decoder", fc.tune_decoder, locals(), save)
    show_gate(found.gate, output / "gate.safetensors", as_json)
    return ExitCode.OK
