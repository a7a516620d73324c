"""A small page and a bundle for the toy engine, as files to serve, and requests for them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import httpx

from moa_runtime.bundle import write_manifest
from moa_runtime.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Manifest, TargetEntry
from moa_server.web.setup import bundle_files, page_files
from moa_server.web.site import WebFile
from support.server.running import Verifier
from support.toy_engine import PRINTS

GRAPH, WRITER = "device_half.web.onnx", "writer.web.onnx"
SCRIPT = "assets/app-0a1b2c.js"

_PAGE = {
    "index.html": f'<!doctype html><title>chat</title><script type="module" src="{SCRIPT}"></script>' + " " * 2000,
    "sw.js": "self.addEventListener('fetch', () => {});",
    "manifest.webmanifest": '{"name": "chat"}',
    "icon.svg": "<svg xmlns='http://www.w3.org/2000/svg'/>",
    SCRIPT: "console.log('hello');" * 200,
    "assets/ort-3d4e5f.wasm": "\0asm\1\0\0\0",
    ".hidden": "no",
    "assets/.hidden/too": "no",
}


def write_page(folder: Path) -> Path:
    """A built page."""
    for name, text in _PAGE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def write_web_bundle(folder: Path, graph_bytes: int = 300_000, targets: tuple[str, ...] = ("onnx", "web")) -> Path:
    """A bundle for the toy engine. Its graphs are noise, which a server does not mind."""
    folder.mkdir(parents=True)
    noise = random.Random(1)
    (folder / TOKENIZER_FILE).write_text('{"model": {}}' + " " * 5000)
    (folder / CHAT_TEMPLATE_FILE).write_text("{{ messages }}")
    files = {"onnx": "device_half.onnx", "web": GRAPH}
    for name in ("device_half.onnx", GRAPH, WRITER):
        (folder / name).write_bytes(noise.randbytes(graph_bytes))
    entries = {name: TargetEntry(files[name], graph_bytes, (), ()) for name in targets}
    manifest = Manifest(
        fingerprints=PRINTS,
        target="toy",
        kv_heads=1,
        head_dim=1,
        top_k=1,
        vocab_size=50,
        draft_vocab_size=50,
        max_context=1000,
        stop_tokens=(0,),
        special_tokens={},
        recipe={},
        tools={},
        targets=entries,
        files={},
        web_writer=TargetEntry(WRITER, graph_bytes, (), (), details={"model": "toy", "bits": 4, "max_context": 1000}),
    )
    write_manifest(folder, manifest)
    return folder


def site(folder: Path, graph_bytes: int = 300_000) -> Mapping[str, WebFile]:
    """What a verifier of the toy engine serves."""
    bundle = write_web_bundle(folder / "bundle", graph_bytes)
    return {**page_files(write_page(folder / "page")), **bundle_files(bundle, PRINTS)}


def get(verifier: Verifier, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    """The answer to a request without a token; ``if_range`` is the header ``if-range``."""
    return verifier.http(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
