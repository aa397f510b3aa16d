"""`fastcar evaluate`: quality of replay and sparse attention on held-out videos."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from fastcar_compile.cli.common import ExitCode, command, existing, print_table, stages
from fastcar_compile.cli.compile import parse_heads
from fastcar_compile.errors import UserError


@command
def evaluate_command(
    decoder: Annotated[Path, typer.Argument(help="Folder of an artifact, or of a Hugging Face decoder.")],
    videos: Annotated[Path, typer.Option(help="Held-out: .safetensors, .npz or .npy, int64 [N, T], prompt included.")],
    calibration_videos: Annotated[Path | None, typer.Option(help="Others, on which thresholds are chosen.")] = None,
    gates: Annotated[str, typer.Option(help="Separated by commas.")] = "tas,input_delta",
    heads: Annotated[str | None, typer.Option(help="Query heads of gate tas, as `fastcar compile` takes them.")] = None,
    gate_weights: Annotated[
        Path | None, typer.Option(help="Weights of gate learned, .safetensors; default: those of the artifact.")
    ] = None,
    couple_cfg: Annotated[
        bool, typer.Option("--couple-cfg", help="Videos b and b + N / 2 are a guidance pair and replay together.")
    ] = False,
    ratios: Annotated[str, typer.Option(help="Replay ratios of t >= F, separated by commas.")] = "0.5,0.8",
    calibrations: Annotated[str, typer.Option(help="Separated by commas.")] = "calibrated,uniform,random",
    cases: Annotated[Path | None, typer.Option(help="File of --save-cases: these instead of a calibration.")] = None,
    save_cases: Annotated[Path | None, typer.Option(help="Write the cases, with their thresholds.")] = None,
    sparse_attention: Annotated[
        str, typer.Option(help='"none" and "window/sinks", separated by commas: every case with each of these.')
    ] = "none",
    detokenize: Annotated[
        str | None, typer.Option(help="module:function or file.py:function, for PSNR, SSIM and pictures.")
    ] = None,
    tokens_per_frame: Annotated[int | None, typer.Option(help="Default: the decoder's config.")] = None,
    quant: Annotated[str, typer.Option(help="Of a Hugging Face decoder: none or w8a8.")] = "none",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before decoding starts.")] = 1,
    journal: Annotated[Path | None, typer.Option(help="Folder that keeps every measurement; goes on from it.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file; -: to stdout.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for the pictures.")] = None,
) -> ExitCode:
    """Measure replay against the dense decoder."""
    from fastcar_compile import evaluate
    from fastcar_compile.evaluate.pictures import draw

    if (cases is None) == (calibration_videos is None):
        raise UserError("exactly one of --calibration-videos and --cases is needed")
    attentions = parse_attentions(sparse_attention)
    function = None if detokenize is None else evaluate.entry_point(detokenize)
    held_out = read_videos(videos)
    if journal is not None:
        journal.mkdir(parents=True, exist_ok=True)
    only_json = str(output) == "-"
    with stages(only_json, "evaluate") as show:
        show("reading the decoder")
        source = read_decoder(decoder)
        weights = read_gate_weights(gate_weights, source)
        study = evaluate.Study(
            source,
            held_out,
            decoder=decoder.resolve().name,
            tokens_per_frame=tokens_per_frame,
            quant=quant,
            prompt=prompt,
            detokenize=function,
            journal=None if journal is None else journal / "rows.json",
            progress=show,
        )
        if cases is not None:
            planned = evaluate.load_cases(cases, weights)
        else:
            assert calibration_videos is not None
            wanted = [float(r) for r in ratios.split(",")]
            configs = parse_gates(gates, heads, weights, couple_cfg)
            planned = study.plan(read_videos(calibration_videos), configs, wanted, calibrations.split(","), journal)
        if save_cases is not None:
            evaluate.save_cases(planned, save_cases)
        chosen = [case.with_attention(a) for a in attentions for case in planned]
        rows = study.rows(chosen)
        if plots is not None:
            show("pictures")
            draw(study.judge, chosen, rows, plots)
    text = json.dumps(rows, indent=1, sort_keys=True) + "\n"
    if only_json:
        sys.stdout.write(text)
    else:
        _show(rows)
    if output is not None and not only_json:
        output.write_text(text, "utf-8")
    return ExitCode.OK


def read_videos(path: Path) -> np.ndarray:
    """int64 [N, T] from a file of one array.

    Raises:
        UserError: no such file, more than one array, or no [N, T] of integers.
    """
    existing(path, "video file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            arrays = load_file(path)
        else:
            loaded = np.load(path, allow_pickle=False)
            arrays = {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded.items())
    except Exception as error:  # three libraries, many kinds; all of them mean that the file is not what it should be
        raise UserError(f"the videos cannot be read: {error}", where=str(path)) from error
    if len(arrays) != 1:
        raise UserError(f"{len(arrays)} arrays ({', '.join(sorted(arrays))})", where=str(path), hint="keep one")
    array = next(iter(arrays.values()))
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise UserError(f"the videos are {array.dtype} {list(array.shape)}, expected integers [N, T]", where=str(path))
    return array.astype(np.int64)


def read_decoder(path: Path) -> Any:
    """An artifact, or the module of a Hugging Face folder.

    Raises:
        UserError: neither.
    """
    import fastcar_compile as fc

    existing(path, "decoder")
    if (path / "manifest.json").is_file():
        return fc.load(str(path))
    if not (path / "config.json").is_file():
        hint = "give a folder with manifest.json (an artifact) or config.json (a Hugging Face decoder)"
        raise UserError("neither an artifact nor a Hugging Face decoder", where=str(path), hint=hint)
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise UserError(f"the decoder cannot be read: {error}", where=str(path)) from error


def read_gate_weights(path: Path | None, source: Any) -> Any:
    """The weights in a file, else those of an artifact's own gate; None: there are none.

    Raises:
        UserError: the file cannot be read, or is malformed.
    """
    from fastcar_compile.compiled import Artifact
    from fastcar_compile.gates.weights import GateWeights, weights_in

    if path is not None:
        return GateWeights.load(path)
    return weights_in(source.params, len(source.sites)) if isinstance(source, Artifact) else None


def parse_gates(text: str, heads: str | None, weights: Any = None, couple_cfg: bool = False) -> list[Any]:
    """A ReplayConfig per gate; heads and weights go to those that take them."""
    from fastcar_compile.config import ReplayConfig
    from fastcar_compile.gates import GATES

    configs = []
    for name in (part.strip() for part in text.split(",")):
        kind = GATES.get(name)
        chosen = parse_heads(heads) if heads is not None and kind is not None and kind.takes_heads else None
        learned = weights if kind is not None and kind.takes_weights else None
        configs.append(ReplayConfig(gate=name, heads=chosen, gate_weights=learned, couple_cfg=couple_cfg))
    return configs


def parse_attentions(text: str) -> list[Any]:
    """ "none" or window/sinks, separated by commas.

    Raises:
        UserError: a part is neither.
    """
    from fastcar_compile.evaluate import SinkWindow

    found: list[Any] = []
    for part in (word.strip() for word in text.split(",")):
        window, slash, sinks = part.partition("/")
        if part != "none" and not (slash and window.isdigit() and sinks.isdigit()):
            hint = "give none, or window/sinks as in 256/16"
            raise UserError(f"{part!r} is no attention", where="--sparse-attention", hint=hint)
        found.append(None if part == "none" else SinkWindow(int(window), int(sinks)))
    return found


def _show(rows: list[dict[str, Any]]) -> None:
    columns = ("gate", "calibration", "attention", "replay of t >= F", "NLL", "of dense", "agreement", "PSNR", "SSIM")
    table = Table(*columns)
    for row in rows:
        table.add_row(
            row["gate"],
            row["calibration"],
            row["sparse_attention"],
            f"{row['replay_ratio']:.1%}",
            f"{float(row['nll']):.4f}",
            f"{float(row['nll']) / row['nll_dense']:.3f}x",
            f"{row['token_agreement']:.2%}",
            "" if row["psnr"] is None else f"{float(row['psnr']):.1f} dB",
            "" if row["ssim"] is None else f"{row['ssim']:.3f}",
        )
    print_table(table)
