"""Who drafts, in simulated scenarios: what the runtime chooses against the device alone and the server alone."""
