"""Which Ray this is tested with."""

from __future__ import annotations

from importlib.metadata import version

from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra

#: Ray Serve's routers and autoscaling are young: another release may call them otherwise.
TESTED = "2.60"


def require_ray(program: str) -> None:
    """Check that Ray Serve is installed, in a release that this is tested with.

    Raises:
        MoaError: it is not; the message gives the install command.
    """
    require_extra("ray", program)
    found = version("ray")
    if not found.startswith(f"{TESTED}."):
        raise MoaError(f'{program} is tested with Ray {TESTED} and may fail with {found}: pip install "moa-edge[ray]"')
