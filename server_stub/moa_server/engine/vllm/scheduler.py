"""vLLM's scheduler, for requests that wait until they are given something to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


class ParkingScheduler(Scheduler):  # type: ignore[misc]
    """*Parked* requests keep their blocks and are in no step; vLLM does not see them, so it never preempts them.
    :mod:`moa_server.engine.vllm.engine` decides before a step which requests are evicted."""

    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._awake: Mapping[str, Sequence[int]] = {}
        # Else a request with one token to compute is padded with as many drafted ones as there may be. vLLM pads none
        # where their number depends on the batch.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def wake(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Choose the requests of the next step, each with a draft that may be empty."""
        self._awake = drafts

    def rewrite(self, name: str, keep: int, tokens: Sequence[int]) -> None:
        """Keep the first ``keep`` tokens of a request, and append ``tokens``, at least one, as if they were of its
        prompt: vLLM extends the input of streamed requests in the same way.

        Full blocks may be shared and are found by their tokens, so ``keep`` must lie after them.
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
        """Schedule a step of the awake requests."""
        awake: list[Any] = []
        parked: list[Any] = []
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
