"""The datastore that ``moa-chat --datastore`` names, with a bundle."""

from __future__ import annotations

import pytest

from moa_chat.chat_config import chat_config_for, open_datastore
from moa_chat.options import build_parser, check_options
from moa_runtime.bundle import Bundle
from moa_runtime.datastore import DatastoreError, write_datastore
from support.refusals import refused


def test_a_datastore_is_a_file_for_the_bundles_tokenizer(onnx_bundle, tmp_path):
    bundle, path = Bundle.open(onnx_bundle), tmp_path / "mine.moadata"
    parse = build_parser().parse_args
    for words in ((), ("--datastore", "off")):
        assert chat_config_for(parse(words), bundle, None).datastore is None and open_datastore(None, bundle) is None
    named = chat_config_for(parse(["--datastore", str(path), "--drafter", "sssd"]), bundle, None)
    assert (named.drafter, named.datastore) == ("sssd", path)
    with pytest.raises(DatastoreError, match=r"mine\.moadata"):
        open_datastore(path, bundle)
    write_datastore(path, [[1, 2, 3]], bundle.manifest.fingerprints.tokenizer)
    assert open_datastore(path, bundle).count([1, 2, 3]) == 1
    write_datastore(path, [[1, 2, 3]], "another tokenizer")
    with pytest.raises(DatastoreError, match="tokenizer"):
        open_datastore(path, bundle)
    for more in (["--backend", "onnx"], ["--no-ngrams"]):
        with refused("excluded"):
            check_options(parse(["--drafter", "sssd", *more]))
