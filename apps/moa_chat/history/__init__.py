"""Conversations kept on this machine, in one SQLite file."""
