from support.drafter.fixtures import flags, store  # noqa: F401
