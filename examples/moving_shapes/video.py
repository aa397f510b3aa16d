"""Synthetic videos of bouncing shapes, and their lossless tokens."""

import numpy as np

SIZE = 32
FRAMES = 8
PATCH = 2
TOKENS_PER_FRAME = (SIZE // PATCH) ** 2
TOKENS_PER_VIDEO = FRAMES * TOKENS_PER_FRAME
BOS = 2 ** (PATCH * PATCH)
VOCAB_SIZE = BOS + 1
MAX_SPRITES = 3
_KINDS = 3
_MAX_SPEED = 2


def make_videos(count: int, seed: int, frames: int = FRAMES) -> np.ndarray:
    """Return videos uint8 [N, frames, 32, 32] of 0 and 1.

    One to three squares, discs and diamonds move at constant speed and bounce off the borders.

    Args:
        count: number of videos N. seed: the same seed gives the same videos. frames: frames per video.
    """
    rng = np.random.default_rng(seed)
    shape = (count, MAX_SPRITES)
    kind = rng.integers(0, _KINDS, shape)
    radius = rng.integers(2, 6, shape)
    start = rng.random((*shape, 2))
    velocity = rng.integers(-_MAX_SPEED, _MAX_SPEED + 1, (*shape, 2))
    still = (velocity == 0).all(-1)
    velocity[still] = (1, -1)
    present = np.arange(MAX_SPRITES) < rng.integers(1, MAX_SPRITES + 1, (count, 1))
    room = SIZE - 1 - 2 * radius
    origin = np.rint(start * room[..., None]).astype(np.int64)
    video = np.zeros((count, frames, SIZE, SIZE), np.uint8)
    for frame in range(frames):
        centre = _bounce(origin + velocity * frame, room[..., None]) + radius[..., None]
        video[:, frame] = _draw(kind, centre, radius, present)
    return video


def _bounce(position: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return positions reflected into [0, room]."""
    folded = position % (2 * room)
    return np.minimum(folded, 2 * room - folded)


def _draw(kind: np.ndarray, centre: np.ndarray, radius: np.ndarray, present: np.ndarray) -> np.ndarray:
    grid = np.arange(SIZE)
    dy = np.abs(grid[:, None] - centre[..., 0, None, None])
    dx = np.abs(grid[None, :] - centre[..., 1, None, None])
    size = radius[..., None, None]
    inside = np.stack([np.maximum(dy, dx) <= size, dy * dy + dx * dx <= size * size + 1, dy + dx <= size], -1)
    chosen = np.take_along_axis(inside, kind[..., None, None, None], -1)[..., 0]
    return np.any(chosen & present[..., None, None], axis=1, keepdims=False).astype(np.uint8)


def tokenize(video: np.ndarray) -> np.ndarray:
    """Return uint8 [N, frames, 32, 32] as int64 [N, frames * 256]: one token per 2x2 patch, in raster order."""
    count, frames = video.shape[:2]
    side = SIZE // PATCH
    patches = video.reshape(count, frames, side, PATCH, side, PATCH).transpose(0, 1, 2, 4, 3, 5)
    bits = patches.reshape(count, frames * TOKENS_PER_FRAME, PATCH * PATCH).astype(np.int64)
    return bits @ (1 << np.arange(PATCH * PATCH))


def detokenize(tokens: np.ndarray) -> np.ndarray:
    """Return int64 [N, frames * 256] as uint8 [N, frames, 32, 32]: the inverse of `tokenize`.

    A wrongly sampled BOS inside a video gives an empty patch.

    Raises:
        ValueError: the tokens are not a whole number of frames.
    """
    count, length = tokens.shape
    if length % TOKENS_PER_FRAME:
        raise ValueError(f"{length} tokens are not a whole number of frames of {TOKENS_PER_FRAME}")
    side = SIZE // PATCH
    clean = np.where(tokens == BOS, 0, tokens)
    bits = (clean[..., None] >> np.arange(PATCH * PATCH)) & 1
    patches = bits.reshape(count, -1, side, side, PATCH, PATCH).transpose(0, 1, 2, 4, 3, 5)
    return patches.reshape(count, -1, SIZE, SIZE).astype(np.uint8)


def pixels(tokens: np.ndarray) -> np.ndarray:
    """Return `detokenize` as float64 from 0 to 1, for `fastcar evaluate --detokenize`."""
    return detokenize(tokens).astype(np.float64)


def with_bos(tokens: np.ndarray) -> np.ndarray:
    """Return int64 [N, T] as [N, 1 + T] with BOS first."""
    return np.concatenate([np.full((len(tokens), 1), BOS, np.int64), tokens], 1)
