"""Options of a replica: those of moa-serve, from a configuration file of Ray Serve."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moa_server.settings import ServeError, options_of, settings_of


def test_they_are_those_of_moa_serve():
    args = {
        "model": "my-llama",
        "drafter": "run/drafter",
        "threads": 1,
        "max-sessions": 100,
        "keep-seconds": 60.5,
        "no-drafts": True,
        "insecure": False,
        "max-context": None,
        "token-file": "/etc/moa/tokens.json",
        "allow-origin": ["https://a.example", "https://b.example"],
    }
    options = options_of(args)
    assert (options.model, options.drafter, options.threads) == ("my-llama", "run/drafter", 1)
    assert options.no_drafts and not options.insecure and options.max_context is None
    settings = settings_of(options)
    assert settings.max_sessions == 100 and settings.keep_seconds == 60.5
    assert settings.token_file == Path("/etc/moa/tokens.json")
    assert settings.origins == ("https://a.example", "https://b.example")


def test_a_replica_answers_for_every_host():
    assert not settings_of(options_of({})).loopback


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"modle": "x"}, "the args of the application are options of moa-serve: unrecognized arguments: --modle=x"),
        ({"threads": "two"}, "options of moa-serve: argument --threads: invalid int value: 'two'"),
        ({"dtype": "int4"}, "argument --dtype: invalid choice: 'int4'"),
        ({"port": 1}, "a replica has no option port: it is Ray's, see docs/serving.md"),
        ({"tls-cert": "c.pem"}, "a replica has no option tls-cert"),
        ({"web": True}, "a replica has no option web"),
    ],
)
def test_what_a_replica_cannot_have_is_one_sentence(args: dict[str, Any], sentence: str):
    with pytest.raises(ServeError, match=re.escape(sentence)):
        options_of(args)
