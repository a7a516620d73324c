"""Settings for all tests, and what more than one tier needs: a browser, the tiny target and its bundles, a verifier.

Models and bundles are made once, also for several of pytest-xdist's processes: change a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

# Tiny matrices gain nothing from threads, and two test machines' cores are soon oversubscribed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from support.chromium import BROWSERS
from support.tiny import make_tiny_bundle, make_tiny_drafter, make_tiny_rival, make_tiny_target
from support.virtual_loop import run_virtually

# Tests start hundreds of programs: their modules are compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What an example takes says something of the machine alone.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

#: Gives the folder of a name; its maker is called if the folder does not exist.
Once = Callable[[str, Callable[[Path], object]], Path]

if TYPE_CHECKING:
    from moa_drafter.model import MoADrafter
    from moa_drafter.target import Target
    from moa_export.targets.web import WebEngine
    from moa_runtime.bundle import Bundle
    from moa_server.engine.engine import LocalEngine
    from support.server.running import Verifier

#: Seconds that a test may wait, on a busy machine or a virtual clock.
_TEST_S, _VIRTUAL_S = 300, 3600
#: Files that take longest. They begin first, so that no process works on one while the others have ended.
_LONGEST = (
    "e2e/web/test_engines.py",
    "e2e/upgrade/test_upgrade.py",
    "integration/runtime/test_backend_conformance.py",
    "e2e/chat/test_end_to_end.py",
    "e2e/page/test_without_network.py",
    "integration/drafter/test_hub.py",
    "integration/export/test_coreml.py",
    "e2e/web/test_chats.py",
    "integration/drafter/test_generation.py",
    "integration/bench/test_accept.py",
    "e2e/system/test_wheel.py",
    "e2e/server/test_endings.py",
    "e2e/page/test_online.py",
    "e2e/chat/test_gateway_openai.py",
    "integration/bench/test_simulate.py",
    "integration/drafter/test_pipeline.py",
    "e2e/bench/test_device.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {Path(__file__).parent / name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test, with ``toys`` on a virtual clock; arguments that are asynchronous contexts are entered."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for name, value in given.items():
                if isinstance(value, contextlib.AbstractAsyncContextManager):
                    given[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**given)

    if "toys" in pyfuncitem.fixturenames:
        run_virtually(lambda loop: asyncio.wait_for(run(), _VIRTUAL_S))
    else:
        asyncio.run(asyncio.wait_for(run(), _TEST_S))
    return True


@pytest.fixture(scope="session")
def browser() -> str:
    """The command of a Chromium."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        missing = f"no browser: none of {', '.join(BROWSERS)} is installed"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


@pytest.fixture(scope="session")
def tls(tmp_path_factory) -> tuple[Path, Path]:
    """A certificate that no authority knows, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run([*make.split(), "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="session")
def outer_address() -> str:
    """One of this machine's addresses that other machines reach: to browsers no secure context over plain http."""
    from moa_server.web.pairing import hosts_of

    found = [host for host in hosts_of("0.0.0.0") if host[0].isdigit()]
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


