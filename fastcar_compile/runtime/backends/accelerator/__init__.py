"""Parts of every backend with an accelerator: kernels called by argument name, the controller, the offload calls."""
