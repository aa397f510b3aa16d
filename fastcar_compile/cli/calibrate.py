"""`fastcar calibrate`: thresholds per layer for a replay ratio or a loss of likelihood."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import fastcar_compile as fc
from fastcar_compile.artifact.layout import SIGNATURE
from fastcar_compile.cli.common import JsonOption, Writes, command, stages
from fastcar_compile.cli.options import CountedOption, PromptOption, VideosOption, output_option, parse_ids, read_videos
from fastcar_compile.cli.output import print_fields, print_result, print_text
from fastcar_compile.errors import UserError, count_text

if TYPE_CHECKING:
    from fastcar_compile.artifact.thresholds import Expected


@command
def calibrate_command(
    artifact: Annotated[Path, Argument(help="Folder of the artifact, compiled with the gate to calibrate.")],
    videos: VideosOption,
    target_replay: Annotated[float | None, Option(help="Least share of the forwards t >= F that replay.")] = None,
    max_nll_increase: Annotated[float | None, Option(help="Greatest increase of the NLL; 0.1: 10 %.")] = None,
    prompt: PromptOption = 1,
    counted: CountedOption = None,
    search_videos: Annotated[
        int | None, Option(min=1, help="On how many of the videos layers share the replay out; all meet the target.")
    ] = None,
    output: Annotated[Path | None, output_option("Write the thresholds to this file."), Writes("thresholds")] = None,
    store: Annotated[bool, Option("--store", help="Keep them in the artifact, for every later session.")] = False,
    drop_signature: Annotated[
        bool, Option("--drop-signature", help="With --store: of a signed artifact, remove the signature.")
    ] = False,
    journal: Annotated[
        Path | None,
        Option(help="Keeps the measurements; an interrupted calibration goes on from it."),
        Writes("journal"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose the thresholds of an artifact on some videos."""
    if output is None and not store and not as_json:
        raise UserError("the thresholds would go nowhere", hint="give --output FILE, --store or --json")
    if store and not drop_signature and (artifact / SIGNATURE).exists():
        what = "the artifact is signed, and thresholds stored in it would end that"
        hint = "give --output FILE instead, or --drop-signature and sign again"
        raise UserError(what, where=str(artifact), hint=hint)
    tokens = read_videos(videos)
    with stages(as_json, "calibrate") as show:
        show("checking the files")
        loaded = fc.load(artifact)
        found = fc.calibrate(
            loaded,
            tokens,
            target_replay=target_replay,
            max_nll_increase=max_nll_increase,
            prompt=prompt,
            counted=parse_ids(counted),
            search_videos=search_videos,
            journal=journal,
        )
        if output is not None:
            found.save(output)
        if store:
            loaded.store_thresholds(found, drop_signature=drop_signature)
    print_result(as_json, found.to_json(), lambda: _show(found, loaded.digest if store else ""))


def _show(found: fc.Thresholds, digest: str) -> None:
    """Print what was found. `digest`: of the artifact that keeps it; empty: none does."""
    increase = found.nll / found.nll_dense - 1
    if digest:
        print_text(f"digest  {digest}\n")
    print_fields(
        {
            "replay": f"{found.replay:.1%} of the forwards t >= F",
            "on other videos": "unknown from one video" if found.expected is None else _expected(found.expected),
            "measured on": "one video" if found.expected is None else _measured(found.expected),
            "NLL": f"{found.nll:.4g} ({increase:+.1%} of dense)",
            "gate": found.gate,
            "thresholds": ", ".join("none" if value is None else f"{value:.6g}" for value in found.values),
            "per layer": ", ".join(f"{ratio:.1%}" for ratio in found.per_layer),
        }
    )


def _measured(found: Expected) -> str:
    """Return what the calibration did, in words."""
    all_videos = count_text(found.videos, "video")
    if found.searched in (None, found.videos):
        return all_videos
    return f"{all_videos}, of which {found.searched} found the layers' shares"


def _expected(found: Expected) -> str:
    """Return what other videos will replay, in words."""
    text = f"{found.replay:.1%} expected, {found.low:.1%} to {found.high:.1%} with {found.confidence:.0%} probability"
    if found.videos_needed <= found.videos:
        return text
    return f"{text}; two points to either side would take about {count_text(found.videos_needed, 'video')}"
