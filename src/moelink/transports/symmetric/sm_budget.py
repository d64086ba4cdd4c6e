"""Count the SMs that the communicators of one device may occupy together: the SM budget.

Two communicators, or two lanes of one, can be in flight at the same time (on streams of their own) only if the CTAs of
both fit the device. Otherwise the waiting CTAs of one could keep out the senders of the other, on every rank in turn. A
communicator with an SM limit (``num_sms``) takes part in this budget, each of its lanes for itself. One without a limit
uses the whole device, and the caller's stream runs it after the others; so it has one lane.

A device belongs to the whole process, and so does its budget. This is the only registry of the package that is not
reached from a communicator. It keeps nothing alive.
"""

from __future__ import annotations

import weakref

import torch

from moelink.errors import ConfigError


class SmBudget:
    """SMs promised to open communicators, by device."""

    def __init__(self) -> None:
        self._holders: weakref.WeakKeyDictionary[object, tuple[torch.device, int]] = weakref.WeakKeyDictionary()

    def claim(
        self, holder: object, device: torch.device, num_sms: int | None, *, available: int, lanes: int = 1
    ) -> None:
        """Promise ``num_sms`` of the ``available`` SMs of ``device`` to ``holder`` until it is released.

        ``lanes``: of the communicator whose first lane ``holder`` is. The others claim as much later, each for itself,
        but all must fit now.

        Raises:
            ConfigError: ``num_sms`` is more than the device has, or than other open communicators leave, or is None
                where several lanes run at the same time.

        Example: with 132 available and 100 claimed, a claim of 40 is refused and one of 32 accepted; with 2 lanes, one
        of 32 is refused and one of 16 accepted.
        """
        if num_sms is None:
            if lanes > 1:
                raise ConfigError(
                    "num_sms", f"at most {available // lanes} with lanes={lanes}, which share the SMs of {device}", None
                )
            return
        taken = sum(count for place, count in self._holders.values() if place == device)
        if lanes * num_sms + taken > available:
            raise ConfigError(
                "num_sms",
                f"at most {(available - taken) // lanes} ({available} on {device}, {taken} held by open communicators"
                + (f", {lanes} lanes)" if lanes > 1 else ")"),
                num_sms,
            )
        self._holders[holder] = (device, num_sms)

    def release(self, holder: object) -> None:
        """Give back the claim of ``holder``, if it has one."""
        self._holders.pop(holder, None)


SM_BUDGET = SmBudget()
