"""One artifact with exact numerics whose whole decode step is on the accelerator."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import built_once, check_tool
from decoders import llama

import fastcar_compile as fc

FRAME, LENGTH, BATCH, PROMPT = 8, 65, 2, 21


def compiled(output: Path, **options: Any) -> fc.Artifact:
    """A grouped-query Llama with exact numerics."""
    defaults: dict[str, Any] = {"target": "zcu102", "quant": "w8a8", "prefill_chunk": 1}
    if options.get("offload") != "all":
        defaults |= {"kv": "int8", "numerics": "exact"}
    return fc.compile(
        llama(initializer_range=0.2, head_dim=32), tokens_per_frame=FRAME, max_seq_len=LENGTH, batch_size=BATCH,
        output=output, **{**defaults, **options},
    )  # fmt: skip


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """With offload="all", and replay in both layers. One of the test processes builds it."""
    check_tool("g++")
    replay = fc.ReplayConfig(threshold=0.0)
    return built_once(
        tmp_path_factory, "whole_step", lambda output: compiled(output, offload="all", replay=replay, prefill_chunk=4)
    )


def token_ids() -> torch.Tensor:
    """Tokens of whole sequences, int64 [BATCH, LENGTH]."""
    return torch.randint(0, 17, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
