"""vLLM's scheduler, for requests that wait until they are given something to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


class ParkingScheduler(Scheduler):  # type: ignore[misc]
    """Requests that are *parked* keep their blocks and are in no step; vLLM does not see them, so it never preempts
    them for others either. Who gives way is decided before a step, by :mod:`moa_server.engine.vllm.engine`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._awake: Mapping[str, Sequence[int]] = {}
        # Else a request with one token to compute is padded with as many drafted ones as there may be. vLLM pads none
        # where their number depends on the batch.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def wake(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """These requests alone are in the next step, each with a draft, perhaps an empty one."""
        self._awake = drafts

    def rewrite(self, name: str, keep: int, tokens: Sequence[int]) -> None:
        """Let a request hold its first ``keep`` tokens, and go on with ``tokens`` as if they were of its prompt.

        That is how vLLM extends the input of a request that is streamed to it. A block that is full may be shared, and
        be known by its tokens: ``keep`` lies behind those.

        Args:
            tokens: at least one.
        """
        request = self.requests[name]
        self.running.remove(request)
        known = request._all_token_ids
        del known[keep:], request.block_hashes[keep // self.hash_block_size :]
        known += tokens
        request.update_block_hashes()
        request.prompt_token_ids, request.num_prompt_tokens = list(known), len(known)
        request._output_token_ids.clear()
        request.spec_token_ids = []
        request.num_computed_tokens = keep
        request.status = RequestStatus.WAITING
        self._enqueue_waiting_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step of those that are awake."""
        awake, parked = [], []
        for request in self.running:
            draft = self._awake.get(request.request_id)
            (parked if draft is None else awake).append(request)
            if draft and not request.is_prefill_chunk:
                request.spec_token_ids = list(draft)
        self.running = awake
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.running = parked + self.running
