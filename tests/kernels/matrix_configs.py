"""The configurations of the GPU matrix: every format x layout x mode x reduction, at real sizes.

:data:`CONFIGS` is a covering assignment. Each legal form (format, layout, mode, ``pre_reduce``,
``fused_shared_expert``) is there once, and the values of :data:`AXES` are dealt out so that each meets every format and
every (layout, mode) that allows it, and each pair of sizes meets too. ``python -m tests.gpu.gpu_matrix --dry`` prints
the list and its counts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

import moelink
from moelink.arith import align_up
from tests.support.cases import FORMATS

SIZES = ("max_tokens_per_rank", "hidden_size", "topk", "num_experts")
AXES: dict[str, tuple[Any, ...]] = {
    "max_tokens_per_rank": (64, 128, 300, 512, 4096),
    "hidden_size": (7168, 6144, 2880, 3000),
    "topk": (1, 4, 6, 8, 10),
    "num_experts": (8, 30, 72, 128, 256),  # 30 over 4 or 8 ranks is uneven; 10 of 8 repeats ids
    "combine_dtype": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "input_dtype": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "weights": ("dispatch", "none", "combine"),
    "expert_alignment": (1, 16, 24),
    "id_dtype": (torch.int32, torch.int64),
}
MOST = 4096
"""So many tokens come as rarely as coverage allows."""


@dataclass(frozen=True)
class Form:
    """What decides which code runs, apart from sizes and dtypes."""

    dispatch_format: str
    layout: str
    mode: str
    pre_reduce: bool = True
    fused_shared_expert: bool = False

    @property
    def place(self) -> tuple[str, str]:
        """(layout, mode)."""
        return self.layout, self.mode


@dataclass(frozen=True)
class Config:
    """One configuration: a form, one value of each axis, and how its calls are made."""

    form: Form
    max_tokens_per_rank: int
    hidden_size: int
    topk: int
    num_experts: int
    combine_dtype: torch.dtype = torch.bfloat16
    input_dtype: torch.dtype = torch.bfloat16
    weights: str = "dispatch"
    expert_alignment: int = 1
    id_dtype: torch.dtype = torch.int32
    combine_format: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Keyword arguments of ``moelink.init``."""
        names = (*SIZES, "combine_dtype", "expert_alignment", "combine_format")
        fields = {**dataclasses.asdict(self.form), **{name: getattr(self, name) for name in names}}
        if self.form.layout == "masked":  # about the mean of 4 ranks; a skewed round drops rows, others may
            mean = 4 * self.max_tokens_per_rank * self.topk // self.num_experts
            fields["rows_per_expert"] = align_up(min(mean, MOST), 128)
        elif self.max_tokens_per_rank == MOST and self.form.place == ("expert", "alltoall"):
            fields["capacity"] = MOST * self.topk * 5 // 4  # a quarter above the mean; a skewed round drops rows
        return fields

    @property
    def name(self) -> str:
        """Everything, in short."""
        form = self.form
        words = [form.dispatch_format, form.layout, form.mode, "sums" if form.pre_reduce else "rows"]
        words += ["shared"] * form.fused_shared_expert
        words += [f"t{self.max_tokens_per_rank}", f"h{self.hidden_size}", f"k{self.topk}", f"e{self.num_experts}"]
        words += [f"a{self.expert_alignment}", f"weights:{self.weights}"]
        words += [f"home:{self.combine_format}"] * (self.combine_format is not None)
        dtypes = (self.input_dtype, self.combine_dtype, self.id_dtype)
        return "-".join(words + [str(dtype).removeprefix("torch.") for dtype in dtypes])

    def config(self, world_size: int, rank: int = 0) -> moelink.EPConfig:
        return moelink.EPConfig(**self.fields, world_size=world_size, rank=rank)


def forms() -> list[Form]:
    """Every legal form, those with the fewest choices first."""
    places = itertools.product(("rank", "expert", "masked"), ("alltoall", "allreduce"))
    reductions = ((True, False), (False, False), (True, True), (False, True))
    of_layout = {"rank": 1, "expert": 4, "masked": 2}
    by_choice = sorted(FORMATS, key=lambda fmt: len(legal("hidden_size", Form(fmt, "expert", "alltoall"))))
    return [
        Form(fmt, layout, mode, *reduction)
        for layout, mode in places
        for reduction in reductions[: of_layout[layout]]
        for fmt in by_choice
    ]


