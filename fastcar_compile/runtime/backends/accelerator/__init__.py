"""What every backend with an accelerator shares: kernels called by argument name, the controller, the offload calls."""
