"""The verifier as an application of Ray Serve, see docs/serving.md and deploy/ray.yaml."""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from starlette.applications import Starlette

from moa_server.app import Verifier, create_app
from moa_server.engine.load import load_engine, server_drafts, warm_up
from moa_server.logging import configure
from moa_server.options import ServeError, settings_of
from moa_server.replicas.autoscaling import stats_of
from moa_server.replicas.replica_options import options_of, require_ray
from moa_server.settings import Settings

_ROUTER = "moa_server.replicas.router.SessionRouter"
#: Requests beyond sessions and plain decodings that a replica takes: the verifier says itself that it is full.
_OTHER_REQUESTS = 64
#: Seconds that a replica has to end in beyond its frames under way: to notice, and to close.
_NOTICE_S = 10.0


class Replica:
    """A replica for Ray. Its class is made by :func:`ray.serve.ingress`, which sends the requests to the app.

    Args:
        options: of ``moa-serve``.
    """

    async def __init__(self, options: argparse.Namespace) -> None:  # type: ignore[misc]  # Ray awaits it
        configure(options.log_format, options.log_level)
        engine, settings = load_engine(options), settings_of(options)
        self._app = create_app(engine, settings, drafts=server_drafts(engine, settings, options))
        self._verifier: Verifier = self._app.state.verifier
        await warm_up(engine, self._verifier.worker.cost)
        # Exclude loaded objects from garbage collection: a full collection would take a second.
        gc.collect()
        gc.freeze()
        self._draining = asyncio.create_task(self._drain(options.drain_seconds))

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._app

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
        from moa_server.replicas.ray_shutdown import departure

        await departure()
        await self._verifier.drain(seconds, asyncio.Event())


def build(args: Mapping[str, Any]) -> Application:
    """The application, for the ``import_path`` of a configuration file.

    Args:
        args: options of ``moa-serve`` without dashes, see :func:`~moa_server.replicas.replica_options.options_of`.

    Raises:
        MoaError: the release of Ray is untested, an option is invalid for replicas, or a token is missing.
    """
    require_ray("moa_server.replicas.ray_app")
    options = options_of(args)
    settings = settings_of(options)
    if not (settings.token or settings.token_file or options.insecure):
        raise ServeError(
            "whoever reaches Ray's proxy could use the replicas: set MOA_TOKEN in the env_vars of the runtime_env, or "
            "token-file or insecure: true in the args"
        )

    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="Verifier",
        max_ongoing_requests=_most_requests(settings),
        graceful_shutdown_timeout_s=options.drain_seconds + _NOTICE_S,
        graceful_shutdown_wait_loop_s=1.0,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    )
    return deployment.bind(options)


def _most_requests(settings: Settings) -> int:
    """More than there can be: at Ray's limit a connection would go to a replica that does not have its conversation."""
    return 2 * settings.max_sessions + _OTHER_REQUESTS
