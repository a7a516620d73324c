"""Benchmarks of what users feel, and the link emulator they run over."""
