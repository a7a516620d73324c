"""The verifier's own drafts: copies, and the drafter's device half for many sequences at once."""
