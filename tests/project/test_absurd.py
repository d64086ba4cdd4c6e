"""Values that can only be mistakes are refused by name, at once."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

import moelink
from moelink import env
from moelink.memory.nodes import watchdog
from tests.support.fault_ranks import FIELDS


@pytest.mark.quick("each field has a limit of its own")
@pytest.mark.parametrize(
    ("name", "value"),
    [("num_experts", 2**31), ("topk", 10**6), ("hidden_size", 2**40), ("lanes", 10**6)],
)
def test_a_size_that_can_only_be_a_mistake_is_refused(name: str, value: int) -> None:
    with pytest.raises(moelink.ConfigError, match=rf"^{name}: expected an integer in \[\d, \d+\], got {value}"):
        moelink.EPConfig(**(FIELDS | {name: value}))


@pytest.mark.quick("values of each kind")
@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False), (None, False)])
def test_a_switch_is_on_or_off(value: str | None, on: bool) -> None:
    assert env.DEBUG.is_on({} if value is None else {"MOELINK_DEBUG": value}) is on


@pytest.mark.quick("values of each kind")
@pytest.mark.parametrize("value", ["true", "yes", "on", "2", " 1"])
def test_another_value_of_a_switch_is_refused(value: str) -> None:
    """Closes over: a switch that is off without a word."""
    with pytest.raises(moelink.ConfigError, match="^MOELINK_DEBUG: expected 0 or 1 in the environment"):
        env.DEBUG.is_on({"MOELINK_DEBUG": value})


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="kernels before Linux 5.3 have no handles of processes")
def test_the_watchdog_signals_a_process_and_none_that_gets_its_number_later() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        signaller = watchdog._signaller(process.pid)
        signaller(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            signaller(0)
    with pytest.raises(ProcessLookupError):
        watchdog._signaller(process.pid)
