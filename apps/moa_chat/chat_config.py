"""The configuration of a chat, made from the options of the command line."""

from __future__ import annotations

import argparse
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path

from moa_chat.history.chat_settings import sampling_for
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.datastore import Datastore
from moa_runtime.drafting.draft_controllers import controller_for
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.options import (
    DRAFTERS,
    DrafterName,
    Drafting,
    DraftLength,
    LoopSettings,
    Offline,
    OtherDrafterError,
    drafter_option,
)
from moa_runtime.paths import bundle_of_drafter, data_dir, expanded
from moa_runtime.session.events import Policy, Sampling
from moa_runtime.transport import Endpoint


@dataclass(frozen=True)
class ChatConfig:
    """Everything that :meth:`connect` needs to open a chat.

    Attributes:
        drafter: None for the bundle's own.
        datastore: a file of earlier texts, from which drafts are copied too.
        store: the file in which the conversation is kept; None to keep it nowhere.
        must_store: whether the user named that file, so that a chat without it is an error.
        seed: of the sampling; None draws one for each answer.
    """

    bundle: Bundle
    endpoint: Endpoint
    system: str | None = None
    drafter: DrafterName | None = None
    backend: str | None = None
    threads: int = 2
    draft_length: DraftLength = "auto"
    ngrams: bool = True
    datastore: Path | None = None
    offline_limit: int = 256
    drafting: Drafting = "auto"
    offline: Offline = "writer"
    policy: Policy = Policy.ROLLBACK
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    store: Path | None = None
    must_store: bool = False

    @property
    def server(self) -> str:
        return self.endpoint.address

    @property
    def target(self) -> str:
        return self.bundle.manifest.target

    @property
    def writes_offline(self) -> bool:
        """Whether the device answers a question that the verifier has not seen."""
        return self.offline == "writer" and self.bundle.manifest.writer is not None

    def open_datastore(self) -> Datastore | None:
        """See :func:`open_datastore`."""
        return open_datastore(self.datastore, self.bundle)

    async def connect(self, *, wait: bool = True) -> Chat:
        """See :meth:`moa_runtime.chat.Chat.connect`."""
        return await Chat.connect(
            self.bundle,
            self.endpoint,
            drafter=self.drafter,
            backend=self.backend,
            threads=self.threads,
            ngrams=self.ngrams,
            datastore=self.open_datastore(),
            controller=controller_for(self.draft_length),
            policy=self.policy,
            settings=LoopSettings(offline_limit=self.offline_limit, drafting=self.drafting, offline=self.offline),
            system=self.system,
            store=self.store,
            wait=wait,
        )

    def sampling(self) -> Sampling:
        """Return the sampling of the next answer."""
        return sampling_for(self.temperature, self.top_p, self.seed)


def chat_config_for(options: argparse.Namespace, bundle: Bundle, endpoint: Endpoint) -> ChatConfig:
    return ChatConfig(
        bundle,
        endpoint,
        system=options.system,
        drafter=options.drafter,
        backend=options.backend,
        threads=options.threads,
        draft_length=options.draft_length,
        ngrams=options.ngrams,
        datastore=options.datastore,
        offline_limit=options.offline_limit,
        drafting=options.drafting,
        offline=options.offline or ("writer" if options.serve is None else "off"),
        policy=Policy(options.policy or ("ask" if options.terminal and sys.stdin.isatty() else "rollback")),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature or 0.0,
        top_p=1.0 if options.top_p is None else options.top_p,
        seed=options.seed,
        store=options.chat or _default_store(options, bundle),
        must_store=options.chat is not None,
    )


def _default_store(options: argparse.Namespace, bundle: Bundle) -> Path | None:
    """Return the file of an interactive terminal's conversation, one for each target, as tokens fit one target only."""
    if not options.terminal or options.no_save or not sys.stdin.isatty():
        return None
    return data_dir() / "terminal" / f"{bundle.manifest.fingerprints.target[:16]}.json"


def open_bundle(folder: Path | None, drafter: DrafterName | None = None) -> Bundle:
    """The bundle in ``folder``, or the one for a drafter.

    Raises:
        MoaError: there is none, it is damaged, or of another drafter than the one that was asked for.
    """
    path = expanded(folder or bundle_of_drafter(drafter))
    if not path.exists():
        command = " ".join(("moa-export", "--target", "onnx", *drafter_option(drafter), "--out", str(path)))
        itself = "" if folder else ", and so does moa-chat --local"
        raise MoaError(f"there is no bundle at {path}: `{command}` writes it{itself}")
    bundle = Bundle.open(path)
    _check_drafter(bundle, drafter)
    return bundle


def _check_drafter(bundle: Bundle, name: DrafterName | None) -> None:
    """Refuse a bundle of another drafter than the one asked for.

    Raises:
        OtherDrafterError: the message names both.
    """
    if name is None or not DRAFTERS[name].has_graph:
        return
    found = bundle.manifest.architecture
    if found != name:
        raise OtherDrafterError(bundle.folder, found, name)


def open_datastore(path: Path | None, bundle: Bundle) -> Datastore | None:
    """Open a datastore for the tokenizer of a bundle; None without a path.

    Raises:
        DatastoreError: it cannot be read, or was made with another tokenizer.
    """
    return None if path is None else Datastore.open(path, bundle.manifest.fingerprints.tokenizer)


def endpoint_for(server: str, token: str, tls_ca: Path | None) -> Endpoint:
    """Return the verifier's address with its token and TLS settings.

    Raises:
        MoaError: the address, the token or the certificate authority cannot be used.
    """
    tls = None
    if tls_ca is not None:
        if not Endpoint(server).address.startswith("wss:"):
            raise MoaError(f"--tls-ca needs an encrypted address (wss://HOST:PORT), not {server}")
        try:
            tls = ssl.create_default_context(cafile=tls_ca)
        except ssl.SSLError as error:  # a kind of OSError
            raise MoaError(f"--tls-ca {tls_ca} is not a certificate authority in PEM format") from error
        except OSError as error:
            raise MoaError(f"--tls-ca {tls_ca} cannot be read: {reason_of(error)}") from error
    if any(not 32 < ord(char) < 127 for char in token):
        raise MoaError("the token may only hold visible ASCII characters: check --token or MOA_TOKEN")
    endpoint = Endpoint(server, token, tls)
    _ = endpoint.address  # raises on what is no address
    return endpoint
