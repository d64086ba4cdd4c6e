"""Small kernels that talk by flags. They import nothing but Triton, so a process that compiles them starts soon."""

import triton
import triton.language as tl


@triton.jit
def wait(flag, value):
    """Poll until ``flag`` has reached ``value``."""
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < value:
        pass


@triton.jit
def send(data, flag, value, N: tl.constexpr):
    """Store ``value`` at N places, then tell: the protocol as it should be."""
    tl.store(data + tl.arange(0, N), value)
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit
def send_without_release(data, flag, value, N: tl.constexpr):
    tl.store(data + tl.arange(0, N), value)
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="relaxed", scope="sys")


@triton.jit
def send_without_barrier(data, flag, value, N: tl.constexpr):
    tl.store(data + tl.arange(0, N), value)
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit
def send_to_this_device(data, flag, value, N: tl.constexpr):
    tl.store(data + tl.arange(0, N), value)
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="gpu")


@triton.jit
def release_first(data, flag, value, N: tl.constexpr):
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")
    tl.store(data + tl.arange(0, N), value)


@triton.jit
def receive(data, flag, out, N: tl.constexpr):
    """Wait for the flag, and copy what it tells of."""
    wait(flag, 1)
    tl.store(out + tl.arange(0, N), tl.load(data + tl.arange(0, N)))


@triton.jit
def receive_without_atomics(data, flag, out, N: tl.constexpr):
    while tl.load(flag) == 0:
        pass
    tl.store(out + tl.arange(0, N), tl.load(data + tl.arange(0, N)))


@triton.jit
def take_lock(lock, free):
    while tl.atomic_xchg(lock, 1) == 1:
        pass
    tl.store(free, 1)


@triton.jit
def take_lock_by_cas(lock, free):
    while tl.atomic_cas(lock, 0, 1) != 0:
        pass
    tl.store(free, 1)


@triton.jit
def look_by_cas(flag):
    while tl.atomic_cas(flag, 0, 0) == 0:
        pass


@triton.jit
def wait_for_the_next(flags, order, n, count):
    """Program i waits for program i + 1 of the same launch, and then notes that it comes after it."""
    i = tl.program_id(0)
    if i + 1 < n:
        wait(flags + i + 1, 1)
    tl.store(order + i, tl.atomic_add(count, 1))
    tl.atomic_xchg(flags + i, 1, sem="release")


@triton.jit
def note_places(out, counts):
    """Where each program of a grid of three dimensions is."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + place, 100 * x + 10 * y + z)
    tl.atomic_add(counts, 1)


@triton.jit
def store_and_add(word, out):
    """A program sees its own store at once, whoever else does."""
    tl.store(word, 5)
    tl.store(out, tl.load(word))
    tl.atomic_add(word, 1)
    tl.store(out + 1, tl.load(word, volatile=True))


@triton.jit
def store_two(pair, other):
    """Store two words, one after the other, and go on for a while."""
    tl.store(pair, 1)
    tl.store(pair + 1, 1)
    for _ in range(10):
        tl.atomic_add(other, 1, sem="relaxed")  # by default it would release, and so drain


@triton.jit
def look(pair, out):
    """Note which of two words has come before the other: the first (1) or the second (2)."""
    for _ in range(10):
        i = tl.arange(0, 2)
        came = tl.sum(tl.load(pair + i, volatile=True) * (1 + i))
        if (came == 1) | (came == 2):
            tl.store(out, came)


@triton.jit
def send_twice(box, number, taken, checks: tl.constexpr):
    """Send 1 and then 2 through one box. With ``checks`` the second waits until the first has been taken."""
    tl.store(box, 1)
    tl.atomic_xchg(number, 1, sem="release")
    if checks:
        wait(taken, 1)
    tl.store(box, 2)
    tl.atomic_xchg(number, 2, sem="release")


@triton.jit
def take_twice(box, number, taken, out):
    wait(number, 1)
    tl.store(out, tl.load(box))
    tl.atomic_xchg(taken, 1, sem="release")
    wait(number, 2)
    tl.store(out + 1, tl.load(box))


@triton.jit
def out_of_bounds(x):
    tl.store(x + tl.arange(0, 3), 0)
