"""Where the endpoint listens and who may use it, as the command line says."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from moa_chat.options import DEFAULT_GATEWAY
from moa_runtime.access import check_origins
from moa_runtime.errors import MoaError
from moa_runtime.sockets import is_loopback

_HIGHEST_PORT = 65535


@dataclass(frozen=True)
class Address:
    """Where to listen and who may ask.

    Attributes:
        port: 0 for any free one.
        token: bearer token that requests must carry; empty for none.
        origins: of web pages that may send requests.
    """

    host: str
    port: int
    token: str = ""
    origins: Sequence[str] = ()


def address_for(options: argparse.Namespace) -> Address:
    """Where the command line says.

    Raises:
        MoaError: no address, one that is open to other machines without a token, or an origin that is none.
    """
    check_origins(options.allow_origin)
    host, port = _host_and_port(options.serve)
    token = os.environ.get("MOA_GATEWAY_TOKEN", "") if options.gateway_token is None else options.gateway_token
    if not is_loopback(host) and not token:
        raise MoaError(
            f"--serve {host} is open to other machines: set a token with --gateway-token or MOA_GATEWAY_TOKEN"
        )
    return Address(host, port, token, options.allow_origin)


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > _HIGHEST_PORT:
        raise MoaError(f"--serve {text!r} is no address: expected HOST:PORT, such as {DEFAULT_GATEWAY}")
    return host, int(port)
