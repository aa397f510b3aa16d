"""Calibration: one threshold per layer, for a target replay ratio or a limit on the NLL, from a few videos."""
