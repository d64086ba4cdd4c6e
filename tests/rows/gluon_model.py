"""Runs the CTAs of a warp-specialised Gluon kernel on the CPU, from its own source, under seeded schedules.

Triton's interpreter does not know Gluon. But a kernel's functions are Python: here they run with :class:`Language` in
place of the modules that they import, each partition of warps as a greenlet, with torch tensors for blocks. Mbarriers
count arrivals and bytes, and end their phases as the hardware's do. A copy, by TMA or by threads, spoils its
destination at once and delivers at a random later moment; shared memory is spoiled until something is delivered. A
product on the tensor cores reads its operands when it is issued and when it is waited for; between, they must not
change.

So a stage that is loaded too early, read too early or given back too early shows as a wrong number, as
:class:`Overwritten`, or as :class:`Deadlock`. Global memory that is used before the launch before has ended fails an
assertion. Warps within a partition are one. CTAs run in turn, and share global memory alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from greenlet import getcurrent, greenlet

SPOILED = {torch.float32: float("nan"), torch.int32: 1 << 30, torch.int16: -1}
"""Numbers that memory holds until others are delivered. Bytes are int16 here, so that one more value exists."""
TOO_EARLY = "memory is read or written before the launch before this one has ended"


class Deadlock(AssertionError):
    """No partition can go on, and no copy is under way."""


class Overwritten(AssertionError):
    """Memory changed under a product that reads it."""


class Pointer:
    """A place in a flat tensor, or a block of places. Memory that is ``early`` may be read before the launch before
    this one has ended."""

    def __init__(self, data: torch.Tensor, at: Any = 0, *, early: bool = False) -> None:
        self.data, self.at, self.early = data, at, early
        self.dtype = SimpleNamespace(element_ty=data.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.data, self.at + more, early=self.early)


class Descriptor:
    """A matrix of codes, bytes or words that is copied by boxes, zeros behind its end."""

    layout = None

    def __init__(self, data: torch.Tensor, box: tuple[int, int], *, early: bool = False) -> None:
        kept = {torch.uint8: torch.int16, torch.int32: torch.int32}.get(data.dtype, torch.float32)
        self.data, self.box, self.early = data.to(kept), box, early

    def read(self, row: int, column: int) -> torch.Tensor:
        block = torch.zeros(self.box, dtype=self.data.dtype)
        found = self.data[row : row + self.box[0], column : column + self.box[1]]
        block[: found.shape[0], : found.shape[1]] = found
        return block


class Shared:
    """Shared memory: ``index`` and ``slice`` give a part of it."""

    def __init__(self, data: torch.Tensor, transposed: bool = False) -> None:
        self.data, self.transposed = data, transposed

    def index(self, number: Any) -> Shared:
        return Shared(self.data[int(number)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def see_as(self, dtype: torch.dtype, shape: list[int], _layout: Any) -> Shared:
        assert dtype == self.data.dtype
        return Shared(self.data.view(shape))

    def permute(self, _order: Any) -> Shared:
        return Shared(self.data, not self.transposed)

    def load(self, _layout: Any) -> torch.Tensor:
        return self.data.clone()

    def store(self, values: torch.Tensor) -> None:
        self.data.copy_(values)

    def read(self) -> torch.Tensor:
        return (self.data.t() if self.transposed else self.data).clone()


class Barriers:
    """An array of mbarriers."""

    def __init__(self, count: int) -> None:
        self.each = [SimpleNamespace(count=0, left=0, bytes=0, phase=0) for _ in range(count)]

    def index(self, number: Any) -> Any:
        return self.each[int(number)]


@dataclass(eq=False)
class Copy:
    """A copy that is under way: it tells ``barrier`` of its bytes, or, without one, is that of threads of ``part``."""

    to: torch.Tensor
    data: torch.Tensor
    barrier: Any = None
    part: Any = None


class Product:
    """A product that is under way. Its left operand may be in registers."""

    def __init__(self, left: Shared | torch.Tensor, right: Shared, plus: torch.Tensor) -> None:
        self.operands = Shared(left) if isinstance(left, torch.Tensor) else left, right
        self.plus, self.seen = plus, [operand.read() for operand in self.operands]

    def wait(self) -> torch.Tensor:
        for operand, seen in zip(self.operands, self.seen, strict=True):
            if not torch.equal(operand.read().nan_to_num(7e7), seen.nan_to_num(7e7)):
                raise Overwritten("an operand changed under a product")
        return self.seen[0] @ self.seen[1] + self.plus


class Language:
    """The names that a Gluon kernel uses (``gl``, ``mbarrier``, ``load_block``), for one CTA and one schedule."""

    uint8, int32, int64 = torch.int16, torch.int32, torch.int64
    float32 = float8e4nv = torch.float32
    minimum = staticmethod(lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)))
    maximum = staticmethod(lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)))
    where = staticmethod(lambda c, a, b: torch.where(torch.as_tensor(c), torch.as_tensor(a), torch.as_tensor(b)))
    arange = staticmethod(lambda start, end, _layout=None: torch.arange(start, end))
    zeros = staticmethod(lambda shape, dtype, _layout=None: torch.zeros(shape, dtype=dtype))
    sum = staticmethod(lambda x, axis: x.sum(axis))
    max = staticmethod(lambda x, axis: x.amax(axis))
    cdiv = staticmethod(lambda a, b: (a + b - 1) // b)
    fma = staticmethod(lambda a, b, c: a * b + c)
    expand_dims = staticmethod(lambda x, axis: x.unsqueeze(axis))
    convert_layout = staticmethod(lambda x, _layout: x)
    to_tensor = staticmethod(torch.as_tensor)
    associative_scan = staticmethod(lambda x, axis, _add: x.cumsum(axis))
    static_range = range

    def __init__(self, program: int, programs: int, seed: int) -> None:
        self.program, self.programs, self.random, self.seed = program, programs, random.Random(seed), seed
        self.copies: list[Copy] = []
        self.arrivals: list[tuple[Any, list[Copy]]] = []
        self.followed = False
        self.mbarrier = self
        self.async_copy = SimpleNamespace(mbarrier_arrive=self.arrive_behind_copies)
        for name in (
            "BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "SwizzledSharedLayout",
        ):  # fmt: skip
            setattr(self, name, lambda *_: None)
        self.MBarrierLayout = lambda: "barriers"

    def names(self) -> dict[str, Any]:
        """Return the values that replace the globals of a kernel's module."""
        return {
            "gl": self, "tl": self, "async_copy": self.async_copy, "mbarrier": self,
            "load_block": self.copy_box, "load_items": self.copy_places, "see_as": Shared.see_as,
            "as_float": lambda bits: bits.contiguous().view(torch.float32),
            "fence_async_shared": lambda: None, "follow_previous_launch": self.follow_previous_launch,
            "wait_for_previous_launch": self.follow_previous_launch,
            "warpgroup_mma": self.warpgroup_mma, "warpgroup_mma_wait": self.warpgroup_mma_wait,
        }  # fmt: skip

    # --- programs and memory ------------------------------------------------------------------------------------------

    def program_id(self, _axis: int) -> int:
        return self.program

    def num_programs(self, _axis: int) -> int:
        return self.programs

    def follow_previous_launch(self, _constants: Any) -> None:
        self.followed = True

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> torch.Tensor:
        assert self.followed or pointer.early, TOO_EARLY
        at, mask = torch.as_tensor(pointer.at), torch.as_tensor(mask)
        here = at.where(mask, 0)
        assert ((here >= 0) & (here < pointer.data.numel())).all(), "a load outside of its tensor"
        return torch.where(mask, pointer.data.flatten()[here], torch.as_tensor(other, dtype=pointer.data.dtype))

    def store(self, pointer: Pointer, values: Any, mask: Any = True, *, eviction_policy: str = "") -> None:
        del eviction_policy  # of the speed alone
        assert self.followed, TOO_EARLY
        values, at = torch.as_tensor(values), torch.as_tensor(pointer.at)
        mask = torch.as_tensor(mask).broadcast_to(values.shape)
        pointer.data.view(-1)[at.broadcast_to(values.shape)[mask]] = values[mask].to(pointer.data.dtype)

    def atomic_add(self, pointer: Pointer, value: int, *, sem: str) -> int:
        assert sem == "relaxed"
        self.switch()
        assert self.followed, TOO_EARLY
        found = int(pointer.data[pointer.at])
        pointer.data[pointer.at] += value
        return found

    def atomic_xchg(self, pointer: Pointer, value: int, *, sem: str) -> int:
        assert sem == "relaxed"
        self.switch()
        assert self.followed, TOO_EARLY
        found = int(pointer.data[pointer.at])
        pointer.data[pointer.at] = value
        return found

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            return Barriers(shape[0])
        return Shared(torch.full(shape, SPOILED[dtype], dtype=dtype))

    def inline_asm_elementwise(
        self, text: str, _constraints: str, given: list[torch.Tensor], *, dtype: Any, is_pure: bool, pack: int
    ) -> list[torch.Tensor]:
        """Do instructions on words of four bytes, as the last dimension has them. Their results are e4m3."""
        assert is_pure
        assert pack == 4
        [given] = given
        words = {f"${len(dtype)}": given.clamp(min=0).to(torch.uint8).view(torch.int32).long() & 0xFFFFFFFF}
        for operation, to, *terms in re.findall(r"(\w+)\.[bu]32 (\S+), (\S+), (\w+)(?:, (\w+), 0x(\w+))?;", text):
            a, b, c = (words[term] if term in words else int(term or "0", 0) for term in terms[:3])
            assert operation != "lop3" or int(terms[3], 16) == 0xF0 & 0xCC | 0xAA, "expected the table of a & b | c"
            words[to] = (a << b) & 0xFFFFFFFF if operation == "shl" else a >> b if operation == "shr" else a & b | c
        codes = (words[f"${place}"].to(torch.uint32).view(torch.float8_e4m3fn).float() for place in range(len(dtype)))
        return [code.where(given >= 0, SPOILED[torch.float32]) for code in codes]

    # --- barriers, copies, products -----------------------------------------------------------------------------------

    def init(self, barrier: Any, count: int) -> None:
        barrier.count = barrier.left = count

    def _settle(self, barrier: Any) -> None:
        assert barrier.left >= 0, "more arrivals than a barrier expects"
        if not barrier.left and not barrier.bytes:
            barrier.phase, barrier.left = barrier.phase + 1, barrier.count

    def wait(self, barrier: Any, phase: Any) -> None:
        self.switch(lambda: barrier.phase % 2 != int(phase))

    def expect(self, barrier: Any, size: int, pred: Any = True) -> None:
        self.switch()
        if not pred:
            return
        barrier.bytes += size
        barrier.left -= 1
        self._settle(barrier)

    def arrive(self, barrier: Any, *, count: int = 1) -> None:
        self.switch()
        barrier.left -= count
        self._settle(barrier)
        self.switch()

    def copy_box(self, source: Descriptor, at: list[Any], barrier: Any, to: Shared, pred: Any = True) -> None:
        """Copy a box by TMA."""
        self.switch()
        assert self.followed or source.early, TOO_EARLY
        if pred:
            self._copy(Copy(to.data, source.read(*map(int, at)), barrier))

    def copy_places(self, to: Shared, pointer: Pointer) -> None:
        """Copy a block of places, each of them by a thread of this partition."""
        self.switch()
        self._copy(Copy(to.data, self.load(pointer), part=getcurrent()))

    def _copy(self, copy: Copy) -> None:
        assert copy.to.shape == copy.data.shape
        copy.to.fill_(SPOILED[copy.to.dtype])
        self.copies.append(copy)

    def arrive_behind_copies(self, barrier: Any, *, increment_count: bool) -> None:
        """An arrival of each of 32 threads, once what this partition's threads have copied so far is delivered."""
        assert not increment_count
        self.switch()
        here = getcurrent()
        self.arrivals.append((barrier, [copy for copy in self.copies if copy.part is here]))
        self._arrive_behind_copies()

    def _arrive_behind_copies(self) -> None:
        waiting = []
        for barrier, copies in self.arrivals:
            if any(copy in self.copies for copy in copies):
                waiting.append((barrier, copies))
            else:
                barrier.left -= 32
                self._settle(barrier)
        self.arrivals = waiting

    def _deliver(self, copy: Copy) -> None:
        self.copies.remove(copy)
        copy.to.copy_(copy.data)
        if copy.barrier is not None:
            copy.barrier.bytes -= copy.data.numel() * (4 if copy.data.dtype == torch.int32 else 1)
            self._settle(copy.barrier)
        self._arrive_behind_copies()

    def warpgroup_mma(self, left: Any, right: Shared, plus: Any, *, use_acc: bool, is_async: bool) -> Product:
        assert is_async
        assert isinstance(plus, torch.Tensor), "expected registers that were waited for"
        self.switch()
        return Product(left, right, plus if use_acc else torch.zeros_like(plus))

    def warpgroup_mma_wait(self, pending: int, deps: Any) -> Any:
        assert pending == 0
        self.switch()
        results = tuple(each.wait() if isinstance(each, Product) else each for each in deps)
        return results if len(results) > 1 else results[0]

    # --- schedule -----------------------------------------------------------------------------------------------------

    def switch(self, until: Any = None) -> None:
        """Let others go on, and come back once ``until()`` holds."""
        here = getcurrent()
        if here.parent is not None:
            here.until = until  # type: ignore[attr-defined]
            here.parent.switch()

    def warp_specialize(self, parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[Any]) -> None:
        """Run ``parts`` in turn. Number ``seed % (parts + 1)`` is slow: so buffers between them are full or empty."""
        assert len(parts) - 1 == len(warps) == len(registers)
        running = []
        for number, (function, arguments) in enumerate(parts):
            part = greenlet(lambda function=function, arguments=arguments: function(*arguments))
            part.until, part.pace = None, 1 if number == self.seed % (len(parts) + 1) else 30  # type: ignore[attr-defined]
            running.append(part)
        while running or self.copies:
            if self.random.random() < 0.1:
                self.switch()  # to another CTA
            able = [part for part in running if part.until is None or part.until()]
            if not able and not self.copies:
                raise Deadlock(f"{len(running)} of {len(parts)} partitions wait for ever")
            # If a slow partition alone can go on, all copies are delivered first, so that others may get ahead of it.
            if self.copies and (all(part.pace == 1 for part in able) or self.random.random() < 0.3):
                self._deliver(self.random.choice(self.copies))
                continue
            [part] = self.random.choices(able, [part.pace for part in able])
            part.switch()
            running = [part for part in running if not part.dead]


def run_in_turn(ctas: Sequence[Any], seed: int) -> None:
    """Run functions, each a CTA, in random turns."""
    draw, running = random.Random(seed), [greenlet(cta) for cta in ctas]
    while running:
        draw.choice(running).switch()
        running = [cta for cta in running if not cta.dead]


def rebuilt(module: Any, name: str, language: Language) -> Any:
    """Function ``name`` of ``module``, and the kernel functions it calls, with ``language`` in place of imports."""
    scopes: dict[int, dict[str, Any]] = {}

    def scope_of(names: dict[str, Any]) -> dict[str, Any]:
        if id(names) in scopes:
            return scopes[id(names)]
        scope = scopes[id(names)] = dict(names)
        for key, value in names.items():
            if hasattr(value, "fn") and isinstance(value.fn, FunctionType):
                own = scope_of(value.fn.__globals__)
                scope[key] = FunctionType(value.fn.__code__, own, key, value.fn.__defaults__)
            elif key.startswith("_") and type(value).__name__ == "constexpr":
                scope[key] = value.value
        scope |= language.names()
        return scope

    return scope_of(vars(module))[name]
