"""Markdown for the window, without Qt: blocks, and where their text stands in the source."""
