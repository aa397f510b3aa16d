"""`fastcar train-gate`: a gate with weights of its own, trained for one decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fastcar_compile.cli.common import ExitCode, JsonOption, command, existing, print_json, stages, stdout
from fastcar_compile.cli.evaluate import read_decoder, read_videos
from fastcar_compile.errors import UserError


@command
def train_gate_command(
    decoder: Annotated[Path, typer.Argument(help="Folder of a Hugging Face decoder.")],
    videos: Annotated[Path, typer.Option(help="To train on: .safetensors, .npz or .npy, int64 [N, T], with prompt.")],
    target_replay: Annotated[float, typer.Option(help="Share of the forwards t >= F that shall replay.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the gate to this .safetensors file.")],
    gate: Annotated[str, typer.Option(help="learned, or tas (a weight per query head).")] = "learned",
    units: Annotated[int, typer.Option(help="Of the hidden layer of gate learned.")] = 16,
    steps: Annotated[int, typer.Option(help="Of the optimiser.")] = 200,
    batch: Annotated[int, typer.Option(help="Videos per step.")] = 4,
    seed: Annotated[int, typer.Option(help="Of first weights, order of videos and noise.")] = 0,
    tokens_per_frame: Annotated[int | None, typer.Option(help="Default: the decoder's config.")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before decoding starts.")] = 1,
    checkpoint: Annotated[Path | None, typer.Option(help="An interrupted training goes on from this file.")] = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Train a gate; the decoder's weights stay."""
    import fastcar_compile as fc

    existing(decoder, "decoder")
    if (decoder / "manifest.json").is_file():
        mend = "give the decoder's Hugging Face folder, then compile with the gate"
        raise UserError("gates are trained before a decoder is compiled", where=str(decoder), mend=mend)
    tokens = read_videos(videos)
    with stages(as_json, "train-gate") as show:
        show("reading the decoder")
        found = fc.train_gate(
            read_decoder(decoder),
            tokens,
            gate=gate,
            target_replay=target_replay,
            units=units,
            steps=steps,
            batch=batch,
            seed=seed,
            tokens_per_frame=tokens_per_frame,
            prompt=prompt,
            checkpoint=checkpoint,
            progress=show,
        )
        found.save(output)
    if as_json:
        print_json(found.facts())
    else:
        _show(found, output)
    return ExitCode.OK


def _show(found: Any, output: Path) -> None:
    text = f"gate {found.gate} in {output}: replay {found.replay:.1%} of t >= F, NLL {found.nll:.4g}, "
    text += f"{found.nll / found.nll_dense - 1:+.1%} of dense, in the last steps"
    console = stdout()
    console.print(text, markup=False, soft_wrap=True)
    for layer, heads in enumerate(found.heads() or []):
        named = ", ".join(f"{head}: {weight:+.3f}" for head, weight in heads.items())
        console.print(f"layer {layer}, query heads {named}", markup=False, soft_wrap=True)
