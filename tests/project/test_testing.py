"""Helpers of ``moelink.testing`` that other tests take for granted."""

import socket

import pytest

from moelink import testing


def test_a_free_port_is_below_those_that_systems_give_away():
    assert {port // 32_768 for port in (testing.free_port() for _ in range(20))} == {0}


def test_a_port_that_is_taken_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        port = testing.free_port()
        taken.bind(("127.0.0.1", port))
        monkeypatch.setattr(testing, "_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match=f"expected a free port from {port} to {port}, got none"):
            testing.free_port()
