"""The chat window."""
