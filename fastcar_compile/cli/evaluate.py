"""`fastcar evaluate`: quality of replay and sparse attention on held-out videos."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import fastcar_compile as fc
from fastcar_compile.cli import options
from fastcar_compile.cli.common import JsonOption, MayRead, Writes, command, stages
from fastcar_compile.cli.output import print_result, print_table
from fastcar_compile.config.listing import Without
from fastcar_compile.errors import UserError, os_errors
from fastcar_compile.support.packages import require

if TYPE_CHECKING:
    from torch import nn

    from fastcar_compile.gates import GateWeights
    from fastcar_compile.tune.evaluate import SinkWindow

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
        chosen = [case.with_attention(a) for a in attentions for case in planned]
        rows = study.rows(chosen)
        if output is not None:
            with os_errors("the output cannot be written", output):
                output.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", "utf-8")
        if plots is not None:
            show("pictures")
            draw(study.judge, chosen, rows, plots)
    print_result(as_json, {"rows": rows}, lambda: print_table(_TITLES, map(_cells, rows)))


def parse_ratios(text: str) -> list[float]:
    """Return replay ratios from "0.5,0.8".

    Raises:
        UserError: a part is not a number from 0 to 1.
    """
    with suppress(ValueError):
        ratios = [float(part) for part in text.split(",")]
        if all(0 <= ratio <= 1 for ratio in ratios):
            return ratios
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


_TITLES = ("gate", "calibration", "attention", *(">replay", ">NLL", ">of dense", ">agreement", ">PSNR", ">SSIM"))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    nll, psnr, ssim = float(row["nll"]), row["psnr"], row["ssim"]
    return (
        *(row["gate"], row["calibration"], row["sparse_attention"], f"{row['replay_ratio']:.1%}"),
        *(f"{nll:.4f}", f"{nll / row['nll_dense']:.3f}x", f"{row['token_agreement']:.2%}"),
        *("-" if psnr is None else f"{float(psnr):.1f} dB", "-" if ssim is None else f"{ssim:.3f}"),
    )
