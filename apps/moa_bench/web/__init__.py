"""What a drafting step costs in a browser."""
