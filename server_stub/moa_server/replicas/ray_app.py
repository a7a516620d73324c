"""The verifier as an application of Ray Serve, see docs/serving.md and deploy/ray.yaml."""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve._private.common import DeploymentTargetInfo
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve.config import RequestRouterConfig
from starlette.applications import Starlette

from moa_server.app import Verifier
from moa_server.engine.load import load_engine, server_drafts, warm_up
from moa_server.logging import configure
from moa_server.replicas.autoscaling import stats_of
from moa_server.settings import ServeError, options_of, require_ray, settings_of

_ROUTER = "moa_server.replicas.router.SessionRouter"
#: Requests beyond sessions and plain decodings that a replica takes. There are never that many: at Ray's limit a
#: connection would go to a replica that does not have its conversation; the verifier itself refuses what is too much.
_OTHER_REQUESTS = 64
#: Seconds that a replica has to end in beyond its frames under way: to notice, and to close.
_END_S = 10.0


class Replica:
    """A replica for Ray. Its class is made by :func:`ray.serve.ingress`, which sends the requests to the app.

    Args:
        options: of ``moa-serve``.
    """

    async def __init__(self, options: argparse.Namespace) -> None:  # type: ignore[misc]  # Ray awaits it
        configure(options.log_format, options.log_level)
        engine, settings = load_engine(options), settings_of(options)
        drafts = server_drafts(engine, settings, options)
        self._verifier = Verifier(engine, settings, drafts=drafts)
        await warm_up(engine, self._verifier.worker.cost)
        # Exclude loaded objects from garbage collection: a full collection would take a second.
        gc.collect()
        gc.freeze()
        self._draining = asyncio.create_task(self._drain(options.drain_seconds))

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._verifier.app

    async def check_health(self) -> None:
        """Ray's, for as long as it takes the replica for one of those that serve.

        Raises:
            RuntimeError: it has drained, and Ray does not know.
        """
        if self._draining.done():
            raise RuntimeError("this replica has drained")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray's: figures for a policy, see :mod:`moa_server.replicas.autoscaling`."""
        return stats_of(self._verifier.worker.load)

    async def _drain(self, seconds: float) -> None:
        """When Ray ends the replica, answer the received frames and send all clients elsewhere."""
        await departure()
        await self._verifier.drain(seconds, asyncio.Event())


def build(args: Mapping[str, Any]) -> Application:
    """The application, for the ``import_path`` of a configuration file.

    Args:
        args: options of ``moa-serve`` without dashes, see :func:`~moa_server.settings.options_of`.

    Raises:
        MoaError: the release of Ray is untested, an option is invalid for replicas, or a token is missing.
    """
    require_ray("moa_server.replicas.ray_app")
    options = options_of(args)
    settings = settings_of(options)
    if not (settings.token or settings.token_file or options.insecure):
        text = "any client could use the replicas: set MOA_TOKEN in runtime_env, or token-file or insecure in args"
        raise ServeError(text, code="token_missing")
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="Verifier",
        max_ongoing_requests=2 * settings.max_sessions + _OTHER_REQUESTS,
        graceful_shutdown_timeout_s=options.drain_seconds + _END_S,
        graceful_shutdown_wait_loop_s=1.0,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    )
    return deployment.bind(options)


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
