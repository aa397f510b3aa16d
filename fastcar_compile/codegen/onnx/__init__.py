"""ONNX: the rewritten decode step with `If` and explicit state."""
