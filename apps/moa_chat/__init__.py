"""Chat programs on top of the runtime."""
