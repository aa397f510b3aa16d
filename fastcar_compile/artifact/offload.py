"""How the host calls an accelerator: values that compiler, backends and C++ host program share."""

from __future__ import annotations

MLP_FUNCTION = "fastcar.offloaded_mlp"
"""Packed function (x [B, H], replay [B], cached [B, H], layer, out [B, H]). The offload program calls it and the two
below. A library that has this program can be loaded only where they are registered."""

LINEAR_FUNCTION = "fastcar.offloaded_linear"
"""Packed function (x [B, K], name, out [B, N])."""

GATE_FUNCTION = "fastcar.offloaded_gate"
"""Packed function (query [B, Hq, 1, D], key cache [B, Hkv, S, D], x [B, H], cached x [B, H], chain [B], position [1],
step [1], stride, layer, replay [B], score [B], new chain [B]). The last three are its results. Query and key cache are
the integer 0 where the gate compares no query, x and the cached x where it does not read the MLP's input."""

FUNCTIONS = (MLP_FUNCTION, LINEAR_FUNCTION, GATE_FUNCTION)

EMBEDDED = "embedded"
"""Name of the result of the program `embed`: the rows that the step kernel is given, float32 [B, 1, H]."""

CONSTANTS = "constants"
"""The step kernel's argument for constants, and their name among the accelerator's weights."""
