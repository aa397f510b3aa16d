"""Every family of decoders that is known to compile, as tiny random models against one independent reference."""
