"""What the page of `fastcar play` shows in headless Chromium without a speed limit: dense, replay, and both.

    python benchmarks/play.py [--page FOLDER | --artifact FOLDER --world FOLDER] [--threads 1] [--rounds 3]
        [--seconds 12] [--pictures docs/images] [--json out.json]

In every round each mode plays the same start, seed and keys. The page is read four times a second; medians are printed
as a table. --pictures writes screenshots. --page: a folder that `fastcar play --static` wrote, in which the browser
generates the frames by itself; the shipped one unless an artifact is named. An artifact is played on a server, which
shares this machine's cores with the browser.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING

from PIL import Image

from fastcar_play.player import copy_player

if TYPE_CHECKING:
    from playwright.sync_api import Page

MODES = {"dense": "Dense", "replay": "Replay", "both": "Side by side"}
KEYS = ("ArrowUp", "ArrowUp", "ArrowLeft", "", "ArrowUp", "ArrowRight")
"""Held one after the other, each for as long; "": none."""

READ_MS = 250
SIZE = (1120, 700)
"""Of the page: room for the picture and the panel beside it."""

COLOURS = 256
"""Of a screenshot: a third of the bytes, and hardly a difference to the eye."""

FRAME = 12
"""Of the game, that a screenshot shows, or one soon after it: the sides of a game still show one place."""


@dataclass(frozen=True)
class Reading:
    """What the page showed at one time. replayed: share of the MLPs; side by side, of the replay side."""

    fps: float
    token_ms: float
    replayed: float
    steps_ms: float
    draws_ms: float
    pixels_ms: float
    png_ms: float


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=Path("examples/crafter/page"))
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--world", type=Path, help="of the artifact")
    parser.add_argument("--threads", type=int, help="of a player; default: all cores")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="of one mode in a round")
    parser.add_argument("--pictures", type=Path, help="folder of the screenshots")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (options.artifact is None) != (options.world is None):
        parser.error("an artifact needs its world")
    artifact = options.artifact
    server = files_of(options.page) if artifact is None else served(artifact, options.world, options.threads)
    with server as url, opened(url) as page:
        found = {mode: list[Reading]() for mode in MODES}
        for _ in range(options.rounds):
            for mode, readings in found.items():
                readings += played(page, mode, options.seconds)
        if options.pictures is not None:
            for mode in ("replay", "both"):
                save(pictured(page, mode), options.pictures / f"play_{mode}.png")
    print(table(found))
    if options.json is not None:
        readings = {mode: [asdict(reading) for reading in each] for mode, each in found.items()}
        options.json.write_text(json.dumps(readings, indent=1) + "\n")


@contextmanager
def served(artifact: Path, world: Path, threads: int | None) -> Iterator[str]:
    """Yield the address of a server."""
    words = [sys.executable, "-m", "fastcar_compile", "play", str(artifact), "--world", str(world), "--json"]
    words += [] if threads is None else ["--threads", str(threads)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = ""
        for line in process.stdout:
            lines += line
            if line == "}\n":
                break
        try:
            yield json.loads(lines)["url"]
        finally:
            process.terminate()


class Quiet(SimpleHTTPRequestHandler):
    """Says nothing of requests."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def files_of(built: Path) -> Iterator[str]:
    """Yield the address of a file server of a page, which is put together of its built files."""
    with TemporaryDirectory() as folder:
        shutil.copytree(built, folder, dirs_exist_ok=True)
        copy_player(Path(folder))
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/"
            server.shutdown()


@contextmanager
def opened(url: str) -> Iterator[Page]:
    """Yield the page in headless Chromium, ready to play and without a speed limit."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
        page.goto(url)
        page.wait_for_selector("body[data-state=paused]")
        page.uncheck("#limit")
        yield page
        browser.close()


def begin(page: Page, mode: str) -> None:
    """Begin a new game in a mode."""
    if page.get_attribute("body", "data-state") == "playing":
        page.click("#run")
        page.wait_for_selector("body[data-state=paused]")
    page.get_by_label(MODES[mode], exact=True).check()
    page.click("#restart")
    page.wait_for_selector("body[data-frame='0']")
    page.click("#cover")
    page.wait_for_selector("body[data-state=playing]")


def pictured(page: Page, mode: str) -> bytes:
    """Return a screenshot while the player walks; with the heat map where it hides no comparison."""
    page.set_checked("#heat", mode == "replay")
    begin(page, mode)
    page.keyboard.down("ArrowUp")
    while int(page.get_attribute("body", "data-frame") or 0) < FRAME:
        page.wait_for_timeout(READ_MS)
    page.evaluate("scrollTo(0, 0)")
    screenshot = page.screenshot()
    page.keyboard.up("ArrowUp")
    return screenshot


def played(page: Page, mode: str, seconds: float) -> list[Reading]:
    """Return what the page shows while a new game is played in a mode."""
    begin(page, mode)
    readings = list[Reading]()
    for key in KEYS:
        if key:
            page.keyboard.down(key)
        for _ in range(round(1000 * seconds / len(KEYS) / READ_MS)):
            page.wait_for_timeout(READ_MS)
            readings.append(read(page))
        if key:
            page.keyboard.up(key)
    return readings[len(readings) // len(KEYS) :]  # the first frames have nothing to replay, and tell no speed


def read(page: Page) -> Reading:
    """Return the figures that the page shows; side by side, the time of a token is that of the replay side."""
    parts = {name: float(ms) for name, ms in re.findall(r"(\w+) ([\d.]+) ms", page.inner_text("#parts"))}
    steps, draws, pixels, png = (parts.get(name, 0.0) for name in ("steps", "draws", "pixels", "PNG"))
    token_ms = float(re.findall(r"([\d.]+) ms / token", page.inner_text("#parts"))[0])
    replayed = float(page.inner_text("#share").removesuffix("%").split("%")[-1])
    fps = page.inner_text("#fps")
    return Reading(float(fps) if fps[0].isdigit() else 0.0, token_ms, replayed, steps, draws, pixels, png)


def table(found: dict[str, list[Reading]]) -> str:
    """Return the medians as a Markdown table."""
    columns = ("mode", "frames / s", "ms / token", "MLPs replayed", "forwards", "draws", "pixels", "PNG")
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    for mode, readings in found.items():

        def median(name: str, readings: list[Reading] = readings) -> float:
            return statistics.median(getattr(reading, name) for reading in readings)

        times = " | ".join(f"{median(name):.1f} ms" for name in ("steps_ms", "draws_ms", "pixels_ms", "png_ms"))
        shown = f"{median('fps'):.1f} | {median('token_ms'):.2f} | {median('replayed'):.0f} %"
        lines.append(f"| {MODES[mode]} | {shown} | {times} |")
    return "\n".join(lines)


def save(screenshot: bytes, path: Path) -> None:
    """Write a screenshot with fewer colours."""
    picture = Image.open(io.BytesIO(screenshot)).convert("RGB")
    picture.quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
