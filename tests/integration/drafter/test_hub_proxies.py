"""Proxies on the way to the Hub."""

from __future__ import annotations

import os
import socket

import pytest

from moa_decoder.errors import TargetError
from moa_drafter import target_source
from moa_drafter.target_source import resolve_target
from support.refusals import refused


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))


def test_a_hub_that_only_a_proxy_leads_to_answers(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"127.0.0.1:{proxy.getsockname()[1]}"
        for name, value in {"https_proxy": address, "ALL_PROXY": f"socks5h://{address}"}.items():
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                assert target_source.hub_answers()
                patch.setenv("no_proxy", "127.0.0.1")
                assert not target_source.hub_answers()


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "http://127.0.0.1:none", "http://[::1"])
def test_an_unusable_proxy_is_refused(proxy, answers, monkeypatch):
    """Also by the packages that use it, which raise errors of their own."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", proxy)
    if answers:
        monkeypatch.setattr(target_source, "hub_answers", lambda: True)
    with refused("hub_failed", TargetError) as caught:
        resolve_target("owner/model")
    assert "\n" not in str(caught.value)
