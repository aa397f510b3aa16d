"""Synthetic videos of digits that bounce over a starry sky, and their lossless tokens."""

import numpy as np

SIZE = 20
FRAMES = 8
PATCH = 2
LEVELS = 3
PATCHES_PER_FRAME = (SIZE // PATCH) ** 2
TOKENS_PER_FRAME = PATCHES_PER_FRAME + 1
"""Patches in raster order, then a separator."""

TOKENS_PER_VIDEO = FRAMES * TOKENS_PER_FRAME
SEPARATOR = LEVELS ** (PATCH * PATCH)
VOCAB_SIZE = SEPARATOR + 1
EMPTY, STAR, INK = range(LEVELS)
STAR_SHARE = 0.04
MAX_DIGITS = 2
_MAX_SPEED = 2
_POWERS = LEVELS ** np.arange(PATCH * PATCH)

_FONT = (
    "0E 11 13 15 19 11 0E|04 0C 04 04 04 04 0E|0E 11 01 02 04 08 1F|1F 02 04 02 01 11 0E|02 06 0A 12 1F 02 02|"
    "1F 10 1E 01 01 11 0E|06 08 10 1E 11 11 0E|1F 01 02 04 08 08 08|0E 11 11 0E 11 11 0E|0E 11 11 0F 01 02 0C"
)
"""Digits 0-9, five pixels wide and seven high, one byte per row."""

DIGITS = np.array([[[int(row, 16) >> (4 - x) & 1 for x in range(5)] for row in d.split()] for d in _FONT.split("|")])
"""int64 [10, 7, 5] of 0 and 1."""


def make_videos(count: int, seed: int, frames: int = FRAMES) -> np.ndarray:
    """Return videos uint8 [N, frames, 20, 20] of EMPTY, STAR and INK.

    One or two digits move at constant speed, or stand, and bounce off the borders in front of fixed stars.

    Args:
        count: number of videos N. seed: the same seed gives the same videos. frames: frames per video.
    """
    rng = np.random.default_rng(seed)
    sky = np.where(rng.random((count, SIZE, SIZE)) < STAR_SHARE, STAR, EMPTY).astype(np.uint8)
    digit = rng.integers(0, len(DIGITS), (count, MAX_DIGITS))
    room = np.array([SIZE - DIGITS.shape[1], SIZE - DIGITS.shape[2]])
    start = rng.integers(0, room + 1, (count, MAX_DIGITS, 2))
    velocity = rng.integers(-_MAX_SPEED, _MAX_SPEED + 1, (count, MAX_DIGITS, 2))
    still = (velocity[:, 0] == 0).all(-1)
    velocity[still, 0] = (1, -1)
    present = rng.integers(1, MAX_DIGITS + 1, count)
    video = np.repeat(sky[:, None], frames, 1)
    for index in range(count):
        for sprite in range(present[index]):
            for frame in range(frames):
                top, left = _bounce(start[index, sprite] + velocity[index, sprite] * frame, room)
                _stamp(video[index, frame, top:, left:], DIGITS[digit[index, sprite]])
    return video


def _bounce(position: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return positions reflected into [0, room]."""
    folded = position % (2 * room)
    return np.minimum(folded, 2 * room - folded)


def _stamp(image: np.ndarray, glyph: np.ndarray) -> None:
    """Draw a glyph at the image's corner, in place."""
    part = image[: glyph.shape[0], : glyph.shape[1]]
    part[glyph == 1] = INK


def tokenize(video: np.ndarray) -> np.ndarray:
    """Return uint8 [N, frames, 20, 20] as int64 [N, frames * 101]: one token per 2x2 patch, then a separator."""
    count, frames = video.shape[:2]
    side = SIZE // PATCH
    patches = video.reshape(count, frames, side, PATCH, side, PATCH).transpose(0, 1, 2, 4, 3, 5)
    symbols = patches.reshape(count, frames, PATCHES_PER_FRAME, PATCH * PATCH).astype(np.int64) @ _POWERS
    return np.pad(symbols, ((0, 0), (0, 0), (0, 1)), constant_values=SEPARATOR).reshape(count, -1)


def detokenize(tokens: np.ndarray) -> np.ndarray:
    """Return int64 [N, frames * 101] as uint8 [N, frames, 20, 20]: the inverse of `tokenize`.

    A wrongly sampled separator inside a frame gives an empty patch. A symbol in the place of a separator is dropped.

    Raises:
        ValueError: the tokens are not a whole number of frames.
    """
    count, length = tokens.shape
    if length % TOKENS_PER_FRAME:
        raise ValueError(f"{length} tokens are not a whole number of frames of {TOKENS_PER_FRAME}")
    side = SIZE // PATCH
    symbols = tokens.reshape(count, -1, TOKENS_PER_FRAME)[..., :PATCHES_PER_FRAME]
    clean = np.where(symbols == SEPARATOR, 0, symbols)
    pixels = clean[..., None] // _POWERS % LEVELS
    patches = pixels.reshape(count, -1, side, side, PATCH, PATCH).transpose(0, 1, 2, 4, 3, 5)
    return patches.reshape(count, -1, SIZE, SIZE).astype(np.uint8)


def pixels(tokens: np.ndarray) -> np.ndarray:
    """Return `detokenize` as float64 from 0 to 1, for `fastcar evaluate --detokenize`."""
    return detokenize(tokens) / float(INK)


def with_bos(tokens: np.ndarray) -> np.ndarray:
    """Return int64 [N, T] as [N, 1 + T] with a separator first."""
    return np.concatenate([np.full((len(tokens), 1), SEPARATOR, np.int64), tokens], 1)
