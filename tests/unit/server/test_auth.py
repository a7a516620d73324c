"""Bearer tokens from the command line and from a file."""

from __future__ import annotations

import hashlib
import json
import logging

import pytest

from moa_server import auth
from moa_server.auth import Authenticator, TokenFileError, new_token, read_tokens
from moa_server.edge.rate_limits import Budget, Kind
from support.refusals import refused


def entry(name: str, token: str, **budget) -> dict:
    return {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), **budget}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokens.json"
    write(path, entry("alice", "a-token", sessions=4, frames_per_second=2.5), entry("bob", "b-token"))
    return path


def write(path, *entries) -> None:
    path.write_text(json.dumps({"tokens": list(entries)}))
    path.chmod(0o600)


def test_a_token_names_its_bearer(file):
    bearers = Authenticator("single", file)
    alice, single = bearers.authenticate("Bearer a-token"), bearers.authenticate("Bearer single")
    assert (alice.name, alice.budget) == ("alice", Budget(sessions=4, frames_per_second=2.5))
    assert bearers.authenticate("bearer  b-token ").name == "bob"
    assert (single.name, single.budget) == ("", Budget())
    assert alice.sha256 not in repr(alice)
    for header in (None, "", "Bearer", "Bearer ", "Bearer a-toke", "Basic a-token", "a-token", "Bearer é"):
        assert bearers.authenticate(header) is None
    assert bearers.authenticate(f"Bearer {alice.sha256}") is None, "a digest is no token"


def test_no_token_is_required_without_any_and_a_file_without_entries_refuses_everyone(file):
    bearers = Authenticator()
    assert bearers.open and bearers.authenticate(None).name == "" and bearers.valid(bearers.authenticate(None))
    write(file)
    bearers = Authenticator(file=file)
    assert not bearers.open and bearers.authenticate("Bearer ") is None


def test_a_reload_takes_new_tokens_and_withdraws_old_ones(file):
    both = Authenticator("a-token", file)
    bearers = Authenticator(file=file)
    alice, bob = bearers.authenticate("Bearer a-token"), bearers.authenticate("Bearer b-token")
    told: list[str] = []
    bearers.watch(alice, lambda: told.append("withdrawn"))
    bearers.watch(alice, lambda: told.append("ended"))()  # the watch ends
    write(file, entry("alice", "another"), entry("bob", "b-token", sessions=1), entry("carol", "c-token"))
    bearers.reload()
    assert not bearers.valid(alice) and bearers.authenticate("Bearer a-token") is None and told == ["withdrawn"]
    assert bearers.valid(bob) and bearers.authenticate("Bearer b-token").budget.sessions == 1
    assert bearers.authenticate("Bearer another").name == "alice"
    assert bearers.authenticate("Bearer c-token").name == "carol"
    named = both.authenticate("Bearer a-token")  # a token that is both has the entry's name and budget
    assert (named.name, named.budget.sessions) == ("alice", 4)
    both.reload()
    assert not both.valid(named) and both.authenticate("Bearer a-token").name == ""


def test_a_broken_file_keeps_the_tokens_and_logs_one_line(file, caplog):
    bearers = Authenticator(file=file)
    alice = bearers.authenticate("Bearer a-token")
    file.write_text("{")
    with caplog.at_level(logging.WARNING):
        bearers.reload()
    assert bearers.valid(alice) and bearers.authenticate("Bearer a-token") == alice
    (record,) = caplog.records
    assert str(file) in record.getMessage() and record.exc_info is None


def test_usage_outlives_a_reload_and_is_not_shared(file):
    bearers = Authenticator(file=file, clock=lambda: 0.0)
    alice = bearers.authenticate("Bearer a-token")
    used = bearers.budgets(alice)
    assert bearers.budgets(bearers.authenticate("Bearer b-token")) is not used
    assert used.open_session(1) and used.wait_s(Kind.FRAMES, 100) == 0
    bearers.reload()
    assert bearers.budgets(alice) is used and used.wait_s(Kind.FRAMES, 1) > 0
    write(file, entry("alice", "a-token", sessions=1))
    bearers.reload()
    changed = bearers.budgets(bearers.authenticate("Bearer a-token"))
    assert changed is used and not changed.open_session(1) and changed.wait_s(Kind.FRAMES, 1) == 0


