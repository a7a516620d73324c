"""The configuration of a chat, made from the options of the command line."""

from __future__ import annotations

import argparse
import ssl
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moa_chat import strings
from moa_chat.history.chat_settings import sampling_for
from moa_runtime.address import split_link
from moa_runtime.backends.base import Backend
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.checked_file import read_checked
from moa_runtime.datastore import Datastore
from moa_runtime.drafters.factory import backend_for
from moa_runtime.drafting.draft_controllers import controller_for
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.manifest import RecommendedSampling
from moa_runtime.options import (
    DRAFTERS,
    DrafterName,
    Drafting,
    DraftLength,
    LoopSettings,
    Offline,
    OtherDrafterError,
    Overflow,
    drafter_option,
)
from moa_runtime.paths import bundle_of_drafter, data_dir, expanded
from moa_runtime.session.events import Grammar, Policy, Sampling
from moa_runtime.sockets import check_token
from moa_runtime.transport import Endpoint


@dataclass(frozen=True)
class ChatConfig:
    """Everything that :meth:`connect` needs to open a chat."""

    bundle: Bundle
    endpoint: Endpoint
    system: str | None = None
    drafter: DrafterName | None = None  # None for the bundle's own
    backend: str | Backend | None = None  # its name, or one that several chats share
    threads: int = 2
    draft_length: DraftLength = "auto"
    ngrams: bool = True
    datastore: Path | None = None  # a file of earlier texts, from which drafts are copied too
    offline_limit: int = 256
    drafting: Drafting = "auto"
    offline: Offline = "writer"
    policy: Policy = Policy.ROLLBACK
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None  # of the sampling; None draws one for each answer
    schema: Grammar | None = None  # what answers conform to
    thinking: bool | None = None  # whether the target reasons before it answers; None for its template's default
    overflow: Overflow = "trim"  # what happens if a conversation outgrows the context
    store: Path | None = None  # the file in which the conversation is kept; None to keep it nowhere
    must_store: bool = False  # whether the user named that file, so that a chat without it is an error

    @property
    def server(self) -> str:
        return self.endpoint.address

    @property
    def target(self) -> str:
        return self.bundle.manifest.target

    @property
    def model_words(self) -> str:
        """The target's name and size, for users."""
        return strings.model_words(self.target, self.bundle.manifest.target_parameters)

    @property
    def writes_offline(self) -> bool:
        """Whether the device answers a question that the verifier has not seen."""
        return self.offline == "writer" and self.bundle.manifest.writer is not None

    async def connect(self, **others: Any) -> Chat:
        """Connect a chat; ``others`` replace what the configuration says, see :meth:`moa_runtime.chat.Chat.connect`."""
        arguments = {
            "drafter": self.drafter,
            "backend": self.backend,
            "threads": self.threads,
            "ngrams": self.ngrams,
            "controller": controller_for(self.draft_length),
            "policy": self.policy,
            "settings": LoopSettings(self.offline_limit, drafting=self.drafting, offline=self.offline),
            "system": self.system,
            "store": self.store,
            "overflow": self.overflow,
            **others,
        }
        if "datastore" not in arguments:
            arguments["datastore"] = open_datastore(self.datastore, self.bundle)
        chat = await Chat.connect(self.bundle, self.endpoint, **arguments)
        try:
            chat.thinking = None if chat.tokenizer.raw else self.thinking
        except MoaError:
            await chat.close()
            raise
        return chat

    def loaded(self) -> ChatConfig:
        """Load the device half that the name says; return the configuration of chats that share it."""
        assert self.backend is None or isinstance(self.backend, str)
        backend = backend_for(self.bundle, self.drafter, self.backend, threads=self.threads)
        return self if backend is None else replace(self, backend=backend)

    def sampling(self) -> Sampling:
        """Return the sampling of the next answer."""
        return replace(sampling_for(self.temperature, self.top_p, self.seed), grammar=self.schema)


#: Options of the command line that a configuration takes as they are.
_TAKEN = (
    "system",
    "thinking",
    "schema",
    "drafter",
    "backend",
    "threads",
    "draft_length",
    "ngrams",
    "datastore",
    "offline_limit",
    "drafting",
)


