"""`fastcar train-gate`, `tune-decoder` and `calibrate`: the training of gates and decoders, and their thresholds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from typer import Argument, Option

import fastcar_compile as fc
from fastcar_compile.artifact.claim import claimed
from fastcar_compile.artifact.layout import MANIFEST, SIGNATURE
from fastcar_compile.cli import options
from fastcar_compile.cli.common import JsonOption, Writes, command, stages
from fastcar_compile.cli.evaluate import read_decoder
from fastcar_compile.cli.output import print_fields, print_result, print_text
from fastcar_compile.config.listing import Needs
from fastcar_compile.errors import UserError, count_text

if TYPE_CHECKING:
    from fastcar_compile.artifact.thresholds import ExpectedLayers
    from fastcar_compile.tune.training.train import TunedDecoder

T = TypeVar("T")

Decoder = Annotated[Path, Argument(help="Folder of a Hugging Face decoder.")]


@command
@options.takes("videos", "target_replay", *options.TRAINING)
def train_gate_command(
    decoder: Decoder, output: Annotated[Path, options.OUTPUT, Writes("gate")], as_json: JsonOption = False, **given: Any
) -> None:
    """Train a gate for a decoder whose weights stay.

    Args:
        output: Write the gate to this .safetensors file.
    """
    found = _trained("train-gate", fc.train_gate, decoder, as_json, given, lambda gate: gate.save(output))
    print_result(as_json, found.facts(), lambda: show_gate(found, output))


def _trained(
    title: str, train: Callable[..., T], path: Path, as_json: bool, given: Mapping[str, Any], save: Callable[[T], None]
) -> T:
    """Return what `train` makes of the decoder at a path and a command's options, saved.

    Raises:
        UserError: the decoder is an artifact, and `train` takes none.
    """
    decoder = options.existing(path, "decoder")
    compiled = (decoder / MANIFEST).is_file()
    if compiled and train is not fc.fit_draft:
        hint = "give the decoder's Hugging Face folder, then compile with the gate"
        raise UserError("gates are trained before a decoder is compiled", where=str(decoder), hint=hint)
    arguments = options.arguments_of(train, given)
    if given.get("start") is not None:
        arguments["start"] = fc.TrainedGate.load(options.existing(given["start"], "gate"))
    with stages(as_json, title, "reading the decoder"):
        found = train(read_decoder(decoder), **arguments)
        save(found)
    return found


def show_gate(found: fc.TrainedGate, output: Path) -> None:
    """Print what the last steps of a training measured."""
    fields = {
        "gate": f"{found.gate}, written to {output}",
        "replay": f"{found.replay:.1%} of the forwards t >= F, in the last steps",
        "NLL": f"{found.nll:.4g} ({found.nll / found.nll_dense - 1:+.1%} of dense)",
    }
    for layer, heads in enumerate(found.heads() or []):
        weights = ", ".join(f"{head}: {weight:+.3f}" for head, weight in heads.items())
        fields[f"layer {layer}"] = f"query heads {weights}"
    print_fields(fields)


@command
@options.takes("videos", "seed", "tokens_per_frame", "prompt", "counted", "checkpoint")
def fit_draft_command(
    decoder: Annotated[Path, Argument(help="Folder of a Hugging Face decoder, or of an artifact.")],
    output: Annotated[Path, options.OUTPUT, Writes("draft")],
    share: float = 0.25,
    distill_steps: int = 0,
    distill_replay: Annotated[float, Needs("distill_steps")] = 0.8,
    distill_rate: Annotated[float, Needs("distill_steps")] = 0.01,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Fit a draft that stands in for MLPs.

    It is a small surrogate of each MLP for rows that replay, with the gate that decides.

    Args:
        output: Write the draft to this .safetensors file, for `fastcar compile --draft`.
        share: Weights of all drafts, as a share of those of all MLPs.
        distill_steps: Steps that then train the drafts through the decoder.
        distill_replay: Share of the forwards t >= F that replay in these steps.
        distill_rate: Peak learning rate, as a share of a tensor's root mean square.
    """
    given |= {"share": share, "distill_steps": distill_steps}
    given |= {"distill_replay": distill_replay, "distill_rate": distill_rate}
    found = _trained("fit-draft", fc.fit_draft, decoder, as_json, given, lambda draft: draft.save(output))
    sizes = {layer: own.size for layer, own in found.layers.items()}
    facts = {"draft": found.name, "layers": {str(layer): asdict(size) for layer, size in sizes.items()}}
    fields = {f"layer {layer}": str(size) for layer, size in sizes.items()}
    print_result(as_json, facts, lambda: print_fields({"draft": f"{found.name}, written to {output}", **fields}))


