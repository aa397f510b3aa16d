"""Whole decodes for tests: logits of a session, and one artifact on every backend."""

import numpy as np
import torch
from torch import Tensor

from fastcar_compile import Artifact
from fastcar_compile.runtime.session import Session


def decode(session: Session, ids: Tensor, prompt: int) -> Tensor:
    """Logits [B, T - prompt + 1, V] of ids int64 [B, T] after a prompt of so many of them."""
    session.reset()
    out = [session.prefill(ids[:, :prompt])]
    return torch.stack(out + [session.step(ids[:, i]) for i in range(prompt, ids.shape[1])], 1)


def thresholds_between(scores: np.ndarray) -> np.ndarray:
    """Thresholds float32 [L] for scores [T, L, B]: in the widest gap of a layer's middle scores, so that rounding
    decides nothing and about half of the rows replay."""
    ordered = np.sort(scores.swapaxes(1, 2).reshape(-1, scores.shape[1]), axis=0)
    middle = ordered[len(ordered) // 4 : 3 * len(ordered) // 4]
    widest, layers = np.diff(middle, axis=0).argmax(0), np.arange(scores.shape[1])
    return ((middle[widest, layers] + middle[widest + 1, layers]) / 2).astype(np.float32)


def check_backends(artifact: Artifact, ids: Tensor, prompt: int) -> None:
    """Eager, TVM, onnxruntime and C simulation decide alike, some rows replay and some compute, and logits are near."""
    found, decisions = {}, {}
    for backend in ("eager", "cpu", "onnxruntime", "hls-csim"):
        session = artifact.session(backend, record=True)
        found[backend] = decode(session, ids, prompt)
        decisions[backend] = np.asarray(session.stats.decisions)
    assert 0.1 < decisions["eager"].mean() < 0.8
    for backend in found:
        assert (decisions[backend] == decisions["eager"]).all(), backend
        torch.testing.assert_close(found[backend], found["eager"], atol=1e-2, rtol=0)
    assert torch.equal(found["cpu"], found["hls-csim"])