def chat_config_for(options: argparse.Namespace, bundle: Bundle, endpoint: Endpoint) -> ChatConfig:
    sampling = _sampling_of(options, bundle.manifest.sampling)
    return ChatConfig(
        bundle,
        endpoint,
        **{name: getattr(options, name) for name in _TAKEN},
        offline=options.offline or ("writer" if options.serve is None else "off"),
        policy=Policy(options.policy or ("ask" if options.terminal and sys.stdin.isatty() else "rollback")),
        max_new_tokens=options.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=options.seed,
        overflow=options.context_overflow or ("trim" if options.serve is None else "error"),
        store=options.chat or _default_store(options, bundle),
        must_store=options.chat is not None,
    )


def _sampling_of(options: argparse.Namespace, recommended: RecommendedSampling | None) -> RecommendedSampling:
    """Return temperature and top_p: the options, else what the target's authors recommend, else greedy."""
    if options.temperature is not None:  # their top_p belongs to their temperature
        return RecommendedSampling(options.temperature, 1.0 if options.top_p is None else options.top_p)
    recommended = recommended or RecommendedSampling(0.0)
    return recommended if options.top_p is None else replace(recommended, top_p=options.top_p)


def _default_store(options: argparse.Namespace, bundle: Bundle) -> Path | None:
    """Return the file of an interactive terminal's conversation, one for each target, as tokens fit one target only."""
    if not options.terminal or options.no_save or not sys.stdin.isatty():
        return None
    return data_dir() / "terminal" / f"{bundle.manifest.fingerprints.target[:16]}.json"


def open_bundle(folder: Path | None, drafter: DrafterName | None = None) -> Bundle:
    """Return the bundle in ``folder``, or the default one for a drafter. Raises MoaError if it cannot be used."""
    path = expanded(folder or bundle_of_drafter(drafter))
    if not path.exists():
        command = " ".join(("moa-export", "--target", "onnx", *drafter_option(drafter), "--out", str(path)))
        itself = "" if folder else ", and so does moa-chat --local"
        raise MoaError(f"there is no bundle at {path}: `{command}` writes it{itself}", code="no_bundle")
    bundle = Bundle.open(path)
    found = bundle.manifest.architecture
    if drafter is not None and DRAFTERS[drafter].has_graph and found != drafter:
        raise OtherDrafterError(bundle.folder, found, drafter)
    return bundle


def open_datastore(path: Path | None, bundle: Bundle) -> Datastore | None:
    """Open a datastore, if one is named. Raises DatastoreError if it is unreadable or of another tokenizer."""
    return None if path is None else Datastore.open(path, bundle.manifest.fingerprints.tokenizer)


def endpoint_for(server: str, token: str, tls_ca: Path | None) -> Endpoint:
    """Return the verifier's address with token and TLS settings. Raises MoaError if one of them cannot be used.

    Args:
        server: its address, or the link that ``moa-serve --web`` shows, whose token counts if ``token`` is empty.
    """
    server, linked = split_link(server)
    token = token or linked
    tls = None
    if tls_ca is not None:
        if not Endpoint(server).address.startswith("wss:"):
            raise MoaError(f"--tls-ca needs an encrypted address (wss://HOST:PORT), not {server}", code="not_encrypted")
        try:
            read_checked(tls_ca)  # OpenSSL would wait for a pipe
            tls = ssl.create_default_context(cafile=tls_ca)
        except ssl.SSLError as error:  # a kind of OSError
            text = f"--tls-ca {tls_ca} is not a certificate authority in PEM format"
            raise MoaError(text, code="certificate_unreadable") from error
        except OSError as error:
            raise MoaError(f"--tls-ca {tls_ca} cannot be read: {reason_of(error)}", code="unreadable") from error
    check_token(token, "--token", "MOA_TOKEN")
    endpoint = Endpoint(server, token, tls)
    _ = endpoint.address  # raises on what is no address
    return endpoint
