"""Symmetric memory on CPUs: sharing between processes and inside one, and what is refused."""

import errno
import os
import re
import signal
import stat

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from moelink.errors import (
    ArgumentError,
    ClosedError,
    MoelinkError,
    ProtocolError,
    UnsupportedError,
)
from moelink.memory import MAX_RECORD_BYTES, PosixMemory, create_all, posix
from moelink.memory.setup import decode, encode
from tests.memory.memory_ranks import run_ranks, values

interpreted = pytest.mark.skipif(
    not isinstance(tl.sum, interpreter.InterpretedFunction), reason="compiled kernels cannot address CPU memory"
)
NBYTES = 5000  # neither a power of two nor whole pages
ALONE = {"rank": 0, "world_size": 1, "exchange": lambda record: [record]}


@triton.jit(do_not_specialize=["rank"])
def add_everywhere(pointers, rank, rounds, W: tl.constexpr):
    """Adds 1 + rank to int32 0 of every block, and writes rank + 1 into byte 64 + rank of every block."""
    for _ in range(rounds):
        for peer in tl.static_range(W):
            base = tl.load(pointers + peer)
            tl.atomic_add(base.to(tl.pointer_type(tl.int32)), 1 + rank, sem="relaxed", scope="sys")
    for peer in tl.static_range(W):
        base = tl.load(pointers + peer)
        tl.store(base.to(tl.pointer_type(tl.uint8)) + 64 + rank, (rank + 1).to(tl.uint8))


# -- processes -------------------------------------------------------------------------------------------------------


def share_and_sum(rank, world_size, exchange):
    memory = PosixMemory.create(NBYTES, rank=rank, world_size=world_size, exchange=exchange)
    assert (memory.rank, memory.world_size, memory.nbytes) == (rank, world_size, NBYTES)
    assert memory.local.shape == (NBYTES,)
    assert memory.local.dtype == torch.uint8
    assert not memory.local.any()
    assert memory.pointers.tolist() == [memory.peer(r).data_ptr() for r in range(world_size)]
    assert all(pointer % 4096 == 0 for pointer in memory.pointers.tolist())
    exchange(b"all zero")
    for peer in range(world_size):
        memory.peer(peer)[1000 + rank] = 10 * rank + peer
    memory.peer((rank + 1) % world_size)[-1] = 77
    add_everywhere[(1,)](memory.pointers, rank, 50, W=world_size)
    exchange(b"all written")
    seen = memory.local.clone()
    exchange(b"all read")
    view = memory.peer((rank + 1) % world_size)
    memory.close()
    memory.close()
    assert view[-1] == 77, "a view that the caller holds stays mapped"
    assert memory.local.numel() == 0
    assert memory.pointers.tolist() == [0] * world_size
    with pytest.raises(ClosedError):
        memory.peer(rank)
    return seen.tolist()


@interpreted
@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_see_each_others_writes_and_atomic_sums(world_size):
    for rank, block in enumerate(values(run_ranks(world_size, share_and_sum))):
        total = 50 * sum(range(1, world_size + 1))
        assert torch.tensor(block[:4], dtype=torch.uint8).view(torch.int32).item() == total
        assert block[64 : 64 + world_size] == [r + 1 for r in range(world_size)]
        assert block[1000 : 1000 + world_size] == [10 * r + rank for r in range(world_size)]
        assert block[-1] == 77


