"""Code that the examples share: training, likelihood."""
