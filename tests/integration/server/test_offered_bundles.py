"""Bundles that a verifier hands out: fetched whole, over a link that is cut, and checked before they are opened."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moa_chat.server_bundle import bundle_for_server
from moa_runtime import bundle_download
from moa_runtime.bundle import Bundle, write_manifest
from moa_runtime.bundle_download import BUNDLES_PATH, DownloadError, best_offer, fetch_bundle, kept_bundle, offers
from moa_runtime.manifest import TargetEntry, TensorSpec, read_manifest
from moa_runtime.options import DRAFTERS, DrafterName
from moa_runtime.transport import Endpoint
from moa_server import offered_bundles
from moa_server.offered_bundles import OfferedBundles, bundles_to_offer
from moa_server.settings import Settings
from support.refusals import refused
from support.server.running import Verifier, serving
from support.server.web_site import write_web_bundle
from support.system.cutting import cutting
from support.toy_engine import PRINTS, ToyEngine

TOKEN = "secret"
BYTES = 400_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of the toy target, in a place where nothing looks for it; the cache folder is empty."""
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(tmp_path / "made"))
    return write_web_bundle(tmp_path / "bundle", BYTES)


@pytest.fixture
def verifier(folder: Path) -> Iterator[Verifier]:
    bundles = OfferedBundles.of([folder], PRINTS)
    with serving(ToyEngine(), Settings(token=TOKEN), bundles=bundles) as running:
        yield running


def endpoint(port: int, token: str = TOKEN) -> Endpoint:
    return Endpoint(f"ws://127.0.0.1:{port}", token)


def test_a_device_fetches_what_it_needs_once(verifier: Verifier, folder: Path) -> None:
    (offer,) = offers(endpoint(verifier.port))
    assert offer.graphs == ("onnx", "web") and offer.bytes > 3 * BYTES
    steps: list[tuple[int, int]] = []
    bundle = Bundle.fetch(endpoint(verifier.port), progress=lambda *step: steps.append(step))
    manifest = bundle.manifest
    assert manifest.fingerprints == PRINTS and set(manifest.targets) == {"onnx"} and manifest.web_writer is None
    assert sorted(manifest.files) == ["chat_template.jinja", "device_half.onnx", "tokenizer.json"]
    assert bundle.graph_path("onnx").read_bytes() == (folder / "device_half.onnx").read_bytes()
    total = sum(entry.bytes for entry in manifest.files.values())
    assert steps[-1] == (total, total) and [*sorted(steps)] == steps
    before = verifier.parts.website._bytes
    again = fetch_bundle(endpoint(verifier.port), offer, writer=False)
    assert again == bundle.folder == kept_bundle(endpoint(verifier.port))
    assert verifier.parts.website._bytes == before


def test_programs_that_need_more_or_less_of_a_bundle_share_it(verifier: Verifier, folder: Path) -> None:
    (folder / "writer.onnx").write_bytes(b"w" * BYTES)
    tensors = (TensorSpec("self_keys.0", "float32", (1, 2, "C", 8)),), (TensorSpec("top_tokens", "int64", ("Q", 4)),)
    writer = TargetEntry("writer.onnx", BYTES, *tensors, details={"model": "toy", "bits": 4, "max_context": 1000})
    write_manifest(folder, dataclasses.replace(read_manifest(folder), writer=writer))
    verifier.parts.website._files = (found := OfferedBundles.of([folder], PRINTS)).files

    def fetched(graphs: tuple[str, ...], *, writer: bool) -> tuple[Path, list[tuple[int, int]]]:
        steps: list[tuple[int, int]] = []
        return fetch_bundle(
            endpoint(verifier.port),
            best_offer(found.offers),
            graphs=graphs,
            writer=writer,
            progress=lambda *step: steps.append(step),
        ), steps

    small, _ = fetched(("onnx",), writer=False)
    (total,) = {total for _, total in fetched(("onnx",), writer=True)[1]}
    assert total > 2 * BYTES
    _, steps = fetched(("web",), writer=False)
    assert steps[0][0] > total and steps[-1][0] == steps[-1][1]  # the rest alone is fetched
    whole = Bundle.open(small)
    assert set(whole.manifest.targets) == {"onnx", "web"} and whole.manifest.writer == writer
    before = verifier.parts.website._bytes
    for graphs in (("onnx",), ("web",), ("coreml", "onnx")):
        assert fetched(graphs, writer=True) == fetched(graphs, writer=False) == (small, [])
    assert verifier.parts.website._bytes == before