@pytest.mark.parametrize("others", [True, False])
def test_no_token_takes_all_places_from_others(tmp_path, others):
    file = tmp_path / "tokens.json"
    write(file, entry("alice", "a-token"), *([entry("bob", "b-token", sessions=5)] if others else []))
    bearers = Authenticator(file=file)
    alice = bearers.authenticate("Bearer a-token")
    most = {places: bearers.most_sessions(alice, places) for places in (64, 2, 1)}
    assert most == ({64: 48, 2: 1, 1: 1} if others else dict.fromkeys((64, 2, 1)))
    if others:
        assert bearers.most_sessions(bearers.authenticate("Bearer b-token"), 64) == 5


GOOD = entry("alice", "a-token")


@pytest.mark.parametrize(
    ("content", "code", "values"),
    [
        ("{", "not_json", ()),
        ("[" * 100_000, "not_json", ()),
        ("[]", "bad_shape", ()),
        ('{"tokens": {}}', "bad_shape", ()),
        ('{"tokens": [], "token": 1}', "bad_shape", ()),
        ([1], "bad_shape", ("entry 1",)),
        ([{**GOOD, "session": 1}], "unknown_key", ("entry 1 ('alice')", "'session'", "sha256, sessions")),
        ([{"sha256": GOOD["sha256"]}], "bad_name", ("entry 1",)),
        ([{**GOOD, "name": "a b"}], "bad_name", ("entry 1 ('a b')",)),
        ([{**GOOD, "sha256": "abc"}], "bad_digest", ()),
        ([GOOD, entry("alice", "x")], "duplicate", ("entry 2 ('alice')", "name")),
        ([GOOD, entry("bob", "a-token")], "duplicate", ("entry 2 ('bob')", "sha256")),
        ([{**GOOD, "sessions": 0}], "out_of_range", ("sessions", "0")),
        ([{**GOOD, "sessions": True}], "out_of_range", ("sessions", "True")),
        ([{**GOOD, "frames_per_second": 0}], "out_of_range", ("frames_per_second", "0")),
        ([{**GOOD, "frames_per_second": "9"}], "out_of_range", ("frames_per_second", "'9'")),
        ([{**GOOD, "frames_per_second": 10**400}], "out_of_range", ("frames_per_second", "1000")),
        (json.dumps({"tokens": [{**GOOD, "row_bytes_per_second": float("inf")}]}), "out_of_range", ("inf",)),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path, content, code, values):
    path = tmp_path / "tokens.json"
    path.write_text(content if isinstance(content, str) else json.dumps({"tokens": content}))
    with refused(code, TokenFileError) as error:
        Authenticator(file=path)
    assert all(each in str(error.value) for each in (str(path), *values)) and "\n" not in str(error.value)


def test_a_missing_file_is_refused_and_one_that_others_may_write_is_warned_of(file, tmp_path, caplog):
    with refused("unreadable", TokenFileError) as error:
        read_tokens(tmp_path / "missing.json")
    assert "missing.json" in str(error.value)
    with caplog.at_level(logging.WARNING):
        for mode, warnings in ((0o600, 0), (0o644, 0), (0o666, 1)):
            file.chmod(mode)
            read_tokens(file)
            assert len(caplog.records) == warnings


def test_no_program_reads_a_new_token_as_an_option(monkeypatch):
    made = iter(["-D8", "-", "e-"])
    monkeypatch.setattr(auth.secrets, "token_urlsafe", lambda count: next(made))
    assert new_token("dora")[0] == "e-"


def test_a_new_token_is_one(tmp_path):
    token, text = new_token("dora")
    assert len(token) >= 43 and token not in text and new_token("dora")[0] != token
    write(tmp_path / "tokens.json", json.loads(text))
    assert Authenticator(file=tmp_path / "tokens.json").authenticate(f"Bearer {token}").name == "dora"
    with refused("bad_name", TokenFileError):
        new_token("no name")
