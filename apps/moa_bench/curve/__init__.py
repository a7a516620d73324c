"""How a drafter got better with the tokens it was trained on."""
