"""Long videos of the example decoder: quality and time per frame, with full and with sink-window attention.

    python benchmarks/long_video.py --docs        # tables and pictures of docs/measurements/long_video.md
    python benchmarks/long_video.py --frames 3 --videos 1 --attention "window 512, in cache" --no-decode   # a look

Quality is teacher-forced on held-out videos of many more frames than in training (8): NLL per frame for every attention
and every rule that limits chains of replays. Time is that of a free decode after two given frames. The decoder was
tuned for replay. It has its gate `learned` and the thresholds of its cases.json.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import MEASUREMENTS, ROOT, markdown, write_table

sys.path[:0] = [str(ROOT / "examples" / "moving_shapes"), str(ROOT / "examples")]

from demo import replay_config  # noqa: E402
from evaluate import HELD_OUT_SEED, load_model  # noqa: E402
from render import write_strip  # noqa: E402
from video import TOKENS_PER_FRAME, detokenize, make_videos, tokenize, with_bos  # noqa: E402

import fastcar_compile as fc  # noqa: E402
from fastcar_compile.frontend.capture import capture  # noqa: E402
from fastcar_compile.ir.pass_manager import run_pipeline  # noqa: E402
from fastcar_compile.ir.program import DecoderProgram  # noqa: E402
from fastcar_compile.ir.types import StateRole  # noqa: E402
from fastcar_compile.passes.caches import SparsifyAttention  # noqa: E402
from fastcar_compile.passes.pipeline import analysis_pipeline  # noqa: E402
from fastcar_compile.tune.calibrate import rules_of  # noqa: E402
from fastcar_compile.tune.evaluator import Evaluator  # noqa: E402

SINKS = 16
ATTENTIONS: dict[str, fc.SparseAttention | None] = {
    "all positions": None,
    "window 512": fc.SparseAttention(window=512, sinks=SINKS),
    "window 512, in cache": fc.SparseAttention(window=512, sinks=SINKS, positions="cache"),
    "window 256": fc.SparseAttention(window=256, sinks=SINKS),
    "window 256, in cache": fc.SparseAttention(window=256, sinks=SINKS, positions="cache"),
}
DECODED = ("all positions", "window 512, in cache")
"""Attentions that are decoded freely."""

CHAINS: dict[str, dict[str, int]] = {
    "unlimited": {},
    "max_chain=4": {"max_chain": 4},
    "refresh_every=4": {"refresh_every": 4},
}
FOLDER = ROOT / "examples" / "moving_shapes" / "tuned"
REPLAY = replay_config(FOLDER, "learned", 0.8)
GIVEN_FRAMES = 2
CACHES = (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)


def program_of(attention: fc.SparseAttention | None, rows: int, length: int) -> DecoderProgram:
    """Return the dense decoder with this attention. The evaluator adds replay itself."""
    program = capture(
        load_model(FOLDER / "model"),
        batch_size=rows,
        max_seq_len=length,
        tokens_per_frame=TOKENS_PER_FRAME,
        prefill_chunk=TOKENS_PER_FRAME,
    )
    passes = list(analysis_pipeline())
    if attention is not None:
        passes.append(SparsifyAttention(attention.sinks, attention.window, attention.positions))
    return run_pipeline(program, passes)


def quality_rows(tokens: np.ndarray, attentions: dict[str, Any]) -> list[dict[str, Any]]:
    """Return NLL per frame and replay ratio, dense and with every chain rule.

    Args:
        tokens: int64 [N, 1 + frames * 256].
    """
    rows = []
    for name, attention in attentions.items():
        program = program_of(attention, len(tokens), tokens.shape[1])
        cache = sum(s.nbytes for s in program.state if s.role in CACHES) // len(tokens)
        for chain, limits in {"dense": {}, **CHAINS}.items():
            layers = program.config.num_layers
            rules = rules_of(REPLAY.model_copy(update=limits), layers)
            thresholds = [None] * layers if chain == "dense" else list(REPLAY.thresholds(layers))
            found = Evaluator(program, tokens, rules).details(thresholds)
            losses = found.losses.reshape(len(tokens), -1, TOKENS_PER_FRAME).mean((0, 2))
            able = found.replayed[..., TOKENS_PER_FRAME:].float()
            rows.append(
                {
                    "attention": name,
                    "chain": chain,
                    "replay_ratio": float(able.mean()) if able.numel() else 0.0,
                    "nll_by_frame": [round(float(v), 5) for v in losses],
                    "kv_bytes_per_row": cache,
                }
            )
            print(f"{name:22} {chain:16} replay {rows[-1]['replay_ratio']:.3f}", *_summary(losses), flush=True)
    return rows


def _summary(losses: torch.Tensor) -> list[str]:
    """Return texts of the mean NLL over frames 2-8 and over the last eight, in nats."""
    return [f"frames 2-8 {float(losses[1:8].mean()):.4f}", f"last eight {float(losses[-8:].mean()):.4f}"]


def decode_rows(
    tokens: np.ndarray, attentions: dict[str, Any], folder: Path
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Decode one video greedily on the cpu backend. Return milliseconds per token by frame, and the frames.

    Args:
        tokens: int64 [1, 1 + frames * 256].
    """
    rows, videos = [], {}
    prompt = torch.from_numpy(tokens[:, : 1 + GIVEN_FRAMES * TOKENS_PER_FRAME])
    for name, attention in attentions.items():
        artifact = fc.compile(
            load_model(FOLDER / "model"),
            target="cpu",
            tokens_per_frame=TOKENS_PER_FRAME,
            max_seq_len=tokens.shape[1],
            replay=REPLAY,
            sparse_attention=attention,
            output=folder / name.replace(" ", "_").replace(",", ""),
        )
        state = artifact.program.state
        for replay in (False, True):
            session = artifact.session("cpu")
            if not replay:
                session.set_threshold(None)
            made, times = _decode(session, prompt, tokens.shape[1] - prompt.shape[1])
            label = f"{name}{', replay' if replay else ''}"
            videos[label] = detokenize(np.concatenate([prompt[:, 1:].numpy(), made], 1))[0]
            rows.append(
                {
                    "attention": name,
                    "replay_ratio": session.stats.replay_ratio,
                    "ms_per_token_by_frame": [round(1e3 * t, 4) for t in times],
                    "kv_bytes": sum(s.nbytes for s in state if s.role in CACHES),
                    "state_bytes": sum(s.nbytes for s in state),
                }
            )
            print(f"{label:32} ms per token: first {1e3 * times[0]:.3f}, last {1e3 * times[-1]:.3f}", flush=True)
    return rows, videos


