"""Several verifiers as one: an application for Ray Serve, and configurations (docs/serving.md)."""
