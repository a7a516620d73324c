"""Checks of what an application asks for with a question."""

from __future__ import annotations

from moa_runtime.errors import ChatError
from moa_runtime.session.sampling import Sampling, impossible


def check_request(max_new_tokens: int, sampling: Sampling | None) -> None:
    """Raise ChatError if no verifier could serve this request."""
    if sampling is not None and (problem := impossible(sampling)):
        raise ChatError(problem)
    if sampling is not None and not 0 <= sampling.seed < 1 << 64:
        raise ChatError(f"a seed is a whole number of 64 bits, 0 or more, not {sampling.seed}")
    if sampling is not None and (sampling.top_k or sampling.min_p):
        raise ChatError("the verifier takes temperature, top_p and a seed so far: leave out top_k and min_p")
    if max_new_tokens < 0:
        raise ChatError(f"an answer may have 0 tokens (no limit) or more, not {max_new_tokens}")
