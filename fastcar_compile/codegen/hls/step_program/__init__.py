"""A decode step as a program for the engine: binary, JSON, simulator, and the caches in memory."""
