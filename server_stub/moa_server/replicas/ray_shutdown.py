"""Detects the shutdown of a replica by Ray, which only waits for its requests; sessions are such."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentTargetInfo
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace

#: Ray's proxies learn of it at about the same time: clients that reconnect after that find another replica.
_NOTICE_S = 1.0
_STOPPING = "STOPPING"


async def departure() -> None:
    """Wait until Ray ends this replica. Belongs to the event loop of a replica.

    Ray's routers receive the list of replicas for requests, without those that are ending. The list is also empty for a
    moment after a restart of Ray's controller, so the controller is queried too.
    """
    context = serve.get_replica_context()
    own = context.replica_id
    named = asyncio.Event()
    unnamed = asyncio.Event()

    def heard(targets: DeploymentTargetInfo) -> None:
        among = any(replica.replica_id == own for replica in targets.running_replicas)
        (named if among else unnamed).set()
        (unnamed if among else named).clear()

    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    key = (LongPollNamespace.DEPLOYMENT_TARGETS, own.deployment_id)
    listening: Any = LongPollClient(
        controller, {key: heard}, call_in_event_loop=asyncio.get_running_loop(), client_id=str(own)
    )
    try:
        await named.wait()
        while True:
            await unnamed.wait()
            await asyncio.sleep(_NOTICE_S)
            if unnamed.is_set() and await asyncio.to_thread(_stopping, context.app_name, context.deployment):
                return
    finally:
        listening.stop()


def _stopping(application: str, deployment: str) -> bool:
    """Whether a replica of the deployment is stopping, or the deployment is gone."""
    found = serve.status().applications.get(application)
    if found is None or deployment not in found.deployments:
        return True
    return _STOPPING in found.deployments[deployment].replica_states
