"""How many tokens a round commits, on one machine."""
