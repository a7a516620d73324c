"""Which releases of Ray are accepted, and what is said about others."""

from __future__ import annotations

import pytest

from moa_runtime import optional_deps as extras
from moa_runtime.errors import MoaError
from moa_server.settings import require_ray


def test_a_missing_ray_names_the_install(monkeypatch):
    monkeypatch.setitem(extras.MODULES, "ray", ("no_such_package",))
    with pytest.raises(MoaError, match=r'replicas needs no_such_package: pip install "moa-edge\[ray\]"'):
        require_ray("replicas")


def test_an_untested_release_is_refused(monkeypatch):
    monkeypatch.setitem(extras.MODULES, "ray", ())
    monkeypatch.setattr("moa_server.settings.version", lambda name: "2.600.1")
    with pytest.raises(MoaError, match=r"replicas is tested with Ray 2.60 and may fail with 2.600.1: pip install"):
        require_ray("replicas")
