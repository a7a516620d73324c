"""Grammars that answers conform to, with llguidance."""