@pytest.fixture(scope="session")
def web_engine_here() -> WebEngine:
    """onnxruntime-web in Node, which `make test` installs."""
    from moa_export.targets.base import NotRun
    from moa_export.targets.web import find_engine

    found = find_engine(npm=bool(os.environ.get("CI")))
    if isinstance(found, NotRun):
        if os.environ.get("CI"):
            pytest.fail(found.reason)
        pytest.skip(found.reason)
    return found


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    base = tmp_path_factory.getbasetemp()
    folders = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    folders.mkdir(exist_ok=True)

    def find(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = folders / name, folders / f"{name}.done"
        with FileLock(folders / f"{name}.lock"):
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return find


@pytest.fixture(scope="session")
def tiny_target(once: Once) -> Path:
    return once("target", make_tiny_target)


@pytest.fixture(scope="session")
def tiny_drafter(once: Once, tiny_target: Path) -> Path:
    return once("drafter", lambda folder: make_tiny_drafter(tiny_target, folder))


@pytest.fixture
def tiny_shipped(once: Once, tiny_target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the shipped drafters' weights: by each name a random one for the tiny target."""

    def make(folder: Path) -> None:
        shutil.copytree(tiny_drafter, folder / "moa")
        for name in ("early-exit", "independent"):
            make_tiny_rival(name, tiny_target, folder / name)

    folder = once("shipped", make)
    monkeypatch.setattr("moa_drafter.pretrained.WEIGHTS", folder)
    return folder


@pytest.fixture(scope="session")
def target(tiny_target: Path) -> Target:
    """The tiny target, loaded."""
    from moa_drafter.target import load_target

    return load_target(str(tiny_target))


@pytest.fixture(scope="session")
def drafter(tiny_drafter: Path, target: Target) -> MoADrafter:
    """The tiny drafter, bound to the tiny target. Every test has the same one: change a deep copy."""
    from moa_drafter.checkpoint import load_bound

    return load_bound(tiny_drafter, target)


@pytest.fixture(scope="session")
def onnx_bundle(once: Once, tiny_target: Path, tiny_drafter: Path) -> Path:
    """A bundle with one graph, which any process can run. Offline its drafter writes, sure or not: it knows nothing."""

    def make(folder: Path) -> None:
        from moa_runtime.bundle import write_manifest
        from moa_runtime.manifest import read_manifest
        from moa_runtime.offline_stopping import StoppingRule

        make_tiny_bundle(folder, tiny_target, tiny_drafter, "none")
        write_manifest(folder, replace(read_manifest(folder), manners=StoppingRule(0.0, repeated=1000, longest=1000)))

    return once("onnx-bundle", make)


@pytest.fixture(scope="session")
def writing_bundle(once: Once, tiny_target: Path, tiny_drafter: Path) -> Path:
    """The same with a writer, which is the target itself in 8 bits."""
    return once("writing-bundle", lambda folder: make_tiny_bundle(folder, tiny_target, tiny_drafter, "target"))


@pytest.fixture(scope="session")
def web_bundle(once: Once, tiny_target: Path, tiny_drafter: Path) -> Path:
    """For onnxruntime-web, with a writer in 8 bits. Its graphs were not compared."""
    return once(
        "web-bundle",
        lambda folder: make_tiny_bundle(folder, tiny_target, tiny_drafter, "target", targets=("web",), questions=()),
    )


@pytest.fixture(scope="session")
def every_target(once: Once, tiny_target: Path, tiny_drafter: Path) -> Bundle:
    """A bundle with a graph for every backend. Its graphs were not compared."""
    from moa_export.targets import TARGETS
    from moa_runtime.bundle import Bundle

    def make(folder: Path) -> None:
        settings = {"targets": tuple(TARGETS), "questions": (), "context": 256}
        make_tiny_bundle(folder, tiny_target, tiny_drafter, "none", **settings)

    return Bundle.open(once("every-target", make))


@pytest.fixture(scope="session")
def transformers_engine(tiny_target: Path, tiny_drafter: Path) -> LocalEngine:
    """The tiny target in the verifier's engine, loaded once for all tests."""
    import torch

    from moa_server.engine.torch_engine import load_torch_engine

    torch.set_num_threads(1)  # threads that wait for each other on busy cores cost more than they bring
    return load_torch_engine(str(tiny_target), tiny_drafter)


@pytest.fixture(scope="session")
def engine(transformers_engine: LocalEngine) -> LocalEngine:
    """The engine of a test that names no other."""
    return transformers_engine


@pytest.fixture
def verifier(engine: LocalEngine) -> Iterator[Verifier]:
    """A verifier of the tiny target in this process; its token is "secret"."""
    from moa_server.settings import Settings
    from support.server.running import serving

    with serving(engine, Settings(token="secret")) as running:
        yield running


@pytest.fixture
def memory_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have verifiers of this process make each memory row.

    They make those that pay by measured prices. On a busy machine none do for a while: then a device writes nothing
    alone, and those that the verifier had meanwhile are made again.
    """
    from moa_server.sessions import Conversation, SessionStore

    rows_pay = SessionStore.rows_pay  # sets ``may_draft``, too

    def always(store: SessionStore, conversation: Conversation) -> bool:
        return rows_pay(store, conversation) or True

    monkeypatch.setattr(SessionStore, "rows_pay", always)


@pytest.fixture(scope="session")
def bundle(onnx_bundle: Path) -> Bundle:
    from moa_runtime.bundle import Bundle

    return Bundle.open(onnx_bundle)


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture(scope="session")
def tiny(tiny_target, tiny_drafter, drafter, onnx_bundle, transformers_engine):
    """``(target folder, drafter folder, bundle folder, backend, engine)`` for benchmarks; the backend is PyTorch."""
    from moa_drafter.architectures.registry import torch_backend_of

    return tiny_target, tiny_drafter, onnx_bundle, torch_backend_of(drafter, top_k=8), transformers_engine


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": 1, "category": "writing", "turns": ["Name three primary colours.", "And now?"]},
        {"question_id": 2, "category": "qa", "turns": ["What is the capital of France?"]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