def different_sizes(rank, world_size, exchange):
    PosixMemory.create(NBYTES + rank // 2, rank=rank, world_size=world_size, exchange=exchange)


def test_different_sizes_are_refused_on_every_rank():
    for result in run_ranks(3, different_sizes):
        assert result[:2] == ("error", "ConfigMismatchError")
        assert "nbytes" in result[2]
        assert "5000 on ranks 0, 1" in result[2]
        assert "5001 on rank 2" in result[2]


def too_large_on_rank_1(rank, world_size, exchange):
    nbytes = 1 << 50 if rank == 1 else NBYTES
    PosixMemory.create(nbytes, rank=rank, world_size=world_size, exchange=exchange)


def test_a_size_beyond_memory_is_refused_on_every_rank():
    zero, one = run_ranks(2, too_large_on_rank_1)
    assert zero[:2] == one[:2] == ("error", "UnsupportedError")
    assert one[2].startswith("shared memory: expected 1125899906846720 free bytes in /dev/shm for a block, got ")
    assert zero[2] == f"rank 1 could not set up its memory: {one[2]}"


def die_in_exchange(rank, world_size, exchange, victim, moment):
    calls = []

    def mortal(record):
        if rank == victim and len(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(record)
        return exchange(record)

    PosixMemory.create(NBYTES, rank=rank, world_size=world_size, exchange=mortal)


def leftovers():
    return [name for name in os.listdir("/dev/shm") if name.startswith("moelink")]


@pytest.mark.parametrize("moment", [0, 1], ids=["before-descriptors", "before-verdicts"])
def test_nothing_is_left_when_a_rank_is_killed(moment):
    results = run_ranks(3, die_in_exchange, 1, moment)
    assert results[1] == ("killed",)
    assert [r[1] for r in (results[0], results[2])] == ["RankLostError"] * 2
    assert leftovers() == []


# -- one block -------------------------------------------------------------------------------------------------------


def block_file(monkeypatch, deny_tmpfile=False):
    """Create one block and return (stat of its file, names that were used, its record)."""
    names, seen, real_open = [], [], os.open

    def spying_open(path, flags, *mode, **kwargs):
        if path == posix.DIRECTORY and flags & os.O_TMPFILE == os.O_TMPFILE and deny_tmpfile:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if str(path).startswith(posix.DIRECTORY + "/"):
            assert flags & os.O_EXCL
            names.append(path)
        return real_open(path, flags, *mode, **kwargs)

    def exchange(record):
        if not seen:
            fields = dict(line.split("=") for line in record.decode().splitlines()[1:])
            seen.extend([os.fstat(int(fields["fd"])), record])
        return [record]

    monkeypatch.setattr(os, "open", spying_open)
    before = set(os.listdir("/proc/self/fd"))
    memory = PosixMemory.create(NBYTES, rank=0, world_size=1, exchange=exchange)
    assert set(os.listdir("/proc/self/fd")) == before, "no descriptor stays open"
    monkeypatch.setattr(os, "open", real_open)
    memory.local.fill_(7)
    memory.close()
    return seen[0], names, seen[1]


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("deny_tmpfile", [False, True], ids=["nameless", "unlinked"])
def test_a_block_is_private_and_has_no_name(monkeypatch, deny_tmpfile):
    old = os.umask(0)
    try:
        status, names, record = block_file(monkeypatch, deny_tmpfile)
        _, more_names, another = block_file(monkeypatch, deny_tmpfile)
    finally:
        os.umask(old)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    assert status.st_nlink == 0
    assert status.st_blocks * 512 >= NBYTES, "reserved, not merely promised"
    names += more_names
    assert len(set(names)) == (2 if deny_tmpfile else 0)
    assert all(re.fullmatch(r"/dev/shm/moelink-[0-9a-f]{32}", name) for name in names)
    token, other_token = (re.search(rb"token=([0-9a-f]{32})\n", r).group(1) for r in (record, another))
    assert token != other_token
    assert leftovers() == []


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_below_one_are_refused(nbytes):
    with pytest.raises(ArgumentError, match=f"nbytes: expected at least 1, got {nbytes}"):
        PosixMemory.create(nbytes, **ALONE)


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("nbytes", [1, 4096, 4097])
def test_every_byte_is_there(nbytes):
    memory = PosixMemory.create(nbytes, **ALONE)
    memory.local.fill_(1)
    assert memory.local.sum() == nbytes
    assert memory.peer(0).data_ptr() == memory.local.data_ptr()
    with pytest.raises(ArgumentError, match=r"rank: expected a rank in \[0, 1\), got 1"):
        memory.peer(1)
    memory.close()


# -- records that other processes send -------------------------------------------------------------------------------


def create_with(tamper, verdict=lambda ready: ready):
    """Rank 0 of 2; rank 1's record is ``tamper(a good record)``, its verdict is ``verdict(a good verdict)``."""
    answers = iter((tamper, verdict))

    def exchange(record):
        return [record, next(answers)(record.replace(b"\nrank=0\n", b"\nrank=1\n"))]

    return PosixMemory.create(NBYTES, rank=0, world_size=2, exchange=exchange)


def test_a_good_record_is_accepted():
    create_with(lambda good: good).close()


@st.composite
def tampering(draw):
    """A function from a good record to another one."""
    kind = draw(st.sampled_from(["noise", "byte", "field", "cut", "more"]))
    if kind == "noise":
        noise = draw(st.binary(max_size=2 * MAX_RECORD_BYTES))
        return lambda good: noise
    position, byte = draw(st.integers(0, 400)), draw(st.integers(0, 255))
    if kind == "byte":
        return lambda good: good[: position % len(good)] + bytes([byte]) + good[position % len(good) + 1 :]
    if kind == "cut":
        return lambda good: good[: position % len(good)]
    if kind == "more":
        tail = draw(st.binary(min_size=1, max_size=40))
        return lambda good: good + tail
    name = draw(st.sampled_from(["rank", "nbytes", "machine", "namespace", "pid", "fd", "device", "inode", "token"]))
    other = draw(
        st.one_of(
            st.integers(-5, 2**70).map(str),
            st.sampled_from(["", "self", "../../etc/passwd", "0x10", "007", "1 ", "²", "1\nfd=2", "A" * 32, "0" * 32]),
            st.text(max_size=40),
        )
    )
    return lambda good: re.sub(rf"\n{name}=.*", lambda _: f"\n{name}={other}", good.decode()).encode()


@given(tampering())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_other_record_is_refused(tamper):
    changed = []

    def apply(good):
        changed.append(tamper(good) != good)
        return tamper(good)

    try:
        create_with(apply).close()
    except MoelinkError:
        assert changed == [True]
    else:
        assert changed == [False]


@given(tampering())
@settings(max_examples=100, deadline=None)
def test_any_other_verdict_is_refused(tamper):
    with pytest.raises((ProtocolError, UnsupportedError)):
        create_with(lambda good: good, lambda ready: tamper(ready) if tamper(ready) != ready else b"")


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(
    "field, other, says",
    [
        ("machine", "0" * 36, "rank 1 is not on the machine of rank 0"),
        ("namespace", "12", "rank 1 runs in another container"),
        ("nbytes", "5001", "nbytes: expected the same value on every rank, got '5000 on rank 0; 5001 on rank 1'"),
        ("fd", "999999", r"memory of rank 1 \(process \d+\) cannot be opened: .* got No such file or directory"),
        ("inode", "1", r"memory of rank 1 is refused: expected inode 1, got \d+"),
        ("device", "1", r"memory of rank 1 is refused: expected device 1, got \d+"),
        ("token", "0" * 32, "memory of rank 1 is refused: expected the token of its record"),
        ("pid", "x", "record of rank 1 in memory setup is refused: expected field 'pid' to match .*, got 'pid=x'"),
        ("rank", "0", "record of rank 1 in memory setup is refused: expected rank 1, got 0"),
    ],
)
def test_what_a_refusal_says(field, other, says):
    with pytest.raises(MoelinkError, match=says):
        create_with(lambda good: re.sub(rb"\n%s=.*" % field.encode(), f"\n{field}={other}".encode(), good))


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda fd: os.fchmod(fd, 0o644), "expected mode 0o600, got 0o644"),
        (lambda fd: os.ftruncate(fd, 4096), "expected size 12288, got 4096"),
        (lambda fd: os.ftruncate(fd, 1 << 20), "expected size 12288, got 1048576"),
        (lambda fd: os.fchown(fd, 12345, -1), r"expected owner \d+, got 12345"),
    ],
    ids=["mode", "short", "long", "owner"],
)
def test_a_file_that_is_not_as_described_is_refused(spoil, says):
    def tamper(good):
        try:
            spoil(int(re.search(rb"fd=(\d+)", good).group(1)))
        except PermissionError:
            pytest.skip("only root gives files away")
        return good

    with pytest.raises(UnsupportedError, match=says):
        create_with(tamper)