@command
@options.takes("videos", "target_replay", *options.TRAINING, steps=400)
def tune_decoder_command(
    decoder: Decoder,
    output: Annotated[Path, options.OUTPUT, Writes(folder=True)],
    rate: float = 1e-3,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Fine-tune a decoder together with its gate.

    The tuned decoder predicts well where its MLPs replay.

    Args:
        output: New folder: the decoder in model/, the gate in gate.safetensors.
        rate: Peak learning rate of the decoder's weights.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError("the output exists already", where=str(output), hint="give a new folder")

    def save(found: TunedDecoder) -> None:
        # A kill while writing leaves no half of a decoder under the name that was asked for, and what it leaves beside
        # that name is removed by the next build there.
        with claimed(output.absolute()) as building:
            whole, model = building / "whole", cast(Any, found.model)
            model.save_pretrained(whole / "model")
            found.gate.save(whole / "gate.safetensors")
            os.replace(whole, output)

    found = _trained("tune-decoder", fc.tune_decoder, decoder, as_json, given | {"rate": rate}, save)
    print_result(as_json, found.gate.facts(), lambda: show_gate(found.gate, output / "gate.safetensors"))


@command
@options.takes("videos", "prompt", "counted")
def calibrate_command(
    artifact: Path,
    target_replay: float | None = None,
    max_nll_increase: float | None = None,
    search_videos: Annotated[int | None, Option(min=1)] = None,
    output: Annotated[Path | None, options.OUTPUT, Writes("thresholds")] = None,
    store: bool = False,
    drop_signature: Annotated[bool, Needs("store")] = False,
    journal: Annotated[Path | None, Writes("journal")] = None,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Choose the thresholds of an artifact on some videos.

    Args:
        artifact: Folder of the artifact, compiled with the gate to calibrate.
        target_replay: Least share of the forwards t >= F that replay.
        max_nll_increase: Greatest increase of the NLL; 0.1: 10 %.
        search_videos: On how many of the videos layers share the replay out; all meet the target.
        output: Write the thresholds to this file.
        store: Keep them in the artifact, for every later session.
        drop_signature: With --store: of a signed artifact, remove the signature.
        journal: Keeps the measurements; an interrupted calibration goes on from it.
    """
    if output is None and not store and not as_json:
        raise UserError("the thresholds would go nowhere", hint="give --output FILE, --store or --json")
    if store and not drop_signature and (artifact / SIGNATURE).exists():
        what = "the artifact is signed, and thresholds stored in it would end that"
        hint = "give --output FILE instead, or --drop-signature and sign again"
        raise UserError(what, where=str(artifact), hint=hint)
    arguments = options.arguments_of(fc.calibrate, locals() | given)
    with stages(as_json, "calibrate", "checking the files"):
        loaded = fc.load(artifact)
        found = fc.calibrate(loaded, **arguments)
        if output is not None:
            found.save(output)
        if store:
            loaded.store_thresholds(found, drop_signature=drop_signature)
    print_result(as_json, found.to_json(), lambda: _show(found, loaded.digest if store else "", target_replay))


def _show(found: fc.Thresholds, digest: str, target: float | None) -> None:
    """Print what was found. `digest`: of the artifact that keeps it; empty: none does. `target`: of the replay."""
    increase = found.nll / found.nll_dense - 1
    least = "" if target is None else f"; {target:.1%} or more were asked for"
    if digest:
        print_text(f"digest  {digest}\n")
    fields = {
        "replay": f"{found.replay:.1%} of the forwards t >= F{least}",
        "MLP weights": None if found.spared is None else f"{found.spared:.1%} not read, net of the drafts'",
        "on other videos": "unknown from one video" if found.expected is None else _expected(found.expected),
        "measured on": "one video" if found.expected is None else _measured(found.expected),
        "NLL": f"{found.nll:.4g} ({increase:+.1%} of dense)",
        "gate": found.gate,
        "thresholds": ", ".join("none" if value is None else f"{value:.6g}" for value in found.values),
        "per layer": ", ".join(f"{ratio:.1%}" for ratio in found.per_layer),
    }
    print_fields({name: text for name, text in fields.items() if text is not None})


def _measured(found: ExpectedLayers) -> str:
    """Return what the calibration did, in words."""
    all_videos = count_text(found.videos, "video")
    if found.searched in (None, found.videos):
        return all_videos
    return f"{all_videos}, of which {found.searched} found the layers' shares"


def _expected(found: ExpectedLayers) -> str:
    """Return what other videos will replay, in words."""
    text = f"{found.replay:.1%} expected, {found.low:.1%} to {found.high:.1%} with {found.confidence:.0%} probability"
    text += " over many of them"
    if found.videos_needed <= found.videos:
        return text
    return f"{text}; two points to either side would take about {count_text(found.videos_needed, 'video')}"
