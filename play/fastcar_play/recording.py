"""A recording of the game as an animated GIF."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image as PIL

from fastcar_play.pixels import Picture
from fastcar_play.world import Image

FRAMES = 600
"""Frames of one recording, at most: 51 s of the world of Doom, whose frames take 3 / 35 s."""

BYTES = 64 << 20
"""Bytes of the pictures of one recording, at most."""

HEIGHT = 192
"""Pixels of a recording at least, where a frame's own are fewer: they are repeated."""

GAP = 2
"""Pixels of a frame between two sides."""

LEAST_MS, MOST_MS = 20, 1000
"""Least and most milliseconds of one frame. Browsers show shorter ones more slowly; a pause is not recorded as one."""


def most_frames(image: Image) -> int:
    """Return the frames of a recording at most, two sides each."""
    return max(1, min(FRAMES, BYTES // (2 * 3 * image.size[0] * image.size[1])))


class Recording:
    """Frames of a game, and when each was made."""

    def __init__(self, image: Image) -> None:
        self._image, self._most = image, most_frames(image)
        self._frames: list[tuple[Picture, ...]] = []
        self._times: list[float] = []

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def full(self) -> bool:
        """It takes no more frames."""
        return len(self._frames) >= self._most

    def add(self, pictures: Sequence[Picture], time: float) -> None:
        """Add a frame, unless it is full. time: in seconds, of any clock."""
        if not self.full:
            self._frames.append(tuple(pictures))
            self._times.append(time)

    def gif(self) -> bytes:
        """Return the animation. Sides stand beside each other; a frame of one side among such of two is centred."""
        high, wide = self._image.size
        most = max(len(frame) for frame in self._frames)
        canvas = (high, most * wide + (most - 1) * GAP, 3)
        across, down = self._image.pixel_shape
        times = max(1, -(-HEIGHT // (high * down)))
        shown = (canvas[1] * across * times, canvas[0] * down * times)
        first, *others = (_page(frame, canvas).resize(shown, PIL.Resampling.NEAREST) for frame in self._frames)
        out = io.BytesIO()
        first.save(out, "GIF", save_all=True, append_images=others, duration=self._durations(), loop=0, disposal=1)
        return out.getvalue()

    def _durations(self) -> list[int]:
        """Return milliseconds per frame; the last one is shown as long as the one before."""
        steps = np.diff(np.array(self._times)) * 1000
        kept = np.clip(np.append(steps, steps[-1:] if len(steps) else MOST_MS), LEAST_MS, MOST_MS)
        return [round(float(step)) for step in kept]


def _page(frame: tuple[Picture, ...], canvas: tuple[int, int, int]) -> PIL.Image:
    """Return the pictures of a frame beside each other, in 256 colours of their own."""
    page = np.zeros(canvas, np.uint8)
    wide = frame[0].shape[1]
    left = (canvas[1] - len(frame) * wide - (len(frame) - 1) * GAP) // 2
    for number, picture in enumerate(frame):
        begin = left + number * (wide + GAP)
        page[:, begin : begin + wide] = picture
    return PIL.fromarray(page).quantize(256, PIL.Quantize.FASTOCTREE, dither=PIL.Dither.NONE)


def png(picture: Picture) -> bytes:
    """Return a picture as PNG. It is compressed little: it goes over this machine's own network."""
    out = io.BytesIO()
    PIL.fromarray(np.ascontiguousarray(picture)).save(out, "PNG", compress_level=1)
    return out.getvalue()