def legal(axis: str, form: Form) -> tuple[Any, ...]:
    """Values of ``axis`` that ``form`` allows. fp64 sums are left to formats that carry them."""
    values = AXES[axis]
    fmt = moelink.get_format(form.dispatch_format)
    if axis == "hidden_size":
        return tuple(value for value in values if value % fmt.group == 0)
    if axis == "input_dtype":
        return tuple(value for value in values if value in fmt.input_dtypes)
    if axis == "combine_dtype" and form.dispatch_format not in ("fp32", "fp64"):
        return tuple(value for value in values if value != torch.float64)
    if axis == "weights" and form.pre_reduce:
        return tuple(value for value in values if value != "combine")
    if axis == "expert_alignment" and form.layout != "expert":
        return (1,)
    return values


def covering() -> list[Config]:
    """One configuration per form. Each axis in turn takes the value that brings together most that has not met; then
    the one that has been taken least often where it was allowed."""
    met: Counter[Any] = Counter()
    allowed: Counter[Any] = Counter()
    configs = []
    for form in forms():
        partners = [
            ("format", form.dispatch_format, 100),
            ("place", form.place, 100),
            ("reduction", (form.pre_reduce, form.fused_shared_expert), 5),
        ]
        chosen: dict[str, Any] = {}
        for axis in AXES:
            allowed.update((axis, value) for value in legal(axis, form))

            def gain(value: Any, axis: str = axis, partners: list[Any] = partners) -> float:
                new = sum(weight for kind, other, weight in partners if not met[axis, value, kind, other])
                return new - 150 * (value == MOST and new < 100) - 5 * met[axis, value] / allowed[axis, value]

            value = chosen[axis] = max(legal(axis, form), key=gain)
            met[axis, value] += 1
            met.update((axis, value, kind, other) for kind, other, _ in partners)
            partners.append((axis, value, 60 if axis in SIZES else 1))
        configs.append(Config(form, **chosen))
    return sorted(configs, key=lambda config: FORMATS.index(config.form.dispatch_format))


CONFIGS = tuple(covering())
FP8 = "fp8_block128"
QUANTISED_HOME = (
    Config(Form(FP8, "expert", "alltoall"), 512, 7168, 8, 128, combine_format=FP8, weights="none"),
    Config(Form(FP8, "expert", "alltoall"), 4096, 7168, 8, 128, combine_format=FP8),
    Config(Form("bf16", "expert", "alltoall"), 64, 6144, 6, 30, torch.float32, combine_format="mxfp8"),
    Config(Form("mxfp8", "expert", "alltoall", False), 300, 2880, 4, 72, combine_format="mxfp8", weights="combine"),
    Config(Form(FP8, "expert", "alltoall", True, True), 128, 7168, 4, 30, combine_format=FP8, expert_alignment=16),
    Config(Form("bf16", "rank", "alltoall"), 300, 7168, 8, 72, torch.float16, combine_format=FP8),
    Config(Form("bf16", "masked", "alltoall", False), 128, 6144, 4, 8, combine_format="mxfp8"),
)
"""Forms whose rows travel home in a format, of each layout and reduction: beside :data:`CONFIGS`, in which none do."""


def value_of(config: Config, axis: str) -> Any:
    """The value of an axis, or "format", "place" or "reduction" of the form."""
    form = config.form
    kinds = {"format": form.dispatch_format, "place": form.place}
    kinds["reduction"] = (form.pre_reduce, form.fused_shared_expert)
    return kinds[axis] if axis in kinds else getattr(config, axis)


def meetings(axis: str, other: str) -> Counter[tuple[Any, Any]]:
    """How many configurations have each pair of values."""
    return Counter((value_of(config, axis), value_of(config, other)) for config in CONFIGS)


def describe() -> str:
    """The configurations, and how often each pair of values meets."""
    lines = [f"{len(CONFIGS)} configurations", *(f"  {config.name}" for config in CONFIGS)]
    kinds = ("format", "place", "reduction", *SIZES)
    for axis in AXES:
        for other in kinds[: kinds.index(axis)] if axis in SIZES else kinds[:3]:
            count = meetings(axis, other)
            columns = sorted({pair[1] for pair in count}, key=str)
            lines += ["", f"{axis} by {other}: " + " ".join(text_of(column) for column in columns)]
            lines += [
                f"  {text_of(value):>9} " + " ".join(f"{count[value, c]:>{len(text_of(c))}}" for c in columns)
                for value in AXES[axis]
            ]
    return "\n".join(lines)


def text_of(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).removeprefix("torch.")
