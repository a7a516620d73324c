"""Options of ``moa-serve`` in a configuration file of Ray Serve, and the check of Ray's release."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NoReturn

from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_server.options import ServeError, parser

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


#: Options of the process around the app, which Ray provides.
_OF_THE_PROCESS = (
    *("host", "port", "tls-cert", "tls-key", "allow-host", "max-connections"),
    *("web", "bundle", "new-token", "doctor", "timeline", "json", "until-stdin-ends"),
)


def options_of(args: Mapping[str, Any]) -> argparse.Namespace:
    """Parse the ``args`` of an application: options of ``moa-serve`` without their dashes.

    ``{"model": "my-llama", "threads": 1, "no-drafts": True, "allow-origin": ["https://app.example"]}``

    Raises:
        ServeError: an option is unknown or invalid for replicas, or a value is invalid.
    """
    words = []
    for name, value in args.items():
        if name in _OF_THE_PROCESS:
            raise ServeError(f"a replica has no option {name}: it is Ray's, see docs/serving.md")
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                words.append(f"--{name}")
            elif each is not False and each is not None:
                words.append(f"--{name}={each}")
    reading = parser()
    reading.error = _refuse  # type: ignore[method-assign]
    # All clients come through Ray's proxy, so the address is not loopback.
    return reading.parse_args([*words, "--host", "0.0.0.0"])


def _refuse(message: str) -> NoReturn:
    raise ServeError(f"the args of the application are options of moa-serve: {message}")