def test_a_download_goes_on_after_cuts_and_in_a_later_program(verifier: Verifier) -> None:
    with cutting(verifier.port, BYTES // 2) as link:
        bundle = Bundle.fetch(endpoint(link.port))
        assert bundle.manifest.targets and link.cuts and verifier.parts.website._bytes < 2 * BYTES

    class CancelledError(Exception):
        pass

    def cancel(received: int, total: int) -> None:
        if received > BYTES // 2:
            raise CancelledError

    steps: list[int] = []
    with pytest.raises(CancelledError):
        Bundle.fetch(endpoint(verifier.port), graphs=("onnx", "web"), progress=cancel)
    Bundle.fetch(endpoint(verifier.port), graphs=("onnx", "web"), progress=lambda received, _: steps.append(received))
    assert steps[0] > BYTES // 2


def test_no_token_no_bundle(verifier: Verifier, folder: Path) -> None:
    said = set()
    for token in ("", "wrong"):
        with refused("unauthorized", DownloadError) as error:
            offers(endpoint(verifier.port, token))
        said.add(str(error.value))
    assert len(said) == 2  # none is not a wrong one
    for token in ("schlüssel €", f"{TOKEN}\n"):
        with refused("not_ascii"):
            offers(endpoint(verifier.port, token))
    (offer,) = offers(endpoint(verifier.port))
    assert verifier.http("GET", f"{BUNDLES_PATH}/{offer.id}/tokenizer.json", headers={}).status_code == 401
    assert verifier.http("GET", f"{BUNDLES_PATH}/{offer.id}/../../secret").status_code == 404


@pytest.mark.parametrize("file", ["device_half.onnx", "chat_template.jinja"])
def test_what_is_not_what_the_manifest_says_is_not_opened(verifier: Verifier, file: str) -> None:
    site = verifier.parts.website._files
    (path,) = [path for path in site if path.startswith(BUNDLES_PATH) and path.endswith(file)]
    whole = site[path].content.read_bytes()
    site[path] = dataclasses.replace(site[path], content=whole[:-1] + bytes([whole[-1] ^ 1]))
    with refused("damaged", DownloadError, file):
        Bundle.fetch(endpoint(verifier.port))
    assert kept_bundle(endpoint(verifier.port)) is None
    served = site.pop(path)
    with refused("changed", DownloadError):
        Bundle.fetch(endpoint(verifier.port))
    site[path] = dataclasses.replace(served, content=whole)
    assert Bundle.fetch(endpoint(verifier.port)).manifest.fingerprints == PRINTS


def test_bundles_of_other_targets_are_not_offered(folder: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(PRINTS, target="0" * 32)
    assert not OfferedBundles.of([folder, tmp_path / "none"], other).offers
    with refused("other_target"):
        OfferedBundles.of([], other, folder)
    with refused("no_bundle"):
        OfferedBundles.of([], PRINTS, tmp_path / "none")
    without_rows = dataclasses.replace(PRINTS, drafter="")
    write_manifest(folder, dataclasses.replace(read_manifest(folder), fingerprints=without_rows))
    assert OfferedBundles.of([folder], PRINTS).offers


def test_the_bundle_of_a_verifier_that_is_away_is_the_last_one(folder: Path, tmp_path: Path, unused_port: int) -> None:
    def bundle(**options: object) -> Bundle:
        return bundle_for_server(endpoint(unused_port), None, None, writer=True, **options)

    with refused("unreachable", DownloadError):
        bundle()
    with serving(ToyEngine(), Settings(token=TOKEN), bundles=OfferedBundles.of([folder], PRINTS)) as running:
        address = endpoint(running.port)
        fetched = bundle_for_server(address, None, None, writer=True)
    assert bundle_for_server(address, None, None, writer=True) == fetched
    made = write_web_bundle(tmp_path / "made", 1000)
    assert bundle().folder == made  # what moa-export made is of use with any address
    with serving(ToyEngine(), Settings(token=TOKEN), bundles=OfferedBundles.of([folder], PRINTS)) as running:
        assert bundle_for_server(endpoint(running.port), None, None, writer=True).folder == made
    with serving(ToyEngine(), Settings(token=TOKEN)) as running:
        assert bundle_for_server(endpoint(running.port), None, None, writer=True).folder == made


@pytest.mark.parametrize("name", [name for name, kind in DRAFTERS.items() if not kind.has_graph])
def test_a_drafter_without_a_graph_takes_any_bundle(name: DrafterName, verifier: Verifier) -> None:
    assert bundle_for_server(endpoint(verifier.port), None, name, writer=True).manifest.architecture == "moa"


def test_a_drafter_that_the_verifier_has_not_is_refused_with_those_it_has(verifier: Verifier) -> None:
    with refused("no_drafter", DownloadError, "sssd, or moa"):
        bundle_for_server(endpoint(verifier.port), None, "independent", writer=True)


def test_a_bundle_that_no_address_uses_any_more_is_removed(verifier: Verifier, folder: Path, tmp_path: Path) -> None:
    first = Bundle.fetch(endpoint(verifier.port))
    write_manifest(folder, dataclasses.replace(read_manifest(folder), target="newer"))
    found = OfferedBundles.of([folder], PRINTS)
    verifier.parts.website._files = found.files
    second = Bundle.open(fetch_bundle(endpoint(verifier.port), best_offer(found.offers)))
    assert second.manifest.target == "newer" and not first.folder.exists() and second.folder.exists()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (2 << 20), "malformed"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"bundles": [{"id": "../../x"}]}', "malformed"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "malformed"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "redirect"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "forbidden"),  # by a proxy, of a path that is not the verifier's
        (b"HTTP/1.1 421 Misdirected Request\r\n\r\n", "host_refused"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "http_status"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"bundles": []}', "no_bundle"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "unreachable"),
        (b"\x15\x03\x03\x00\x02\x02\x16", "needs_tls"),
        (b"SSH-2.0-x\r\n", "unreachable"),
        (b"", "unreachable"),
    ],
)
def test_anything_may_answer_instead_of_a_verifier(answer: bytes, code: str) -> None:
    with answering(answer) as port, refused(code, DownloadError):
        offers(endpoint(port))


