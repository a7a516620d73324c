"""The verifier: runs the target, decides every committed token, hands out memory rows."""
