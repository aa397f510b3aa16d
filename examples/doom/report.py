"""Write what was measured as results.md, with the curves of the trainings and the strips in pictures/."""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from common.progress import read_log
from measure import KINDS, ROLES

HEADING = """# What the doom decoder can do

`python examples/doom/report.py` writes this page from the files of `measure.py` and of the trainings; do not edit it
by hand. All figures are of held-out play: no frame of it was trained on.
"""
TRAINED_ON = {"decoder": "yes", "tokenizer": "its tokenizer only", "nothing": "no"}
Measured = dict[str, dict[str, Any]]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def likelihood(measured: Measured) -> str:
    """Return the table of NLL by scenario and kind of motion."""
    rows = []
    for name, found in measured.items():
        by_kind = [found["nll"].get(kind) for kind in (*KINDS, "all")]
        cells = ["" if one is None else f"{one['nll']:.2f} ({one['frames']})" for one in by_kind]
        rows.append([f"`{name}`", TRAINED_ON[found["role"]], *cells])
    return table(["scenario", "trained on", *KINDS, "all"], rows)


def pictures(measured: Measured) -> str:
    """Return the table of PSNR and SSIM: the tokenizer, one generated frame, and 64 of them."""
    rows = []
    for name, found in measured.items():
        tokens, step = found["reconstruction"], found["one_step"]
        pairs = [tokens, {"psnr": tokens["jpeg_psnr"], "ssim": tokens["jpeg_ssim"]}]
        pairs += [step[kind] for kind in ("drawn", "most likely", "true tokens", "frame before")]
        cells = [f"{pair['psnr']:.1f} / {pair['ssim']:.2f}" for pair in pairs]
        rows.append([f"`{name}`", *cells, ", ".join(f"{psnr:.1f}" for psnr in found["rollout_psnr"])])
    names = ["tokens", "JPEG", "drawn", "most likely", "true tokens", "frame before", "64 frames"]
    return table(["scenario", *names], rows)


def draw_curves(logs: dict[str, Path], path: Path) -> None:
    """Draw both trainings: the tokenizer's PSNR and the decoder's NLL."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    entries = read_log(logs["tokenizer"])
    left.plot([entry["step"] for entry in entries], [entry["held_out_psnr"] for entry in entries])
    left.set(title="tokenizer", xlabel="step", ylabel="held-out PSNR, dB")
    entries = read_log(logs["decoder"])
    for name in ("train_nll", "held_out_nll"):
        right.plot([entry["step"] for entry in entries], [entry[name] for entry in entries], label=name)
    right.set(title="decoder", xlabel="step", ylabel="nats per image token")
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def page(measured: Measured, logs: dict[str, Path]) -> str:
    """Return the text of results.md."""
    last = {name: read_log(path)[-1] for name, path in logs.items()}
    hours = {name: f"{entry['seconds'] / 3600:.1f} h" for name, entry in last.items()}
    steps = {name: f"{entry['step']:.0f}" for name, entry in last.items()}
    shown = [name for role in ROLES for name, found in measured.items() if found["role"] == role]
    strips = [
        f"![{name}](pictures/rollout_{name}_{number}.png)\n"
        for name in shown
        for number in range(1, 1 + len(measured[name]["rollout_psnr"]))
    ]
    parts = [
        HEADING,
        f"The tokenizer was trained for {steps['tokenizer']} steps in {hours['tokenizer']}, the decoder for "
        f"{steps['decoder']} steps in {hours['decoder']}, on two cores that also did other work.\n",
        "![Training](pictures/curves.png)\n",
        "## Likelihood\n",
        "NLL of a frame's image tokens in nats per token, after 15 true frames; in brackets the frames. A uniform "
        "guess has 6.91.\n",
        likelihood(measured),
        "## Pictures\n",
        "PSNR in dB and SSIM against the game's own pixels. *tokens*: the frame through the tokenizer. *JPEG*: of the "
        "same bits. The next four are of one frame after 16 true ones: its tokens drawn, the most likely ones, the "
        "true ones, and those of the frame before. *64 frames*: PSNR of two rollouts of 64 frames.\n",
        pictures(measured),
        "## Rollouts\n",
        "16 true frames, then 64 generated ones under the recorded actions; every fourth is shown. Above the game, "
        "below the decoder.\n",
        *strips,
        "## Tokenizer\n",
        *(f"![{name}](pictures/tokens_{name}.png)\n" for name in shown),
    ]
    return "\n".join(parts)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, default=Path("build/doom/measured"), help="folder of measure.py")
    parser.add_argument("--tokenizer-log", type=Path, default=Path("build/doom/tokenizer.jsonl"))
    parser.add_argument("--decoder-log", type=Path, default=Path("build/doom/decoder.jsonl"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    logs = {"tokenizer": options.tokenizer_log, "decoder": options.decoder_log}
    measured: Measured = json.loads((options.measured / "measured.json").read_text())
    draw_curves(logs, options.out / "pictures" / "curves.png")
    for strip in sorted(options.measured.glob("*.png")):
        shutil.copyfile(strip, options.out / "pictures" / strip.name)
    (options.out / "results.md").write_text(page(measured, logs))


if __name__ == "__main__":
    main()
