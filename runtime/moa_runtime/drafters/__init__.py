"""Drafters, which propose tokens: one protocol, several implementations."""
