"""Hosts that a server on loopback answers for; origins and tokens are tested with the servers."""

from __future__ import annotations

import pytest

from moa_runtime.access import host_allowed

LOCAL = [
    "localhost",
    "localhost:8765",
    "LocalHost.",
    "127.0.0.1",
    "127.0.0.1:1",
    "127.0.0.1.:80",
    "[::1]",
    "[::1]:9",
    None,
]
FOREIGN = [
    "evil.example",
    "evil.example:8765",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil.example:127.0.0.1",
    "localhost@evil.example",
    "localhost:80@evil.example",
    "[::2]",
    "::1",
    "[localhost.evil]",
    "10.0.0.1",
    "0.0.0.0",
    "localhost/",
    "local host",
    "",
    ":80",
]


@pytest.mark.parametrize("host", LOCAL)
def test_names_of_this_machine_are_answered(host):
    assert host_allowed(host, True)


@pytest.mark.parametrize("host", FOREIGN)
def test_names_of_others_are_not(host):
    assert not host_allowed(host, True)
    assert host_allowed(host, True, ["*"])
    assert host_allowed(host, False)


def test_further_names_are_answered_where_told():
    assert host_allowed("Moa.Home.:80", True, ["other", "moa.home"])
    assert not host_allowed("moa.home.example", True, ["moa.home"])
