from support.drafter.fixtures import flags, no_vllm, prompts, store, tokens, train  # noqa: F401
