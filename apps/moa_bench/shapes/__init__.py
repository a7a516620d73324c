"""Drafts at their price against the best fixed shape, over devices, links and targets that are told by their times."""
