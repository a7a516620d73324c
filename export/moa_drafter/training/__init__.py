"""Training the drafter on answers that the target wrote itself."""
