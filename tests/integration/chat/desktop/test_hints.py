"""What the window tells the runtime of the machine."""

from __future__ import annotations

import dataclasses

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtNetwork import QNetworkInformation

from moa_chat.desktop.host_conditions import HostConditions
from moa_runtime.options import Conditions
from support.chat.desktop.window_driving import WAIT


class Told:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.conditions: list[Conditions] = []
        self.changes = 0

    def tell_conditions(self, conditions: Conditions) -> None:
        self.conditions.append(conditions)

    def network_changed(self) -> None:
        self.changes += 1


@pytest.fixture
def told(qapp) -> Told:
    return Told()


@pytest.fixture
def hints(told: Told) -> HostConditions:
    hints = HostConditions(told)  # type: ignore[arg-type]
    told.conditions.clear()
    return hints


@pytest.fixture
def network(hints: HostConditions) -> QNetworkInformation:
    network = QNetworkInformation.instance()
    if network is None:
        pytest.skip("this system has no service that tells Qt of networks")
    return network


def test_only_a_suspended_program_is_in_the_background(told, hints):
    """Not one whose window is hidden or behind others: its answer should be there when the user is back."""
    state = Qt.ApplicationState
    changed = QGuiApplication.instance().applicationStateChanged
    for seen in (state.ApplicationInactive, state.ApplicationHidden, state.ApplicationActive):
        changed.emit(seen)
    assert told.conditions == []
    changed.emit(state.ApplicationSuspended)
    changed.emit(state.ApplicationActive)
    assert [conditions.background for conditions in told.conditions] == [True, False]


def test_pieces_of_a_change_of_networks_are_one(told, hints, network, qtbot):
    for reachability in (QNetworkInformation.Reachability.Disconnected, QNetworkInformation.Reachability.Online):
        network.reachabilityChanged.emit(reachability)
    network.transportMediumChanged.emit(QNetworkInformation.TransportMedium.Cellular)
    assert told.changes == 0
    qtbot.waitUntil(lambda: told.changes > 0, timeout=WAIT)
    assert told.changes == 1


def test_a_metered_network_is_told(told, hints, network):
    network.isMeteredChanged.emit(True)
    assert told.conditions[-1].metered
    network.isMeteredChanged.emit(False)
    assert not told.conditions[-1].metered


def test_conditions_reach_the_chat_and_the_one_after_it(connected, qtbot, monkeypatch):
    """A verifier on this machine is reached without any network: bytes cost nothing, and no change concerns it."""
    runtime = connected.runtime
    before = runtime.chat
    runtime.tell_conditions(Conditions(low_power=True, metered=True))
    qtbot.waitUntil(lambda: before.conditions == Conditions(low_power=True), timeout=WAIT)
    called = []
    monkeypatch.setattr(type(before), "network_changed", lambda chat: called.append(chat))
    runtime.network_changed()
    assert not called
    connected._save_settings(dataclasses.replace(connected.settings, server=connected.settings.server + "/v1/session"))
    qtbot.waitUntil(lambda: runtime.chat is not before and runtime.chat.conditions.low_power, timeout=WAIT)