@pytest.mark.parametrize(
    ("scheme", "answer", "code"),
    [("wss", b"HTTP/1.1 400 Bad Request\r\n\r\n", "no_tls"), ("ws", b"HTTP/1.1 404 Not Found\r\n\r\n", "http_status")],
)
def test_a_wrong_address_is_named_and_no_missing_bundle(folder: Path, scheme: str, answer: bytes, code: str) -> None:
    with answering(answer) as port, refused(code, DownloadError):
        bundle_for_server(Endpoint(f"{scheme}://127.0.0.1:{port}"), None, None, writer=True)


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A port where the first connection gets these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def reply() -> None:
            client, _ = listening.accept()
            with client, contextlib.suppress(OSError):
                client.recv(65536)
                client.sendall(answer)

        threading.Thread(target=reply, daemon=True).start()
        yield listening.getsockname()[1]


# -- hostile verifiers -----------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def hostile(answer: Callable[[socket.socket, str], None]) -> Iterator[Endpoint]:
    """A port where ``answer`` gets each connection, and the path that it asks for."""
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client = stack.enter_context(listening.accept()[0])
                    threading.Thread(target=serve, args=(client,), daemon=True).start()

        def serve(client: socket.socket) -> None:
            with client, contextlib.suppress(OSError):
                answer(client, client.recv(65536).split()[1].decode())

        threading.Thread(target=accept, daemon=True).start()
        yield endpoint(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)


def again(data: bytes, first: bytes = b"", pause_s: float = 0.0) -> Callable[[socket.socket, str], None]:
    def answer(client: socket.socket, path: str) -> None:
        client.sendall(first)
        while True:
            client.sendall(data)
            time.sleep(pause_s)

    return answer


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        again(b" ", OK + b"\r\n", 0.02),
        again(b" ", OK + b"Content-Length: 1000\r\n\r\n", 0.02),
        again(b"1\r\n \r\n", CHUNKED, 0.02),
        again(b"x", OK, 0.02),
        again(b"x: y\r\n" * 50, OK),
        again(b"x: y\r\n" * 50, CHUNKED + b"0\r\n"),
        again(b"x" * 50, CHUNKED),
        again(b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
        again(b"x" * 5000, OK + b"\r\n"),
        lambda client, path: client.sendall(b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n"),
        lambda client, path: client.sendall(OK + b"\r\n" + b"[" * 100_000),
    ],
)
def test_an_answer_without_end_is_no_list(answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_download, "_WHOLE_S", 0.5)
    with hostile(answer) as address, pytest.raises(DownloadError) as caught:
        offers(address)
    assert caught.value.code in ("malformed", "redirect", "unreachable")


def test_a_file_that_always_begins_anew_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_download, "_BACKOFF_S", 0.0)
    text = (folder / "manifest.json").read_bytes()
    offer = {"id": hashlib.sha256(text).hexdigest(), "fingerprints": dataclasses.asdict(PRINTS)}
    offer |= {"target": "a", "architecture": "moa", "graphs": ["onnx"], "bytes": 1}

    def answer(client: socket.socket, path: str) -> None:
        if path == BUNDLES_PATH:
            client.sendall(OK + b"\r\n" + json.dumps({"bundles": [offer]}).encode())
        elif path.endswith("manifest.json"):
            client.sendall(OK + b"\r\n" + text)
        else:
            client.sendall(OK + b"Content-Length: 9999\r\n\r\n" + b"half")

    with hostile(answer) as address, refused("unreachable", DownloadError):
        Bundle.fetch(address)


def test_that_of_the_built_in_target_is_made_at_the_first_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, made = read_manifest(folder).fingerprints, []

    def make(place: Path, target: str, *_: object) -> None:
        made.append((place.name, target))
        shutil.copytree(folder, place)

    monkeypatch.setattr(offered_bundles, "make_bundle", make)
    for _ in range(2):
        assert [one.fingerprints for one in bundles_to_offer(served, None, None, None).offers] == [served]
    assert made == [("made", "onnx")]


def test_a_bundle_for_browsers_alone_leaves_computers_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a first ``moa-serve --web`` there is no other."""
    page = write_web_bundle(tmp_path / "page", BYTES, ("web",))
    monkeypatch.setattr(offered_bundles, "make_bundle", lambda place, *_: shutil.copytree(folder, place))
    for _ in range(2):
        found = bundles_to_offer(PRINTS, None, None, page)
        assert [one.graphs for one in found.offers] == [("web",), ("onnx", "web")]
        with serving(ToyEngine(), Settings(token=TOKEN), bundles=found) as running:
            assert "onnx" in Bundle.fetch(endpoint(running.port)).manifest.targets
