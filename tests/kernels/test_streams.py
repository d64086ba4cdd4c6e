"""Which stream a rank's launches go to, and what that stream waits for first, without a GPU: torch's part is played."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from moelink.kernels.launch import launcher as module
from moelink.kernels.launch.launcher import Launcher
from moelink.kernels.records import Peers
from moelink.transports.symmetric.rank import Rank


class Stream:
    """Notes what it waits for. Two objects are the same stream if their handles are."""

    def __init__(self, handle):
        self.cuda_stream, self.waits = handle, []

    def __eq__(self, other):
        return self.cuda_stream == other.cuda_stream

    __hash__ = None

    def wait_stream(self, other):
        self.waits.append(other.cuda_stream)


class Cuda:
    """The part of ``torch.cuda`` that launches use."""

    def __init__(self):
        self.stream, self.index, self.capturing, self.made = Stream(1), 0, False, 0

    def use(self, handle):
        """Make stream ``handle`` the current one; returns it."""
        self.stream = Stream(handle)
        return self.stream

    def current_stream(self, _device):
        self.made += 1
        return self.stream

    def current_device(self):
        return self.index

    def is_current_stream_capturing(self):
        return self.capturing

    @contextmanager
    def device(self, device):
        before, self.index = self.index, device.index
        yield
        self.index = before

    @contextmanager
    def _stream(self, stream):
        before, self.stream = self.stream, stream
        yield
        self.stream = before


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    for name in ("current_stream", "current_device", "is_current_stream_capturing", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "stream", fake._stream)
    active = SimpleNamespace(get_current_stream=lambda index: fake.stream.cuda_stream)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    return fake


@pytest.fixture
def rank():
    one = Rank.__new__(Rank)
    one.device, one.stream, one._latest, one._forked = torch.device("cuda", 0), Stream(100), None, False
    one._latest_handle, one._index = -1, 0
    one.launcher = Launcher(Peers(*[torch.zeros(1)] * 3), one.device, network=None)
    return one


def launch(rank, cuda, *, own_stream=False):
    """The stream and the device that a launch goes to."""
    with rank.launching(own_stream=own_stream):
        return cuda.stream.cuda_stream, cuda.index


def test_a_caller_who_stays_on_one_stream_waits_for_nothing(rank, cuda):
    assert launch(rank, cuda) == (1, 0)
    made = cuda.made
    for _ in range(3):
        assert launch(rank, cuda) == (1, 0)
        rank.join()
    assert cuda.stream.waits == []
    assert cuda.made == made, "no stream object was made"


def test_another_stream_waits_for_the_one_before_unless_it_is_being_captured(rank, cuda):
    launch(rank, cuda)
    second = cuda.use(2)
    launch(rank, cuda)
    launch(rank, cuda)
    assert second.waits == [1]
    cuda.capturing, third = True, cuda.use(3)
    launch(rank, cuda)
    assert third.waits == []
    cuda.capturing, fourth = False, cuda.use(4)
    launch(rank, cuda)
    assert fourth.waits == [3]


def test_halves_run_on_a_stream_of_their_own_until_they_are_joined(rank, cuda):
    launch(rank, cuda)
    assert launch(rank, cuda, own_stream=True) == (100, 0)
    assert rank.stream.waits == [1]
    # What is launched before the join must come after what is under way there.
    assert launch(rank, cuda) == (100, 0)
    rank.join()
    assert cuda.stream.waits == [100]
    assert launch(rank, cuda) == (1, 0)


def test_launches_go_to_the_device_of_the_rank(rank, cuda):
    for _ in range(2):
        cuda.index = 5
        assert launch(rank, cuda) == (1, 0)
        assert cuda.index == 5
