"""How soon the inspection page of an artifact answers in headless Chromium, and how large it is.

    python benchmarks/inspection_page.py [--artifact FOLDER] [--rounds 5] [--json out.json]

Without --artifact a random Llama of 32 layers is compiled for zcu102 first. Each round is a fresh browser.
`drawn` counts from the request until the graphs of the Graph tab stand.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS = 32
GOAL_SECONDS, GOAL_BYTES = 2.0, 5_000_000


def main() -> int:
    """Run the command line; the exit code is 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        artifact = options.artifact or compiled(Path(folder))
        command = [sys.executable, "-m", "fastcar_compile", "inspect", str(artifact), "--html", str(page)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        size = page.stat().st_size
        rounds = [drawn(page) for _ in range(options.rounds)]
    seconds = statistics.median(rounds)
    print(f"page   {size / 1e6:.2f} MB (goal {GOAL_BYTES / 1e6:g})")
    print(f"drawn  {seconds:.2f} s, {min(rounds):.2f} to {max(rounds):.2f} (goal {GOAL_SECONDS:g})")
    if options.json:
        options.json.write_text(json.dumps({"bytes": size, "seconds": rounds}, indent=1) + "\n")
    return int(seconds > GOAL_SECONDS or size > GOAL_BYTES)


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
