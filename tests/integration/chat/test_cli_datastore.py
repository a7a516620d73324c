"""The datastore that ``moa-chat --datastore`` names, with a bundle."""

from __future__ import annotations

import pytest

from moa_chat.chat_config import chat_config_for
from moa_chat.options import build_parser, check_options
from moa_runtime.bundle import Bundle
from moa_runtime.datastore import write_datastore
from moa_runtime.errors import MoaError
from moa_runtime.transport import Endpoint


def test_a_datastore_is_a_file_for_the_bundles_tokenizer(onnx_bundle, tmp_path):
    bundle, path = Bundle.open(onnx_bundle), tmp_path / "mine.moadata"
    parse = build_parser().parse_args

    def config(*words):
        return chat_config_for(parse(words), bundle, Endpoint("ws://models.example:8765"))

    for words in ((), ("--datastore", "off")):
        assert config(*words).datastore is None and config(*words).open_datastore() is None
    named = config("--datastore", str(path), "--drafter", "sssd")
    assert (named.drafter, named.datastore) == ("sssd", path)
    with pytest.raises(MoaError, match="there is no datastore"):
        named.open_datastore()
    write_datastore(path, [[1, 2, 3]], bundle.manifest.fingerprints.tokenizer)
    assert named.open_datastore().count([1, 2, 3]) == 1
    write_datastore(path, [[1, 2, 3]], "another tokenizer")
    with pytest.raises(MoaError, match="tokenizer"):
        named.open_datastore()
    for more in (["--backend", "onnx"], ["--no-ngrams"]):
        with pytest.raises(MoaError, match="--drafter sssd has no graph, and copies"):
            check_options(parse(["--drafter", "sssd", *more]))
