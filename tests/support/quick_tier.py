"""A plugin of pytest that holds the quick tier to its budgets (:mod:`tests.tiers`) and shows where the seconds went."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.costs import Clock, Costs, pace
from tests.tiers import BUDGETS, NEW_PROCESSES, OWN_TIERS, folder_of, over_budget

_PACE_EVERY = 20
"""Tests between two measurements of the pace."""
_HEAVY = r"(?:torch|moelink|pytest|triton)\b"
_CODE = re.compile(rf"\b(?:import|from)\b[^;\n]*\b{_HEAVY}|importlib")
"""Code that loads torch."""


def starts_torch(command: Sequence[str]) -> bool:
    """Return whether a command starts Python for something that loads torch. Without site packages (``-S``) none can,
    and the servers of :mod:`tests.support.programs` are two a run."""
    python = next((at for at, word in enumerate(command) if Path(word).name.startswith("python")), None)
    if python is None or "-S" in command:
        return False
    rest = command[python + 1 :]
    if "-c" in rest:
        return _CODE.search(" ".join(rest[rest.index("-c") + 1 :])) is not None
    if "-m" in rest:
        return re.match(_HEAVY, rest[rest.index("-m") + 1]) is not None
    return bool(rest) and not rest[0].endswith(("tests/support/programs.py", "-mpip"))


class QuickTier:
    """Notes the processor seconds of each test where it runs, and adds them up where it is reported.

    Args:
        whole: the run is all of the quick tier, so that its budgets hold.
        quick: the run is of the quick tier, whose tests do not start Python anew.
    """

    def __init__(self, whole: bool, quick: bool) -> None:
        self._whole, self._quick = whole, quick
        self._costs, self._clock, self._tests = Costs(), Clock(), 0
        self._running = ""
        self._started: list[str] = []
        self._closed = False
        sys.addaudithook(self._heard)  # which Python cannot remove

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and self._running and not self._closed:
            command = [os.fsdecode(word) for word in (arguments[0], *arguments[1]) if word is not None]
            if starts_torch(command[1:]):
                self._started.append(" ".join(command[1:])[:200])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Fail a quick test that starts Python anew without a row in ``NEW_PROCESSES``; folders with a tier of their
        own may."""
        self._running, self._started = item.nodeid, []
        try:
            yield
        finally:
            self._running = ""
        allowed = item.nodeid.startswith(tuple(NEW_PROCESSES)) or folder_of(item.nodeid) in OWN_TIERS
        if self._quick and self._started and not allowed:
            pytest.fail(
                f"{item.nodeid}: expected no new Python process in the quick tier, got {self._started}; use "
                f"tests.support.commands, mark the test as full, or name it in tests.tiers.NEW_PROCESSES", pytrace=False
            )  # fmt: skip

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Add what the test took, from the end of the one before it, to its last report."""
        if call.when == "teardown":
            item.user_properties.append(("processor_seconds", round(self._clock.lap(), 3)))
            if self._tests % _PACE_EVERY == 0:
                item.user_properties.append(("pace", round(pace(), 3)))
            self._tests += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Learn what a test took, on this process or on a worker."""
        if report.when == "teardown":
            self._costs.note(report.nodeid, report.user_properties)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run if a folder took more than its budget."""
        self._closed = True
        if self._whole and self._over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the seconds by folder beside their budgets, and the five slowest tests."""
        seconds = self._costs.by_folder(folder_of)
        if not seconds:
            return
        terminalreporter.section("processor seconds")
        rows = sorted(seconds.items(), key=lambda row: -row[1])
        words = [f"{folder} {spent:.0f}{f'/{BUDGETS[folder]}' if folder in BUDGETS else ''}" for folder, spent in rows]
        for begin in range(0, len(words), 7):
            terminalreporter.write_line("   ".join(words[begin : begin + 7]))
        total, pace = sum(seconds.values()), self._costs.pace
        terminalreporter.write_line(
            f"all {total:.0f}/{sum(BUDGETS.values())}, at {pace:.2f} of the budgets' pace; slowest:"
        )
        for spent, nodeid in self._costs.slowest(5):
            terminalreporter.write_line(f"{spent / pace:6.1f} s  {nodeid}")
        for error in self._over().values() if self._whole else ():
            terminalreporter.write_line(error, red=True)

    def _over(self) -> dict[str, str]:
        return over_budget(self._costs.by_folder(folder_of))
