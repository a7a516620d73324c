"""Sizes that hold for every way in which vLLM is used here."""

#: Tokens of a block: small ones, for a rewind computes part of one again. vLLM's attention on CPUs wants multiples
#: of 32.
BLOCK = 32
#: Tokens of one draft at most: what vLLM's verification is made for.
MOST_DRAFTED = 128
#: Tokens of vLLM's context that no conversation has: the choice behind one that is full, and one more, for vLLM ends a
#: request that fills its context.
SPARE = 2
