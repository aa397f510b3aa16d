"""Artifacts on disk: layout, typed manifest, writer, reader, thresholds, explanation and report. No torch."""
