"""What a service for many users takes: a simulation of verifiers and their clients, fed by measured times."""
