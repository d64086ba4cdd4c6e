"""Mismatched calls in tests: the error of every rank, of its later calls, and calls of kernels that no host ends."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

import moelink
from moelink.control.mismatch import Mismatch


def after_mismatch(ep: moelink.Communicator, call: Any, words: str) -> moelink.Communicator:
    """Make ``call``, a mismatched one, which raises ``words``. Later calls raise the same error. Returns the
    communicator of all ranks that ``recover`` makes."""
    with pytest.raises(moelink.ProtocolError, match=words) as first:
        call()
    same_again(ep, first.value)
    return ep.recover(range(ep.config.world_size))


def same_again(ep: moelink.Communicator, error: moelink.ProtocolError) -> None:
    """Every later call raises ``error``, whether its arguments are right or not."""
    sizes = ep.config
    x = torch.zeros(1, sizes.hidden_size, dtype=torch.bfloat16)
    ids = torch.zeros(1, sizes.topk, dtype=torch.int32)
    later = (
        lambda: ep.dispatch(x, ids),
        lambda: ep.dispatch_async(x, ids),
        lambda: ep.dispatch(x.int(), ids),
        ep.check,
    )
    for each in later:
        with pytest.raises(moelink.ProtocolError, match=f"^{re.escape(str(error))}$"):
            each()


def no_host_ends_it() -> AbstractContextManager[Any]:
    """Let a mismatch end nothing, so that a test sees what follows it in kernels and on the wire, as replays of a graph
    do before a host reads the error record."""
    made = Mismatch.error

    def error(self: Mismatch, **where: Any) -> moelink.ProtocolError:
        told = made(self, **where)
        told.ends_communicator = False
        return told

    return mock.patch.object(Mismatch, "error", error)
