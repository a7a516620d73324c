"""Two replicas of the Ray Serve application, in a cluster on this machine."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moa_runtime.transport import Endpoint
from moa_server.settings import require_ray
from support.system.replica_fleet import REPLICAS, wait_for

APPLICATION = "moa"
DEPLOYMENT = "Verifier"
_IMPORT_PATH = "moa_server.replicas.ray_app:build"
_HOST = "127.0.0.1"
_NAMESPACE = "serve"  # of Ray Serve's own actors
_OBJECT_STORE_BYTES = 100 << 20
_CPUS_OF_A_REPLICA = 0.1  # replicas share this machine's processors with the chats


class RayFleet:
    """Implement :class:`~system.replica_fleet.Fleet`; ``deployment`` has more options, as ``autoscaling_config``."""

    def __init__(self, endpoint: Endpoint, args: Mapping[str, object], deployment: Mapping[str, Any]) -> None:
        self.endpoint = endpoint
        self._args, self._deployment = dict(args), dict(deployment)
        self._actors: list[str] = []  # names of the replicas left after the drain

    def drain(self) -> None:
        self.deploy(REPLICAS - 1)
        self._wait_for(REPLICAS - 1)
        self._actors = _actors()

    def kill(self) -> None:
        import ray

        for name in self._actors:
            ray.kill(ray.get_actor(name, namespace=_NAMESPACE))
        wait_for("Ray still considered a dead replica alive", lambda: self.states() != {"RUNNING": REPLICAS})

    def replace(self) -> None:
        self.deploy(REPLICAS)
        self._wait_for(REPLICAS)

    def deploy(self, replicas: int | None) -> None:
        """Do as ``serve deploy`` does for this number of replicas; None for as many as an autoscaler wants."""
        from ray.serve._private.api import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        deployment = {
            "name": DEPLOYMENT,
            "num_replicas": replicas,
            "ray_actor_options": {"num_cpus": _CPUS_OF_A_REPLICA},
            **self._deployment,
        }
        application = {
            "name": APPLICATION,
            "route_prefix": "/",
            "import_path": _IMPORT_PATH,
            "args": self._args,
            "runtime_env": {"env_vars": {"MOA_TOKEN": self.endpoint.token}},
            "deployments": [deployment],
        }
        # The command does the same in Ray's dashboard, which needs more memory than everything else here.
        _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]), _blocking=False)

    def states(self) -> dict[str, int]:
        """Return the number of replicas in each state."""
        from ray import serve

        application = serve.status().applications.get(APPLICATION)
        if application is None or DEPLOYMENT not in application.deployments:
            return {}
        assert application.status != "DEPLOY_FAILED", application.message
        return dict(application.deployments[DEPLOYMENT].replica_states)

    def _wait_for(self, replicas: int) -> None:
        wait_for(f"Ray had not {replicas} replicas", lambda: self.states() == {"RUNNING": replicas})


@contextlib.contextmanager
def behind_ray(
    options: Mapping[str, object], *, replicas: int | None = REPLICAS, deployment: Mapping[str, Any] | None = None
) -> Iterator[RayFleet]:
    """Run replicas with these options of ``moa-serve`` behind Ray Serve while the context is open."""
    require_ray("a fleet behind Ray Serve")
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Replicas have another working directory.
    args = {name: str(Path(str(value)).absolute()) if _is_path(value) else value for name, value in options.items()}
    with socket.create_server((_HOST, 0)) as listening:
        port = listening.getsockname()[1]
    endpoint = Endpoint(f"ws://{_HOST}:{port}", secrets.token_urlsafe(24))
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        serve.start(http_options={"host": _HOST, "port": port})
        fleet = RayFleet(endpoint, args, deployment or {})
        fleet.deploy(replicas)
        wait_for("no replica was ready", lambda: fleet.states().get("RUNNING", 0) >= (replicas or 1))
        yield fleet
    finally:
        ray.shutdown()  # with all that runs in this cluster


def _actors() -> list[str]:
    """Return the names of the replicas' actors."""
    import ray

    prefix = f"SERVE_REPLICA::{APPLICATION}#{DEPLOYMENT}#"
    named = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in named if name.startswith(prefix)]


def _is_path(value: object) -> bool:
    return isinstance(value, str | Path) and Path(value).exists()
