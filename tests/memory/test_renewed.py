"""Blocks that are replaced at their addresses, and blocks beside a masked rank."""

from __future__ import annotations

import os

import pytest
import torch

from moelink.errors import UnsupportedError
from moelink.memory import PosixMemory, create_all, posix

NBYTES = 5000


def alone(record: bytes) -> list[bytes]:
    return [record]


def test_a_new_block_is_where_the_old_one_was_and_late_writes_miss_it() -> None:
    """The old file stays what it was, for a rank that still has it mapped."""
    files: list[int] = []

    def keep(record: bytes) -> list[bytes]:
        fields = dict(line.split("=") for line in record.decode().splitlines()[1:])
        if "fd" in fields:
            files.append(os.dup(int(fields["fd"])))
        return [record]

    memory = PosixMemory.create(NBYTES, rank=0, world_size=2, exchange=keep, members=[0])
    late = posix._view(files[0], NBYTES, "the old block")
    memory.local[7], before = 1, memory.pointers.tolist()
    view = memory.local[10:20].view(torch.uint8)
    renewal = memory.renew([0], alone, lambda block: block[11:13].fill_(5))
    assert (memory.local[7], late[7]) == (1, 1)  # nothing has changed
    renewal.commit()
    assert memory.pointers.tolist() == before == [memory.peer(r).data_ptr() for r in range(2)]
    assert memory.local[7] == 0
    assert view.tolist() == [0, 5, 5, 0, 0, 0, 0, 0, 0, 0]
    late.fill_(9)
    assert view.tolist() == [0, 5, 5, 0, 0, 0, 0, 0, 0, 0]
    memory.close()
    for fd in files:
        os.close(fd)


def test_stores_to_a_masked_rank_end_in_memory_of_ones_own() -> None:
    memory = PosixMemory.create(NBYTES, rank=1, world_size=3, exchange=alone, members=[1])
    memory.peer(0).fill_(3)
    memory.renew([1], alone, lambda block: None).commit()
    assert not memory.peer(0).any()
    memory.peer(2)[100] = 4
    assert not memory.local.any()
    memory.close()


def test_a_renewal_that_is_given_up_changes_nothing() -> None:
    memory = PosixMemory.create(NBYTES, rank=0, world_size=1, exchange=alone)
    memory.local.fill_(6)
    before = len(os.listdir("/proc/self/fd"))
    renewal = memory.renew([0], alone, lambda block: None)
    renewal.discard()
    assert len(os.listdir("/proc/self/fd")) == before
    assert bool((memory.local == 6).all())
    memory.close()


def test_memory_of_another_kind_is_refused_by_name() -> None:
    (memory,) = create_all(["cpu"], NBYTES)
    with pytest.raises(UnsupportedError, match="blocks that can begin anew.*SingleProcessMemory"):
        memory.renew([0], alone, lambda block: None)
