"""All results as one page."""
