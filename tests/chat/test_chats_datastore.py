"""The datastore of the user's own chats: what is in it, for whom, and when it is gone."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from moa_chat.chat_config import setup_for
from moa_chat.chats_datastore import datastore_choice_of, datastore_for, forget, renew
from moa_chat.history.message import Message
from moa_chat.history.store import History
from moa_chat.options import build_parser, check_options
from moa_runtime.bundle import Bundle
from moa_runtime.datastore.reader import Datastore
from moa_runtime.datastore.writer import write_datastore
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.transport import Endpoint
from moa_runtime.unconfirmed import Unconfirmed

ADDRESS = "ws://models.example:8765"
HOST = "models.example"
ANSWERS = ["There are red and blue.", "The harbour lies in the north."]


@pytest.fixture
def bundle(onnx_bundle: Path) -> Bundle:
    return Bundle.open(onnx_bundle)


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "profile"
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(folder))
    return folder


def made(bundle: Bundle, profile: Path, answers: list[str] = ANSWERS, host: str = HOST) -> None:
    renew(profile, answers, host, ChatTokenizer.from_bundle(bundle), bundle.manifest.fingerprints.tokenizer)


def holds(store: Datastore | None, bundle: Bundle, text: str) -> bool:
    return store is not None and store.count(ChatTokenizer.from_bundle(bundle).encode(text)[-12:]) > 0


def test_only_confirmed_answers_of_the_same_target_and_verifier_count(tmp_path: Path) -> None:
    ours = {"target": "t", "verifier": HOST}
    history = History.open(tmp_path / "history.sqlite")
    for title, answer in {
        "kept": Message("assistant", "Red.", **ours),
        "other target": Message("assistant", "Green.", target="u", verifier=HOST),
        "other verifier": Message("assistant", "Blue.", target="t", verifier="elsewhere"),
        "of an older version": Message("assistant", "Grey.", target="t"),
        "unfinished": Message("assistant", "Black", finished=False, **ours),
        "written offline": Message("assistant", "White.", unconfirmed=Unconfirmed(1, Sampling(), 8), **ours),
        "deleted": Message("assistant", "Pink.", **ours),
        "later": Message("assistant", "Yellow.", **ours),
    }.items():
        chat = history.create(title)
        history.save(chat, 0, Message("user", "A colour?"))
        history.save(chat, 1, answer)
        if title == "deleted":
            history.delete(chat)
    assert history.answers("t", HOST) == ["Red.", "Yellow."]
    history.close()


def test_answers_can_be_looked_up_in_the_next_program(bundle: Bundle, profile: Path) -> None:
    assert datastore_for("on", bundle, ADDRESS) is None
    made(bundle, profile)
    store = datastore_for("on", bundle, ADDRESS)
    assert store is not None and all(holds(store, bundle, answer) for answer in ANSWERS)
    if sys.platform != "win32":
        [file] = profile.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_another_verifier_is_not_shown_them(bundle: Bundle, profile: Path) -> None:
    made(bundle, profile)
    assert datastore_for("on", bundle, "ws://other.example:8765") is None
    assert datastore_for("on", bundle, "wss://models.example") is not None, "another port is the same host"


def test_what_was_deleted_is_gone_with_the_next_one(bundle: Bundle, profile: Path) -> None:
    made(bundle, profile)
    made(bundle, profile, ANSWERS[1:])
    store = datastore_for("on", bundle, ADDRESS)
    assert not holds(store, bundle, ANSWERS[0]) and holds(store, bundle, ANSWERS[1])
    made(bundle, profile, [])
    assert list(profile.iterdir()) == []


def test_it_is_not_made_again_of_the_same_answers(bundle: Bundle, profile: Path) -> None:
    made(bundle, profile)
    [file] = profile.iterdir()
    first = file.stat().st_mtime_ns, file.stat().st_ino
    made(bundle, profile)
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == first
    file.write_bytes(b"damaged")
    assert datastore_for("on", bundle, ADDRESS) is None
    made(bundle, profile)
    assert datastore_for("on", bundle, ADDRESS) is not None


def test_off_deletes_it(bundle: Bundle, profile: Path) -> None:
    made(bundle, profile)
    assert datastore_for("off", bundle, ADDRESS) is None and list(profile.iterdir()) == []
    assert datastore_for("off", bundle, ADDRESS) is None
    forget(profile / "never made")


def test_a_file_is_used_or_refused_in_a_sentence(bundle: Bundle, profile: Path, tmp_path: Path) -> None:
    made(bundle, profile)
    path = tmp_path / "mine.moadata"
    with pytest.raises(MoaError, match="there is no datastore"):
        datastore_for(path, bundle, ADDRESS)
    write_datastore(path, [[1, 2, 3]], bundle.manifest.fingerprints.tokenizer)
    store = datastore_for(path, bundle, ADDRESS)
    assert store is not None and store.count([1, 2, 3]) == 1
    assert len(list(profile.iterdir())) == 1, "that of the chats stays"


def test_what_the_command_line_says(bundle: Bundle) -> None:
    assert datastore_choice_of("on") == "on" and datastore_choice_of("off") == "off"
    assert datastore_choice_of("./on") == Path("on")
    parse = build_parser().parse_args
    for words, drafter, choice in (
        ([], None, "on"),
        (["--drafter", "moa"], "moa", "on"),
        (["--drafter", "sssd", "--datastore", "off"], "sssd", "off"),
        (["--datastore", "a.moadata"], None, Path("a.moadata")),
    ):
        setup = setup_for(parse(words), bundle, Endpoint(ADDRESS))
        assert (setup.drafter, setup.datastore) == (drafter, choice)
    for more in (["--backend", "onnx"], ["--no-ngrams"]):
        with pytest.raises(MoaError, match="--drafter sssd has no graph, and copies"):
            check_options(parse(["--drafter", "sssd", *more]))
