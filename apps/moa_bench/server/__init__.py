"""What many sessions at once cost the verifier."""
