"""What an answer costs over a network, for each way of serving the same target."""
