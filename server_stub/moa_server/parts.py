"""What the connections of a verifier share."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.timeline import Timeline
from moa_server.auth import Bearers
from moa_server.drafting.server_drafting import ServerDrafts
from moa_server.engine.base import Engine
from moa_server.metrics import Metrics
from moa_server.scheduling.worker import Worker
from moa_server.sessions import SessionStore
from moa_server.settings import Settings


@dataclass(frozen=True)
class Parts:
    """The same objects for all of them."""

    engine: Engine
    worker: Worker
    drafts: ServerDrafts | None
    store: SessionStore
    bearers: Bearers
    settings: Settings
    metrics: Metrics
    timeline: Timeline
