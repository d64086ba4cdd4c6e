"""Ranks of different builds are refused by name at init, on all of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import moelink
from moelink.control import handshake
from moelink.memory import protocol
from moelink.memory.layout import DispatchMessage, RegionTable
from moelink.testing import run_ranks
from moelink.transports.build import layout_digest
from moelink.transports.collective import group_wire
from tests.support.fault_ranks import FIELDS, check_round_trip

PARTS = DispatchMessage.parts.fget  # type: ignore[attr-defined]


def longer_message(self: Any) -> RegionTable:
    """The parts of a message, and 16 bytes more."""
    parts = [(region.name, region.dtype, region.shape) for region in PARTS(self)]
    return RegionTable.pack(*parts, ("more", torch.int32, (4,)), alignment=4)


def of_another_build(rank: int, world_size: int, change: str) -> str:
    """What init raises when rank 1 runs a build with ``change``; without it, init works again."""
    changes = {
        "version": mock.patch.object(handshake, "__version__", "0.0.9"),
        "message": mock.patch.object(DispatchMessage, "parts", property(longer_message)),
        "fields": mock.patch("moelink.transports.build.HEADER_FIELDS", group_wire.HEADER_FIELDS[::-1]),
    }
    words = "nothing"
    if rank == 1:
        changes[change].start()
    try:
        moelink.init(**FIELDS, timeout=60)
    except moelink.MoelinkError as error:
        words = f"{type(error).__name__}: {error}"
    if rank == 1:
        changes[change].stop()
    with moelink.init(**FIELDS, timeout=60) as ep:
        check_round_trip(ep, rank)
    return words


@pytest.mark.quick("a build may differ in each of these")
@pytest.mark.parametrize("change", ["version", "message", "fields"])
def test_a_rank_of_another_build_is_named_on_every_rank(change: str) -> None:
    for words in run_ranks(of_another_build, 3, change):
        assert words.startswith("ConfigMismatchError: moelink: expected the same value on every rank, got '")
        assert ("version 0.0.9" if change == "version" else "a build with layout") in words
        assert " on ranks 0, 2; " in words
        assert "on rank 1'" in words


def test_the_digest_changes_with_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    config = moelink.EPConfig(**FIELDS)
    digests = {layout_digest(config), layout_digest(moelink.EPConfig(**FIELDS | {"hidden_size": 32}))}
    monkeypatch.setattr(protocol, "CLAIM", 9)
    digests.add(layout_digest(config))
    monkeypatch.undo()
    assert len(digests) == 3
    assert layout_digest(config) in digests