def test_a_peers_failure_is_raised_with_its_words():
    failed = encode("posix", {"rank": "1", "error": "no luck today"})
    with pytest.raises(UnsupportedError, match="rank 1 could not set up its memory: no luck today"):
        create_with(lambda good: failed, lambda ready: failed)
    with pytest.raises(UnsupportedError, match="no luck today"):
        create_with(lambda good: good, lambda ready: failed)


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("answer", [None, [], [b"", b"", b""], (b"", b"")])
def test_an_exchange_of_the_wrong_shape_is_refused(answer):
    with pytest.raises(MoelinkError, match="expected a list of 2 records from the exchange, got "):
        PosixMemory.create(NBYTES, rank=0, world_size=2, exchange=lambda record: answer)


def test_records_round_trip_and_are_bounded():
    schema = {"rank": re.compile("[0-9]"), "word": re.compile("[a-z]+")}
    assert encode("posix", {"rank": "0"}) == b"moelink-memory 1 posix\nrank=0\n"
    assert decode(encode("a", {"rank": "3", "word": "abc"}), "a", schema) == {"rank": "3", "word": "abc"}
    with pytest.raises(ValueError, match="at most 1024"):
        decode(encode("a", {"rank": "3", "word": "a" * MAX_RECORD_BYTES}), "a", schema)


def test_a_full_file_system_is_refused_in_words(monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnsupportedError, match=r"expected \d+ free bytes in /dev/shm for a block, got \d+; enlarge it"):
        PosixMemory.create(NBYTES, **ALONE)
    assert len(os.listdir("/proc/self/fd")) == before


# -- one process -----------------------------------------------------------------------------------------------------


@interpreted
def test_one_process_holds_all_blocks():
    memories = create_all(["cpu"] * 3, NBYTES)
    assert [m.rank for m in memories] == [0, 1, 2]
    for memory in memories:
        assert (memory.world_size, memory.nbytes) == (3, NBYTES)
        assert not memory.local.any()
        assert memory.pointers.tolist() == [m.local.data_ptr() for m in memories]
    for rank, memory in enumerate(memories):
        add_everywhere[(1,)](memory.pointers, rank, 2, W=3)
    for memory in memories:
        assert memory.local[:4].view(torch.int32).item() == 12
        assert memories[0].peer(memory.rank)[64:67].tolist() == [1, 2, 3]
    memories[0].close()
    memories[0].close()
    assert memories[1].peer(0)[64] == 1, "another rank's view keeps the block"
    with pytest.raises(ClosedError):
        memories[0].peer(1)


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("devices, got", [([], "none"), (["cpu", "meta"], "cpu, meta"), (["meta"], "meta")])
def test_one_process_refuses_other_devices(devices, got):
    with pytest.raises(ArgumentError, match=f"devices: expected CPU devices only or CUDA devices only, got {got}"):
        create_all(devices, 16)


def test_one_process_refuses_sizes_below_one():
    with pytest.raises(ArgumentError, match="nbytes: expected at least 1, got 0"):
        create_all(["cpu"], 0)
