"""The command that installs what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moa_runtime.optional_deps import install_command


@pytest.mark.parametrize("source", ["checkout", "moa_edge-9-py3-none-any.whl"])
def test_an_extra_comes_from_where_the_installation_came_from(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (notes := tmp_path / "site" / "moa_edge-9.dist-info").mkdir(parents=True)
    (notes / "METADATA").write_text("Name: moa-edge\nVersion: 9\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert install_command("web") == 'pip install "moa-edge[web]"', "from a package index"
    for url in ((tmp_path / "has gone").as_uri(), "https://example.org/moa-edge.whl"):
        (notes / "direct_url.json").write_text(json.dumps({"url": url}))
        assert install_command("web") == 'pip install "moa-edge[web]"'
    for note, start, named in (("uv-receipt.toml", "uv ", tmp_path), ("pipx_metadata.json", "pipx ", tmp_path.name)):
        with monkeypatch.context() as patch:
            patch.setattr("sys.prefix", str(tmp_path))
            (tmp_path / note).touch()
            command = install_command("web")
            assert command.startswith(start) and str(named) in command and command.endswith(' "moa-edge[web]"')
            (tmp_path / note).unlink()
    (place := tmp_path / "a folder" / source).mkdir(parents=True)
    (notes / "direct_url.json").write_text(json.dumps({"url": place.as_uri()}))
    assert install_command("web") == f'pip install "{place}[web]"'
    assert install_command("vllm") == f'pip install "{place}[vllm]"'
    if source == "checkout":
        (place / "Makefile").touch()
        assert install_command("vllm").startswith(f'make -C "{place}" vllm ')
