"""A decode step for the engine: what it keeps in memory."""
