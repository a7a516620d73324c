"""The window as one folder, which ``make app`` builds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from moa_chat.desktop.profile import Profile, Settings
from moa_runtime.manifest import MANIFEST_FILE
from moa_server.offered_bundles import OfferedBundles
from moa_server.settings import Settings as VerifierSettings
from support.server.running import serving

APP = Path(__file__).parents[4] / "build" / "app" / "moa-chat" / "moa-chat"


@pytest.mark.slow
def test_the_folder_opens_its_window_and_fetches_the_bundle(engine, onnx_bundle: Path, tmp_path: Path) -> None:
    if not APP.exists():
        pytest.skip("there is no folder: make app builds it")
    places = {name: str(tmp_path / name) for name in ("HOME", "MOA_EDGE_PROFILE", "MOA_EDGE_CACHE", "MOA_EDGE_BUNDLE")}
    environment = {**os.environ, **places}
    version = subprocess.run([APP, "--version"], env=environment, capture_output=True, text=True, timeout=120)
    assert version.stdout.startswith("moa-chat "), version.stderr
    own = [APP, "-c", "import sys, moa_server.cli; print(sys.argv[1:])", "--json"]  # how the window starts a server
    assert subprocess.run(own, env=environment, capture_output=True, text=True, timeout=120).stdout == "['--json']\n"
    with serving(engine, VerifierSettings(), bundles=OfferedBundles.of([onnx_bundle], engine.fingerprints)) as verifier:
        profile = Profile(tmp_path / "MOA_EDGE_PROFILE")
        profile.save(Settings(server=verifier.url))
        with subprocess.Popen(["xvfb-run", "-a", APP], env=environment, start_new_session=True) as window:
            try:
                while not verifier.parts._connections:
                    assert window.poll() is None
                    time.sleep(0.1)
            finally:
                os.killpg(window.pid, signal.SIGTERM)
    assert list((tmp_path / "MOA_EDGE_CACHE" / "bundles" / "fetched").glob(f"*/{MANIFEST_FILE}"))
