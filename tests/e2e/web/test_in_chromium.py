"""Bundle and models in a real browser: stored once, drafted with in a worker, as in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moa_export.targets.web import WebEngine
from moa_runtime.backends.load import load_backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.factory import drafter_for, writer_for
from moa_runtime.session.tree import DraftTree
from support.chromium import BrowserPage

TEXT = [1, 40, 50, 60, 40, 50, 70, 80]
ROWS, LEVELS = 7, 5


#: A GPU in software, without ``shader-f16``.
SOFTWARE_GPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan,WebGPU")


@pytest.fixture
def opened(browser: str, compiled: Path, web_bundle: Path, web_engine_here: WebEngine) -> Callable[..., BrowserPage]:
    folders = {
        "/": Path(__file__).with_name("page"),
        "/dist/": compiled / "dist",
        "/node_modules/": compiled / "node_modules",
        "/ort/": web_engine_here.module.parent,
        "/bundle/": web_bundle,
    }
    return lambda *options: BrowserPage(browser, "/index.html#page.mjs", folders, options)


@pytest.fixture
def page(opened: Callable[..., BrowserPage]) -> Iterator[BrowserPage]:
    with opened() as page:
        yield page


@pytest.fixture(scope="module")
def expected(web_bundle: Path) -> DraftTree:
    """What Python drafts with the same graph."""
    bundle = Bundle.open(web_bundle)
    drafter = drafter_for(bundle.manifest, load_backend(bundle, "web", threads=1))
    heads, size = bundle.manifest.kv_heads, bundle.manifest.head_dim
    rows = np.sin(np.arange(ROWS * heads * size)).astype(np.float32).reshape(ROWS, heads, size)
    drafter.add_rows(0, rows, rows)
    return drafter.propose(TEXT, Budget.chain(LEVELS))


def asked(page: BrowserPage) -> list[str]:
    """Files of the bundle that were asked for since the last question."""
    found = [path.removeprefix("/bundle/") for path in page.asked if path.startswith("/bundle/")]
    page.asked.clear()
    return sorted(found)


def test_a_bundle_is_stored_once_and_a_worker_drafts_as_python_does(page, web_bundle, expected):
    bundle = Bundle.open(web_bundle)
    assert bundle.manifest.web_writer is not None
    writer = writer_for(bundle.manifest, OnnxBackend(web_bundle / bundle.manifest.web_writer.file))
    written = writer.propose(TEXT, Budget.chain(LEVELS))
    todo = {"do": "drafts", "store": "best", "worker": True, "rows": ROWS, "prefix": TEXT, "levels": LEVELS}
    for again in range(2):
        said = page.ask(todo)
        assert said["opfs"], said
        assert "draft" in said, said
        assert said["draft"]["tokens"] == list(expected.tokens)
        assert said["draft"]["scores"] == pytest.approx(expected.scores, abs=0.001)
        assert said["written"]["tokens"] == list(written.tokens)
        downloaded = [
            "chat_template.jinja",
            "device_half.web.onnx",
            "licenses/target/LICENSE",
            "manifest.json",
            "tokenizer.json",
            "writer.web.onnx",
        ]
        assert asked(page) == ([] if again else downloaded)
        page.tell({"reload": True})
    # In the cache, and in this thread, it is the same.
    said = page.ask(todo | {"store": "cache", "worker": False})
    assert said["kind"] == "CacheStore" and said["draft"]["tokens"] == list(expected.tokens)
    assert len(asked(page)) == 6
    assert page.ask(todo | {"store": "cache", "worker": False})["draft"]["tokens"] == list(expected.tokens)
    assert asked(page) == []


def test_a_worker_that_has_no_engine_is_a_sentence(page: BrowserPage) -> None:
    said = page.ask(
        {"do": "drafts", "store": "best", "worker": True, "ort": "/ort/none.mjs", "prefix": TEXT, "levels": 1}
    )
    assert said["failed"].startswith("EngineError: onnxruntime-web cannot be loaded from /ort/none.mjs: ")


def test_on_a_gpu_without_float16_it_drafts_the_same(opened: Callable[..., BrowserPage], expected: DraftTree) -> None:
    with opened(*SOFTWARE_GPU) as page:
        if not page.ask({"do": "adapter"})["adapter"]:
            pytest.skip("this Chromium has no GPU in software")
        gpu = {"ort": "/ort/ort.webgpu.bundle.min.mjs", "providers": ["webgpu"]}
        todo = {"do": "drafts", "store": "best", "worker": True, "rows": ROWS, "prefix": TEXT, "levels": LEVELS}
        said = page.ask(todo | gpu)
        assert "draft" in said, said
        assert said["draft"]["tokens"] == list(expected.tokens)
        assert said["draft"]["scores"] == pytest.approx(expected.scores, abs=0.001)
