"""What the examples share: training, likelihood."""
