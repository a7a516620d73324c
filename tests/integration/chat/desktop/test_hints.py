"""Conditions of this machine that the window reports to the runtime."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtNetwork import QNetworkInformation

from moa_chat.desktop.host_conditions import HostConditions
from moa_runtime.options import Conditions


@pytest.fixture
def runtime(qapp) -> mock.Mock:
    """What the runtime is told by conditions of the machine."""
    runtime = mock.Mock()
    runtime.kept = HostConditions(runtime)
    runtime.reset_mock()
    return runtime


@pytest.fixture
def network(runtime: mock.Mock) -> QNetworkInformation:
    network = QNetworkInformation.instance()
    if network is None:
        pytest.skip("this system has no service that tells Qt of networks")
    return network


def reported(runtime: mock.Mock) -> list[Conditions]:
    return [call.args[0] for call in runtime.tell_conditions.call_args_list]


def test_only_a_suspended_program_is_in_the_background(runtime):
    """Not one whose window is hidden or covered: its answer should be complete when the user is back."""
    state, changed = Qt.ApplicationState, QGuiApplication.instance().applicationStateChanged
    for seen in (state.ApplicationInactive, state.ApplicationHidden, state.ApplicationActive):
        changed.emit(seen)
    assert reported(runtime) == []
    changed.emit(state.ApplicationSuspended)
    changed.emit(state.ApplicationActive)
    assert [conditions.background for conditions in reported(runtime)] == [True, False]


def test_a_change_of_networks_is_reported_once_and_metered_traffic_too(runtime, network, until):
    for reachability in (QNetworkInformation.Reachability.Disconnected, QNetworkInformation.Reachability.Online):
        network.reachabilityChanged.emit(reachability)
    network.transportMediumChanged.emit(QNetworkInformation.TransportMedium.Cellular)
    assert not runtime.network_changed.called
    until(lambda: runtime.network_changed.called)
    assert runtime.network_changed.call_count == 1
    network.isMeteredChanged.emit(True)
    network.isMeteredChanged.emit(False)
    assert [conditions.metered for conditions in reported(runtime)] == [True, False]


def test_conditions_reach_the_chat_and_the_one_after_it(connected, until, monkeypatch):
    """A server on this device is reached without any network: its bytes cost nothing, and no change concerns it."""
    runtime = connected.runtime
    before = runtime.chat
    runtime.tell_conditions(Conditions(low_power=True, metered=True))
    until(lambda: before.conditions == Conditions(low_power=True))
    called = []
    monkeypatch.setattr(type(before), "network_changed", lambda chat: called.append(chat))
    runtime.network_changed()
    assert not called
    server = connected.settings.server.removesuffix("/v1/session")
    other = server if server != connected.settings.server else f"{server}/v1/session"
    connected._save_settings(dataclasses.replace(connected.settings, server=other))
    until(lambda: runtime.chat is not before and runtime.chat.conditions.low_power)
