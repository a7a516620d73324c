"""Report conditions of this machine to the runtime: a change of network, metered traffic, a suspended program."""

from __future__ import annotations

import dataclasses

from PySide6.QtCore import QObject, Qt, QTimer
from PySide6.QtGui import QGuiApplication
from PySide6.QtNetwork import QNetworkInformation

from moa_chat.desktop.runtime_thread import RuntimeThread
from moa_runtime.options import Conditions

#: A change of network arrives as several signals; those within this time count as one.
_SETTLED_MS = 300


class HostConditions(QObject):
    """Reports to the runtime what Qt learns from the system; nothing, if Qt has no backend for it.

    A minimised or covered window is not in the background: its user expects the answer to be complete on return.
    """

    def __init__(self, runtime: RuntimeThread, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._runtime = runtime
        self._conditions = Conditions()
        self._settled = QTimer(self, singleShot=True, interval=_SETTLED_MS, timeout=runtime.network_changed)
        application = QGuiApplication.instance()
        assert isinstance(application, QGuiApplication)
        application.applicationStateChanged.connect(self._state_changed)
        feature = QNetworkInformation.Feature
        if QNetworkInformation.loadBackendByFeatures(feature.Reachability | feature.Metered):
            network = QNetworkInformation.instance()
            network.reachabilityChanged.connect(self._network_changed)
            network.transportMediumChanged.connect(self._network_changed)
            network.isMeteredChanged.connect(self._metered_changed)
            self._metered_changed(network.isMetered())

    def _state_changed(self, state: Qt.ApplicationState) -> None:
        self._tell(background=state is Qt.ApplicationState.ApplicationSuspended)

    def _metered_changed(self, metered: bool) -> None:
        self._tell(metered=metered)

    def _network_changed(self, _: object) -> None:
        self._settled.start()

    def _tell(self, **changes: bool) -> None:
        conditions = dataclasses.replace(self._conditions, **changes)
        if conditions != self._conditions:
            self._conditions = conditions
            self._runtime.tell_conditions(conditions)