def _decode(session: fc.Session, prompt: torch.Tensor, count: int) -> tuple[np.ndarray, list[float]]:
    """Return tokens int64 [1, count] and the median seconds of a step in each frame."""
    token = session.prefill(prompt).argmax(-1)
    made, times = [token], []
    for _ in range(count - 1):
        start = time.perf_counter()
        token = session.step(token).argmax(-1)
        times.append(time.perf_counter() - start)
        made.append(token)
    frames = [times[i : i + TOKENS_PER_FRAME] for i in range(0, len(times), TOKENS_PER_FRAME)]
    return torch.stack(made, 1).numpy(), [float(np.median(f)) for f in frames if len(f) > 1]


def plot(quality: list[dict[str, Any]], decoded: list[dict[str, Any]], path: Path) -> None:
    """Draw NLL by frame of the attentions and of the chain rules, and time by frame of the free decodes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3 if decoded else 2, figsize=(14 if decoded else 10, 4.2), layout="constrained")
    left, middle = panels[:2]
    for row in quality:
        frames = range(2, len(row["nll_by_frame"]) + 1)
        if row["chain"] == "dense":
            left.plot(frames, row["nll_by_frame"][1:], label=row["attention"])
        if row["attention"] == DECODED[-1]:
            middle.plot(frames, row["nll_by_frame"][1:], label=f"{row['chain']} ({row['replay_ratio']:.0%} replay)")
    left.set(title="dense, by attention", yscale="log")
    left.axvspan(2, 8, color="0.9", zorder=0, label="frames of the training")
    middle.set(title=f"{DECODED[-1]}: chains of replays", ylim=(0, None))
    for axes in (left, middle):
        axes.set(xlabel="frame", ylabel="NLL, nats per token")
    if decoded:
        _plot_times(decoded, panels[2])
    for axes in panels:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _plot_times(decoded: list[dict[str, Any]], axes: Any) -> None:
    for row in decoded:
        label = f"{row['attention']}, {row['replay_ratio']:.0%} replay, {row['kv_bytes'] / 2**20:.1f} MiB KV"
        axes.plot(range(3, len(row["ms_per_token_by_frame"]) + 3), row["ms_per_token_by_frame"], label=label)
    axes.set(title="free decode, cpu backend", xlabel="frame", ylabel="ms per token", ylim=(0, None))


def quality_table(quality: list[dict[str, Any]], frames: int) -> str:
    """Return mean NLL in nats per token over parts of the videos."""
    parts = [(2, 8), (9, 24), (25, frames)]
    lines = []
    for row in quality:
        size = f"{row['kv_bytes_per_row'] / 2**20:.1f} MiB"
        means = [f"{np.mean(row['nll_by_frame'][a - 1 : b]):.4f}" for a, b in parts]
        lines.append((row["attention"], size, row["chain"], f"{100 * row['replay_ratio']:.0f} %", *means))
    columns = ("attention", "KV", "chains of replays", "replay, t >= F", *(f"frames {a}-{b}" for a, b in parts))
    return markdown(columns, lines)


def time_table(decoded: list[dict[str, Any]]) -> str:
    """Return times of free decodes."""
    lines = []
    for row in decoded:
        first, last = row["ms_per_token_by_frame"][0], row["ms_per_token_by_frame"][-1]
        lines.append((row["attention"], f"{100 * row['replay_ratio']:.0f} %", f"{first:.2f}", f"{last:.2f}"))
    return markdown(("free decode", "replay, all forwards", "ms per token, first frame", "last frame"), lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--videos", type=int, default=2, help="held-out videos for the quality")
    parser.add_argument("--docs", action="store_true", help="write the tables and the pictures named above")
    parser.add_argument("--attention", action="append", choices=list(ATTENTIONS), help="default: all of them")
    parser.add_argument("--no-decode", action="store_true", help="quality only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--strip", type=Path, help="frames of the free decodes as a picture")
    options = parser.parse_args()
    if options.docs:
        options.plot, options.strip = (ROOT / "docs" / "images" / f"long_video{end}.png" for end in ("", "_strip"))
    tokens = with_bos(tokenize(make_videos(options.videos, HELD_OUT_SEED, options.frames)))
    chosen = {n: ATTENTIONS[n] for n in options.attention or ATTENTIONS}
    quality = quality_rows(tokens, chosen)
    decoded, videos = [], {"true": detokenize(tokens[:1, 1:])[0]}
    if not options.no_decode:
        with tempfile.TemporaryDirectory() as folder:
            decoded, made = decode_rows(tokens[:1], {n: chosen[n] for n in DECODED if n in chosen}, Path(folder))
        videos |= made
    if options.json is not None:
        rows = {"frames": options.frames, "videos": options.videos, "quality": quality, "decode": decoded}
        options.json.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    if options.docs:
        write_table(MEASUREMENTS / "long_video.md", "quality", quality_table(quality, options.frames))
        write_table(MEASUREMENTS / "long_video.md", "times", time_table(decoded))
    if options.plot is not None:
        plot(quality, decoded, options.plot)
    if options.strip is not None:
        shown = sorted({min(f, options.frames) - 1 for f in (2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)})
        write_strip({name: video[shown] for name, video in videos.items()}, options.strip, scale=3)


if __name__ == "__main__":
    main()
