"""What ``moa-serve --web`` needs before it serves: files, a token, a certificate; and what it then says."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moa_page import page_folder
from moa_runtime.manifest import Fingerprints
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import DEFAULT_DRAFTER
from moa_runtime.paths import data_dir
from moa_runtime.sockets import is_loopback
from moa_server.options import ServeError
from moa_server.settings import Settings
from moa_server.web.bundle import bundle_files, find_bundle
from moa_server.web.files import WebFile
from moa_server.web.page import ASK_AGAIN, SAFE, page_files
from moa_server.web.pairing import AUTHORITY_PATH, hosts_of, invitation, kept_token, page_urls

if TYPE_CHECKING:
    from moa_server.web.certificate import OwnCertificate

#: Of ``--tls-cert``: one that is made here.
AUTO = Path("auto")


class WebSetup:
    """Everything that ``--web`` brings, made from the command line's options.

    Attributes:
        settings: those given, with the kept token where other machines can come in and none was given.
        tls: certificate and key that were made; None without ``--tls-cert auto``.

    Raises:
        MoaError: the page is not built, or nothing can be kept in the data folder.
    """

    def __init__(self, options: argparse.Namespace, settings: Settings) -> None:
        self._options, self._own = options, None
        self._page = page_files(page_folder())
        self._token_from = self._where_the_token_is(settings)
        self.settings = settings
        if not self._token_from and not is_loopback(options.host) and not options.insecure:
            file = _folder() / "token"
            self.settings = dataclasses.replace(settings, token=kept_token(file))
            self._token_from = f"the one that is kept in {file}"
        if options.tls_cert == AUTO:
            self._own = self.renew()
        self._bundle: Path | None = None

    @property
    def tls(self) -> tuple[Path, Path] | None:
        return None if self._own is None else (self._own.file, self._own.file)

    def renew(self) -> OwnCertificate:
        """The certificate of ``--tls-cert auto``, made anew where it is about to end.

        Raises:
            MoaError: it cannot be kept.
        """
        require_extra("web", "--tls-cert auto")
        from moa_server.web.certificate import own_certificate

        return own_certificate(_folder(), hosts_of(self._options.host))

    def find_bundle(self) -> None:
        """Find the bundle, or make it, before the target takes its memory.

        Raises:
            MoaError: there is none, and none can be made.
        """
        options = self._options
        built_in = options.model is None and options.drafter in (None, DEFAULT_DRAFTER)
        self._bundle = find_bundle(options.bundle, default_target=built_in)

    def files(self, served: Fingerprints) -> Mapping[str, WebFile]:
        """All that is served by the path of its URL, behind :meth:`find_bundle`.

        Raises:
            MoaError: the bundle is damaged, or belongs to another target or drafter.
        """
        assert self._bundle is not None
        files = {**self._page, **bundle_files(self._bundle, served)}
        if self._own is not None:
            data, headers = self._own.authority, {**SAFE, "cache-control": ASK_AGAIN}
            digest = hashlib.sha256(data).hexdigest()
            files[AUTHORITY_PATH] = WebFile(data, "application/x-x509-ca-cert", digest, headers)
        return files

    def urls(self, port: int) -> list[str]:
        """Where the page is, the best address first."""
        scheme = "https" if self._options.tls_cert else "http"
        return page_urls(scheme, hosts_of(self._options.host), port)

    @property
    def fingerprint(self) -> str | None:
        """Of the authority that a phone has to trust, SHA-256; None where none was made."""
        return None if self._own is None else self._own.fingerprint

    def invitation(self, port: int) -> str:
        """What the operator is told; with a QR code where stdout is a terminal that can draw one."""
        encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
        return invitation(
            self.urls(port),
            token=self.settings.token,
            token_from=self._token_from,
            fingerprint=self.fingerprint,
            secure=bool(self._options.tls_cert),
            drawn=sys.stdout.isatty() and encoding == "utf8",
        )

    def _where_the_token_is(self, settings: Settings) -> str:
        if settings.token:
            return "that of --token or MOA_TOKEN"
        return f"one of those in {settings.token_file}" if settings.token_file else ""


def check_web_options(options: argparse.Namespace) -> None:
    """Refuse what belongs to ``--web`` without it.

    Raises:
        ServeError: the message names the option.
    """
    if options.tls_cert == AUTO and options.tls_key:
        raise ServeError("--tls-cert auto makes its own key: leave --tls-key out")
    if options.web:
        return
    if options.tls_cert == AUTO:
        raise ServeError("--tls-cert auto belongs to --web, which says what has to trust it")
    if options.bundle is not None:
        raise ServeError("--bundle belongs to --web: the verifier itself needs none")


def _folder() -> Path:
    """Where token and certificate are kept."""
    return data_dir() / "web"
