"""Scheduling: choose the jobs of each step, and run the steps on the engine."""
