"""How targets write calls of tools: one format a file, chosen by the chat template."""
