"""Runs the sources of the grouped fp8 products in Gluon, and what their tests have in common."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from moelink.kernels.launch.tile_counters import WORDS
from moelink.rows import grouped_gluon, grouped_gluon_few, grouped_gluon_mxfp4
from tests.kernels.test_kernels_aot import SPILLED, output_of
from tests.rows.gluon_model import Descriptor, Language, Pointer, rebuilt, run_in_turn
from tests.rows.grouped_fp8_cases import FP32_SUMS, POISON, Problem, error_over_bound


@dataclass(frozen=True)
class Source:
    """A kernel: its module and name there, its launch constants for weights of a shape, and the rows of the boxes in
    which it loads rows and weights."""

    module: ModuleType
    name: str
    constants_of: Callable[..., Any]
    boxes: tuple[int, int]

    def constants(self, weight: Any, early: bool) -> SimpleNamespace:
        """Launch constants as numbers."""
        given = self.constants_of(weight.shape, early=early)
        values = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
        return SimpleNamespace(**{name: getattr(value, "value", value) for name, value in values.items()})

    def weights(self, weight: Any, _constants: SimpleNamespace, early: bool) -> tuple[Any, ...]:
        """Return the kernel's arguments for ``weight``."""
        flat = weight.codes.view(-1, weight.codes.shape[2])
        return Descriptor(flat, (self.boxes[1], 128), early=early), Pointer(weight.scales)

    def run(
        self, given: Problem, out: torch.Tensor, *, programs: int = 2, seed: int = 0, early: bool = False,
        language: Language | None = None, seen: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        """Do what the kernel's source does with ``given``, in all CTAs in turn, or in the one of ``language``.
        ``seen``: the offsets that each CTA finds, in place of those of ``given``."""
        S, counter = self.constants(given.weight, early), torch.zeros(WORDS, dtype=torch.int32)
        ctas = [language] if language else [Language(each, programs, seed + each) for each in range(programs)]

        def run(cta: Language, offsets: torch.Tensor) -> None:
            rebuilt(self.module, self.name, cta)(
                Descriptor(given.codes, (self.boxes[0], 128)), Pointer(given.scales),
                Pointer(offsets, early=early), *self.weights(given.weight, S, early), Pointer(out),
                len(given.codes), Pointer(counter), S,
            )  # fmt: skip

        found = seen or [given.offsets] * len(ctas)
        run_in_turn([partial(run, *each) for each in zip(ctas, found, strict=True)], seed)
        assert all(cta.followed for cta in ctas), "the next launch takes this one's end for the end of those before it"
        assert not counter.any(), "the next launch begins at zero"

    def product(self, given: Problem, dtype: torch.dtype = torch.float32, **how: Any) -> torch.Tensor:
        """Return the output that the kernel's source computes for ``given``."""
        out = torch.full((given.codes.shape[0], given.weight.shape[1]), POISON, dtype=dtype)
        self.run(given, out, **how)
        return out

    def products(self, given: Problem) -> Iterator[torch.Tensor]:
        """Outputs for ``given`` under some schedules, of one, two and three CTAs, early or not."""
        for seed in range(4):
            out = self.product(given, programs=1 + seed % 3, seed=10 * seed, early=seed in (1, 2))
            assert (out[given.rows :] == POISON).all(), "rows that do not exist are not written"
            yield out

    def assert_schedules_keep_the_bound(self, given: Problem) -> None:
        """Whether all these outputs are right."""
        assert all(error_over_bound(out, given, FP32_SUMS) <= 1 for out in self.products(given))


MANY = Source(grouped_gluon, "grouped_gluon_kernel", grouped_gluon.constants_of, (64, 128))
FEW = {
    rows: Source(
        grouped_gluon_few, "grouped_gluon_few_kernel", partial(grouped_gluon_few.constants_of, tile_rows=rows), (16, 64)
    )
    for rows in (64, 32, 16)
}
"""By the rows of a tile."""


class Mxfp4Source(Source):
    """The kernel for weights in mxfp4."""

    def constants(self, weight: Any, early: bool) -> SimpleNamespace:
        of = partial(self.constants_of, biased=weight.has_bias)
        return Source(self.module, self.name, of, self.boxes).constants(weight, early)

    def weights(self, weight: Any, constants: SimpleNamespace, early: bool) -> tuple[Any, ...]:
        S, words = constants, weight.scales.view(-1, weight.scales.shape[-1])
        columns = S.PARTS * S.BLOCK_COLUMNS
        return (
            Descriptor(weight.codes.view(-1, 128), (columns // 4, 128), early=early),
            Descriptor(words, (1, columns), early=early), Pointer(weight.scales),
        )  # fmt: skip


MXFP4 = {
    rows: Mxfp4Source(
        grouped_gluon_mxfp4, "grouped_gluon_mxfp4_kernel",
        partial(grouped_gluon_mxfp4.constants_of, tile_rows=rows), (16, 0),
    )
    for rows in (64, 32, 16)
}  # fmt: skip
"""By the rows of a tile."""


class Recorder(Language):
    """Notes what is waited for, of which array of barriers, in the order in which the kernel makes them. ``numbers``:
    those that the CTA finds in the words of the counter, as other CTAs would have left them."""

    def __init__(self, *given: int, numbers: Sequence[int] = ()) -> None:
        super().__init__(*given)
        self.numbers = list(numbers)
        self.arrays: list[Any] = []
        self.waits: list[tuple[int, int, int]] = []

    def allocate_shared_memory(self, *given: Any) -> Any:
        made = super().allocate_shared_memory(*given)
        if given[2] == "barriers":
            self.arrays.append(made.each)
        return made

    def wait(self, barrier: Any, phase: Any) -> None:
        place = [(a, s) for a, array in enumerate(self.arrays) for s, each in enumerate(array) if each is barrier]
        self.waits.append((*place[0], int(phase)))
        super().wait(barrier, phase)

    def atomic_add(self, pointer: Pointer, value: int, *, sem: str) -> int:
        if self.numbers:
            pointer.data[pointer.at] = self.numbers.pop(0)
        return super().atomic_add(pointer, value, sem=sem)

    def waits_for_empty_stages(self) -> list[tuple[int, int]]:
        """(stage, parity) of each wait of the producer."""
        return [(stage, phase) for array, stage, phase in self.waits if array == 1]


def assert_forms_are_compiled(
    kernel: str, forms: Sequence[tuple[int, int]], *, wgmma: int, waits: int
) -> list[dict[str, Any]]:
    """Whether ``grouped_gluon_aot`` makes of each form of a kernel what the kernel rests on. ``forms``: copies of the
    code for a block, each with ``wgmma`` instructions and ``waits`` of each consumer, and most bytes of local memory.
    Returns what it found."""
    found = [json.loads(line) for line in output_of("rows.grouped_gluon_aot", kernel)]
    for each, (copied, stack) in zip(found, forms, strict=True):
        blocks = copied * each["consumers"]
        empty = each["consumers"] if kernel == "many" and copied % 2 else 0  # blocks that are given back unread
        assert each["local"] <= stack + SPILLED, f"{each} spills"
        assert each["shared"] <= 227 << 10, f"{each} overflows an SM"
        assert each["prepared"], f"{each}: expected a launch without Triton's launcher"
        assert (each["wgmma"], each["waits"]) == (wgmma * blocks, waits * blocks), each
        assert not each["narrow_stores"], f"{each}: expected stores of 16 bytes"
        assert each["stays_in_cache"] == (kernel != "many" and "second" in each["form"]), each
        unread = each["consumers"] * 2 if kernel == "many" else 0  # in a loop, which may be unrolled
        met = not each["alone"] and each["given_back"] >= blocks + empty + unread
        assert met, f"{each}: expected all warps of a consumer to meet before a stage is given back"
        assert set(each["wanted_registers"]) <= set(each["registers"]), each
    return found
