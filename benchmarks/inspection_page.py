"""How soon the inspection page of an artifact answers in headless Chromium, its size, and what writing it costs.

    python benchmarks/inspection_page.py [--artifact FOLDER] [--rounds 5] [--json out.json]

Without --artifact a random Llama of 32 layers is compiled for zcu102 first. Each round is a fresh browser.
`drawn` counts from the request until the graphs of the Graph tab stand. The page is measured twice: as it is, and with
the time lines of Llama 2 7B on zcu102 (w4a8, whole steps in the fabric, half of the MLPs replay) in place of its own.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LAYERS = 32
GOAL_SECONDS, GOAL_BYTES = 2.0, 5_000_000


def main() -> int:
    """Run the command line; the exit code is 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifact = options.artifact or compiled(Path(folder))
        pages = {"as it is": written, "time lines of 7B": written_with_large_calls}
        found = {name: measured(write, artifact, Path(folder), options.rounds) for name, write in pages.items()}
    for name, page in found.items():
        seconds = statistics.median(page.rounds)
        print(f"{name}:")
        print(f"  page     {page.size / 1e6:.2f} MB (goal {GOAL_BYTES / 1e6:g})")
        print(f"  drawn    {seconds:.2f} s, {min(page.rounds):.2f} to {max(page.rounds):.2f} (goal {GOAL_SECONDS:g})")
        print(f"  written  {page.written:.1f} s of CPU time")
    if options.json:
        options.json.write_text(json.dumps({name: asdict(page) for name, page in found.items()}, indent=1) + "\n")
    return int(any(statistics.median(p.rounds) > GOAL_SECONDS or p.size > GOAL_BYTES for p in found.values()))


@dataclass(frozen=True)
class Measured:
    """One page: bytes, CPU seconds of writing it, and seconds until it is drawn, of every round."""

    size: int
    written: float
    rounds: list[float]


def measured(write: Callable[[Path, Path], None], artifact: Path, folder: Path, rounds: int) -> Measured:
    """Return the figures of a page that `write` makes of an artifact."""
    page = folder / "page.html"
    start = sum(os.times()[:4])  # of this process and of those that it waited for
    write(artifact, page)
    seconds = sum(os.times()[:4]) - start
    return Measured(page.stat().st_size, seconds, [drawn(page) for _ in range(rounds)])


def written(artifact: Path, page: Path) -> None:
    """Write the page as a user does."""
    command = [sys.executable, "-m", "fastcar_compile", "inspect", str(artifact), "--html", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def written_with_large_calls(artifact: Path, page: Path) -> None:
    """Write the page with the time lines of a decoder of 7 billion parameters."""
    from fastcar_compile.artifact.reader import StoredArtifact
    from fastcar_compile.codegen.hls.model import Workload, estimate, load_shape
    from fastcar_compile.config.targets import load_target
    from fastcar_compile.report.page.page import page_data, page_html
    from fastcar_compile.report.page.speed import step_lines

    result = estimate(Workload(load_shape("llama2-7b"), "w4a8", 1024, offload="all", replay=0.5), load_target("zcu102"))
    data = page_data(StoredArtifact(artifact))
    speed = data["speed"] | {"steps": [*step_lines(result, "drawn")]}
    page.write_text(page_html(data | {"speed": speed}), "utf-8")


def compiled(folder: Path) -> Path:
    """Return the artifact of a random Llama of 32 layers with replay in each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import fastcar_compile as fc

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, max_position_embeddings=256)
    return fc.compile(LlamaForCausalLM(config), "zcu102", tokens_per_frame=16, output=folder / "artifact").path


def drawn(page: Path) -> float:
    """Return the seconds from the request of a page until its graphs stand, in a fresh browser."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("tool missing: chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 860})
        start = time.perf_counter()
        tab.goto(page.as_uri() + "#graph")
        tab.wait_for_selector("body[data-ready=true]")
        tab.wait_for_selector(".after svg .node")
        seconds = time.perf_counter() - start
        browser.close()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
