"""The page on a real ``moa-serve --web`` of the tiny target, and a Chromium that opens it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moa_bench.link.profiles import with_round_trip
from moa_bench.link.proxy import BackgroundLink, background_link
from moa_page import page_folder
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError
from support.page.browsing import PLAYWRIGHT, SERVE, TOKEN, Chromium, Person, Site

#: Each round of a draft takes so long, so that one can come between.
SLOW = with_round_trip(150)


@pytest.fixture(scope="session")
def page_built() -> None:
    """Skips where there is no page, or nothing to drive it with; in CI there has to be."""
    try:
        page_folder()
        missing = "" if PLAYWRIGHT.exists() else f"{PLAYWRIGHT} is not there: make test-web installs it"
    except MoaError as error:
        missing = str(error)
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def site(page_built: None, tiny_target: Path, tiny_drafter: Path, web_bundle: Path) -> Iterator[Site]:
    """On all of this machine's addresses."""
    options = ["--model", str(tiny_target), "--drafter", str(tiny_drafter), "--bundle", str(web_bundle)]
    with _serving(options) as port:
        yield Site(port, Bundle.open(web_bundle))


@pytest.fixture
def reasoning_site(page_built: None, tiny_target: Path, tmp_path: Path) -> Iterator[Site]:
    """Of a target without a drafter, for which a bundle is made. Its answers begin inside their reasoning, unless that
    is switched off."""
    model = shutil.copytree(tiny_target, tmp_path / "model")
    with (model / "chat_template.jinja").open("a") as template:
        template.write("{% if add_generation_prompt and enable_thinking | default(true) %}<think>{% endif %}")
    with _serving(["--model", str(model)], MOA_EDGE_CACHE=str(tmp_path / "cache")) as port:
        [made] = (path.parent for path in (tmp_path / "cache" / "bundles").glob("plain-*/manifest.json"))
        yield Site(port, Bundle.open(made))


@contextmanager
def _serving(options: list[str], **environment: str) -> Iterator[int]:
    """Yield the port of a verifier with the page."""
    command = [*SERVE, "--web", "--json", "--host", "0.0.0.0", "--port", "0", "--threads", "1", *options]
    environment = {**os.environ, "MOA_TOKEN": TOKEN, **environment}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield json.loads(process.stdout.readline())["port"]
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def chromium(page_built: None, browser: str) -> Iterator[Chromium]:
    running = Chromium(browser)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def person(chromium: Chromium) -> Iterator[Person]:
    """A browser that has never seen the page; it is closed after the test."""
    with chromium.person() as person:
        yield person


@pytest.fixture
def link(site: Site) -> Iterator[BackgroundLink]:
    """A slow network in front of the verifier, which tests cut. Its address is loopback: a secure context."""
    with background_link(SLOW, "127.0.0.1", site.port) as emulated:
        yield emulated
