"""Bearer tokens from the command line and from a file."""

from __future__ import annotations

import hashlib
import json
import logging

import pytest

from moa_server.auth import Authenticator, TokenFileError, new_token, read_tokens
from moa_server.edge.rate_limits import Budget, Kind


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
    assert bearers.authenticate("Bearer a-token").name == "alice"
    assert bearers.authenticate("bearer  b-token ").name == "bob"
    assert bearers.authenticate("Bearer a-token").budget == Budget(sessions=4, frames_per_second=2.5)
    single = bearers.authenticate("Bearer single")
    assert (single.name, single.budget) == ("", Budget())


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer a-toke", "Bearer a-token2", "Basic a-token", "a-token", "Bearer é"],
)
def test_nothing_else_does(file, header):
    assert Authenticator("single", file).authenticate(header) is None


def test_a_token_that_is_both_has_the_entry_s_name_and_budget(file):
    bearers = Authenticator("a-token", file)
    alice = bearers.authenticate("Bearer a-token")
    assert (alice.name, alice.budget.sessions) == ("alice", 4) and bearers.valid(alice)
    write(file, entry("bob", "b-token"))
    bearers.reload()
    assert not bearers.valid(alice) and bearers.authenticate("Bearer a-token").name == ""


def test_a_digest_is_no_token(file):
    digest = json.loads(file.read_text())["tokens"][0]["sha256"]
    assert Authenticator(file=file).authenticate(f"Bearer {digest}") is None


def test_without_any_token_everybody_may_come(file):
    bearers = Authenticator()
    assert bearers.open and bearers.authenticate(None).name == "" and bearers.valid(bearers.authenticate(None))


def test_a_file_without_entries_lets_nobody_in(file):
    write(file)
    bearers = Authenticator(file=file)
    assert not bearers.open and bearers.authenticate("Bearer ") is None


def test_a_digest_does_not_appear_in_a_bearers_text(file):
    bearer = Authenticator(file=file).authenticate("Bearer a-token")
    assert bearer.sha256 not in repr(bearer)


def test_reading_again_takes_new_tokens_and_withdraws_old_ones(file):
    bearers = Authenticator(file=file)
    alice, bob = bearers.authenticate("Bearer a-token"), bearers.authenticate("Bearer b-token")
    write(file, entry("alice", "another"), entry("bob", "b-token", sessions=1), entry("carol", "c-token"))
    bearers.reload()
    assert not bearers.valid(alice) and bearers.authenticate("Bearer a-token") is None
    assert bearers.valid(bob) and bearers.authenticate("Bearer b-token").budget.sessions == 1
    assert bearers.authenticate("Bearer another").name == "alice"
    assert bearers.authenticate("Bearer c-token").name == "carol"


def test_a_watch_is_told_when_its_token_is_withdrawn(file):
    bearers, told = Authenticator(file=file), []
    alice, bob = bearers.authenticate("Bearer a-token"), bearers.authenticate("Bearer b-token")
    bearers.watch(alice, lambda: told.append("alice"))
    bearers.watch(bob, lambda: told.append("bob"))
    unwatch = bearers.watch(alice, lambda: told.append("ended"))
    bearers.reload()
    unwatch()
    unwatch()
    assert not told
    write(file, entry("bob", "b-token"))
    bearers.reload()
    assert told == ["alice"]
    bearers.watch(alice, lambda: told.append("late"))
    assert told == ["alice", "late"]


def test_a_broken_file_keeps_the_tokens_and_logs_one_sentence(file, caplog):
    bearers = Authenticator(file=file)
    alice = bearers.authenticate("Bearer a-token")
    file.write_text("{")
    with caplog.at_level(logging.WARNING):
        bearers.reload()
    assert bearers.valid(alice) and bearers.authenticate("Bearer a-token") == alice
    (record,) = caplog.records
    assert "the tokens stay as they were" in record.getMessage() and str(file) in record.getMessage()
    assert record.exc_info is None


def test_what_was_used_outlives_reading_again(file):
    bearers = Authenticator(file=file, clock=lambda: 0.0)
    alice = bearers.authenticate("Bearer a-token")
    used = bearers.budgets(alice)
    assert used.open_session()
    assert used.wait_s(Kind.FRAMES, 100) == 0
    bearers.reload()
    assert bearers.budgets(alice) is used and used.wait_s(Kind.FRAMES, 1) > 0
    write(file, entry("alice", "a-token", sessions=1))
    bearers.reload()
    changed = bearers.budgets(bearers.authenticate("Bearer a-token"))
    assert changed is used and not changed.open_session() and changed.wait_s(Kind.FRAMES, 1) == 0


def test_bearers_do_not_share_a_budget(file):
    bearers = Authenticator(file=file)
    budgets = [bearers.budgets(bearers.authenticate(f"Bearer {token}")) for token in ("a-token", "b-token")]
    assert budgets[0] is not budgets[1]


GOOD = entry("alice", "a-token")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", 'must be one JSON object {"tokens": [...]}'),
        ('{"tokens": {}}', "must be one JSON object"),
        ('{"tokens": [], "token": 1}', "must be one JSON object"),
        ([1], "entry 1: expected an object"),
        ([{**GOOD, "session": 1}], "entry 1 ('alice'): unknown key 'session'; known are name, sha256, sessions"),
        ([{"sha256": GOOD["sha256"]}], "entry 1: name must be 1 to 64 letters"),
        ([{**GOOD, "name": "a b"}], "entry 1 ('a b'): name must be"),
        ([{**GOOD, "sha256": "abc"}], "sha256 must be the 64 hex digits"),
        ([GOOD, entry("alice", "x")], "entry 2 ('alice'): its name is that of an entry before"),
        ([GOOD, entry("bob", "a-token")], "entry 2 ('bob'): its sha256 is that of an entry before"),
        ([{**GOOD, "sessions": 0}], "sessions must be a whole number from 1 on, not 0"),
        ([{**GOOD, "sessions": True}], "sessions must be a whole number from 1 on, not True"),
        ([{**GOOD, "frames_per_second": 0}], "frames_per_second must be a number above 0, not 0"),
        ([{**GOOD, "frames_per_second": "9"}], "frames_per_second must be a number above 0, not '9'"),
        ([{**GOOD, "frames_per_second": 10**400}], "frames_per_second must be a number above 0, not 1000"),
        (json.dumps({"tokens": [{**GOOD, "row_bytes_per_second": float("inf")}]}), "above 0, not inf"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path, content, says):
    path = tmp_path / "tokens.json"
    path.write_text(content if isinstance(content, str) else json.dumps({"tokens": content}))
    with pytest.raises(TokenFileError) as error:
        Authenticator(file=path)
    assert str(path) in str(error.value) and says in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(TokenFileError, match=r"cannot read the token file .*nobody\.json: No such file"):
        read_tokens(tmp_path / "nobody.json")


def test_a_file_that_others_may_write_is_warned_of(file, caplog):
    with caplog.at_level(logging.WARNING):
        read_tokens(file)
        file.chmod(0o644)
        read_tokens(file)
        assert not caplog.records
        file.chmod(0o666)
        read_tokens(file)
    (record,) = caplog.records
    assert "others may write the token file" in record.getMessage()


def test_a_new_token_is_one(tmp_path):
    token, text = new_token("dora")
    assert len(token) >= 43 and token not in text and new_token("dora")[0] != token
    write(tmp_path / "tokens.json", json.loads(text))
    assert Authenticator(file=tmp_path / "tokens.json").authenticate(f"Bearer {token}").name == "dora"
    with pytest.raises(TokenFileError, match="name must be"):
        new_token("no name")
