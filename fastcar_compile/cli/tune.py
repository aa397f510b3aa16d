"""`fastcar train-gate`, `fit-draft`, `tune-decoder`, `calibrate`, `evaluate`: gates, drafts, thresholds, quality."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from typer import Argument, Option

import fastcar_compile as fc
from fastcar_compile.artifact.claim import claimed
from fastcar_compile.artifact.layout import MANIFEST, SIGNATURE
from fastcar_compile.cli import options
from fastcar_compile.cli.common import JsonOption, MayRead, Writes, command, stages
from fastcar_compile.cli.output import print_fields, print_result, print_table, print_text
from fastcar_compile.config.listing import Needs, Without
from fastcar_compile.errors import UserError, count_text, os_errors
from fastcar_compile.support.packages import require

if TYPE_CHECKING:
    from torch import nn

    from fastcar_compile.artifact.thresholds import ExpectedLayers
    from fastcar_compile.gates import GateWeights
    from fastcar_compile.tune.evaluate import SinkWindow
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


CHOSEN = Without("cases")
"""Of the options of a calibration: a file of cases has made these choices."""


@command
@options.takes("videos", "tokens_per_frame", "prompt", "counted")
def evaluate_command(
    decoder: Path,
    calibration_videos: Path | None = None,
    gates: Annotated[str, CHOSEN] = "tas,input_delta",
    heads: Annotated[str | None, CHOSEN] = None,
    gate_weights: Path | None = None,
    couple_cfg: Annotated[bool, CHOSEN] = False,
    ratios: Annotated[str, CHOSEN] = "0.5,0.8",
    calibrations: Annotated[str, CHOSEN] = "calibrated,uniform,random",
    cases: Path | None = None,
    save_cases: Annotated[Path | None, Writes("cases")] = None,
    sparse_attention: str = "none",
    detokenize: Annotated[str | None, MayRead()] = None,
    quant: str = "none",
    journal: Annotated[Path | None, Writes("journal", folder=True)] = None,
    output: Annotated[Path | None, options.OUTPUT, Writes()] = None,
    plots: Annotated[Path | None, Writes("pictures", folder=True)] = None,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Measure replay against the dense decoder.

    The videos should be none that the gate or the decoder was trained on.

    Args:
        decoder: Folder of an artifact, or of a Hugging Face decoder.
        calibration_videos: Others, on which thresholds are chosen.
        gates: Separated by commas.
        heads: Query heads of gate tas, as `fastcar compile` takes them.
        gate_weights: Weights of gate learned, .safetensors; default: those of the artifact.
        couple_cfg: Videos b and b + N / 2 are a guidance pair and replay together.
        ratios: Replay ratios of t >= F, separated by commas.
        calibrations: Separated by commas.
        cases: File of --save-cases: these instead of a calibration.
        save_cases: Write the cases, with their thresholds.
        sparse_attention: "none" and "window/sinks", separated by commas: every case with each of these.
        detokenize: module:function or file.py:function, for PSNR, SSIM and pictures.
        quant: Of a Hugging Face decoder: none, w8a8 or w4a8.
        journal: Folder that keeps every measurement; goes on from it.
        output: Write the rows to this JSON file.
        plots: Folder for the pictures.
    """
    if plots is not None:
        require("evaluate", "matplotlib")
    from fastcar_compile.tune import evaluate
    from fastcar_compile.tune.evaluate.plots import draw

    if (cases is None) == (calibration_videos is None):
        hint = "give the videos to choose thresholds on, or a file of --save-cases"
        raise UserError("exactly one of --calibration-videos and --cases is needed", hint=hint)
    attentions = parse_attentions(sparse_attention)
    arguments = options.arguments_of(evaluate.Study, locals() | given)
    arguments["decoder"] = decoder.resolve().name
    arguments["detokenize"] = None if detokenize is None else evaluate.entry_point(detokenize)
    arguments["journal"] = None if journal is None else journal / "rows.json"
    choosing = None if calibration_videos is None else options.read_videos(calibration_videos)
    wanted = parse_ratios(ratios)
    if journal is not None:
        journal.mkdir(parents=True, exist_ok=True)
    with stages(as_json, "evaluate", "reading the decoder") as show:
        source = read_decoder(decoder)
        weights = read_gate_weights(gate_weights, source)
        study = evaluate.Study(source, **arguments)
        if cases is not None:
            planned = evaluate.load_cases(cases, weights)
        else:
            configs = parse_gates(gates, heads, weights, couple_cfg)
            planned = study.plan(choosing, configs, wanted, calibrations.split(","), journal)
        if save_cases is not None:
            evaluate.save_cases(planned, save_cases)
        chosen = [replace(case, attention=a) for a in attentions for case in planned]
        rows = study.rows(chosen)
        if output is not None:
            with os_errors("the output cannot be written", output):
                output.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", "utf-8")
        if plots is not None:
            show("pictures")
            draw(study.judge, chosen, rows, plots)
    print_result(as_json, {"rows": rows}, lambda: print_table(TITLES, map(_cells, rows)))


