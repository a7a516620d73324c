from support.drafter.fixtures import no_vllm  # noqa: F401  a fixture of every test here