def parse_ratios(text: str) -> list[float]:
    """Return replay ratios from "0.5,0.8"."""
    with suppress(ValueError):
        return [float(part) for part in text.split(",")]
    hint = "give numbers from 0 to 1, separated by commas, for example 0.5,0.8"
    raise UserError(f"{text!r} is not a list of replay ratios", where="--ratios", hint=hint)


def read_decoder(path: Path) -> fc.Artifact | nn.Module:
    """Return an artifact, or the module of a Hugging Face folder.

    Raises:
        UserError: the folder is neither of them.
    """
    options.existing(path, "decoder")
    if (path / "manifest.json").is_file():
        return fc.load(path)
    from fastcar_compile.frontend.huggingface import read_module

    return read_module(path)


def read_gate_weights(path: Path | None, source: fc.Artifact | nn.Module) -> GateWeights | None:
    """Return the weights in a file, else those of an artifact's own gate; None: there are none.

    Raises:
        UserError: the file cannot be read, or is malformed.
    """
    from fastcar_compile.gates.weights import GateWeights, weights_in

    if path is not None:
        return GateWeights.load(path)
    return weights_in(source.params, len(source.sites)) if isinstance(source, fc.Artifact) else None


def parse_gates(
    text: str, heads: str | None, weights: GateWeights | None = None, couple_cfg: bool = False
) -> list[fc.ReplayConfig]:
    """Return a ReplayConfig per gate; heads and weights go to the gates that take them."""
    from fastcar_compile.gates import GATES

    configs: list[fc.ReplayConfig] = []
    for name in (part.strip() for part in text.split(",")):
        kind = GATES.get(name)
        chosen = options.parse_heads(heads) if heads is not None and kind is not None and kind.takes_heads else None
        learned = weights if kind is not None and kind.takes_weights else None
        configs.append(fc.ReplayConfig(gate=name, heads=chosen, gate_weights=learned, couple_cfg=couple_cfg))
    return configs


def parse_attentions(text: str) -> list[SinkWindow | None]:
    """Return the attention of every part of "none,256/16" (window/sinks); None: to all positions.

    Raises:
        UserError: a part is neither.
    """
    from fastcar_compile.tune.evaluate import SinkWindow

    found: list[SinkWindow | None] = []
    for part in (word.strip() for word in text.split(",")):
        window, slash, sinks = part.partition("/")
        if part != "none" and not (slash and window.isdigit() and sinks.isdigit()):
            hint = "give none, or window/sinks as in 256/16"
            raise UserError(f"{part!r} is not an attention", where="--sparse-attention", hint=hint)
        found.append(None if part == "none" else SinkWindow(int(window), int(sinks)))
    return found


TITLES = ("gate", "calibration", "attention", *(">replay", ">NLL", ">of dense", ">agreement", ">PSNR", ">SSIM"))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    nll, psnr, ssim = float(row["nll"]), row["psnr"], row["ssim"]
    return (
        *(row["gate"], row["calibration"], row["sparse_attention"], f"{row['replay_ratio']:.1%}"),
        *(f"{nll:.4f}", f"{nll / row['nll_dense']:.3f}x", f"{row['token_agreement']:.2%}"),
        *("-" if psnr is None else f"{float(psnr):.1f} dB", "-" if ssim is None else f"{ssim:.3f}"),
    )
