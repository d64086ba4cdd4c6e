"""Cases of dispatch and combine that every transport must get right, and the check against the oracle.

A case is data only; what a rank sends is a function of (case, rank), so the parent process recomputes it, runs the
oracle over all ranks and compares what the ranks returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import moelink
from moelink import reference
from moelink.testing import RankData, assert_bitwise_equal, rank_data

FORMATS = ("bf16", "fp8_block128", "mxfp8", "nvfp4", "mxfp4", "fp32", "fp64", "fp8_block128_e8m0", "fp8_token")
SCALE_LAYOUTS = ("bf16", "fp8_block128", "nvfp4", "mxfp4")
"""A format without scales, and one for each layout of scales: transposed, tiles, rows. What a transport does with rows
and scales depends on the layout; ``test_formats*.py`` prove the arithmetic of each format."""
SCENARIOS = ("uniform", "skewed", "one_expert", "one_rank_empty", "all_empty", "holes", "repeats")
# Multiples of each format's group that are not powers of two.
HIDDEN = {
    "bf16": 40, "fp8_block128": 384, "mxfp8": 96, "nvfp4": 48, "mxfp4": 96, "fp32": 24, "fp64": 20,
    "fp8_block128_e8m0": 640, "fp8_token": 48,
}  # fmt: skip
MAX_TOKENS = 7


@dataclass(frozen=True)
class Setup:
    """One configuration, as keyword arguments of ``moelink.init``."""

    dispatch_format: str
    options: tuple[tuple[str, Any], ...] = ()
    num_experts: int = 7
    topk: int = 3

    @property
    def fields(self) -> dict[str, Any]:
        fp64 = self.dispatch_format == "fp64"
        return {
            "num_experts": self.num_experts,
            "topk": self.topk,
            "hidden_size": HIDDEN[self.dispatch_format],
            "max_tokens_per_rank": MAX_TOKENS,
            "dispatch_format": self.dispatch_format,
            "combine_dtype": torch.float64 if fp64 else torch.bfloat16,
            **dict(self.options),
        }

    def config(self, world_size: int, rank: int = 0) -> moelink.EPConfig:
        return moelink.EPConfig(**self.fields, world_size=world_size, rank=rank)


@dataclass(frozen=True)
class Case:
    """One dispatch and combine on a setup.

    Attributes:
        weights: "dispatch", "combine", "none", or "left": they travel, and combine does not weigh.
        small: at most 3 tokens a rank, for interpreted kernels.
        input_dtype: of the rows that go in; None: one that carries them as they are.
        variant: of rows and router weights. Cases that differ in nothing else have the same ids.
        max_tokens: the bound on the tokens of every rank that each rank states, or nothing.
        exact: the output has as many rows as came (``host_counts``).
    """

    setup: Setup
    scenario: str
    weights: str = "dispatch"
    reduce: bool = True
    shared: bool = False
    seed: int = 0
    small: bool = False
    input_dtype: torch.dtype | None = None
    id_dtype: torch.dtype = torch.int32
    variant: int = 0
    max_tokens: tuple[int, ...] = ()
    exact: bool = False

    @property
    def id(self) -> str:
        options = "-".join(f"{k}={v}" for k, v in self.setup.options)
        tail = f"w:{self.weights}-r:{self.reduce}" + ("-shared" if self.shared else "")
        return f"{self.setup.dispatch_format}-{options or 'plain'}-{self.scenario}-{tail}"

    def data(self, rank: int) -> RankData:
        """What ``rank`` passes to dispatch."""
        f = self.setup.fields
        scenario = self.scenario
        usual, at_most = (1 + rank % 3, 2) if self.small else (3 + rank % 5, 5)
        num_tokens = {"all_empty": 0, "one_rank_empty": 0 if rank == 0 else at_most}.get(scenario, usual)
        source = 0 if f.get("mode") == "allreduce" else rank
        data = rank_data(
            seed=self.seed + 17,
            rank=source,
            num_tokens=num_tokens if source == rank else (3 if num_tokens else 0),
            hidden_size=f["hidden_size"],
            num_experts=self.setup.num_experts,
            topk=self.setup.topk,
            skew=2.0 if scenario == "skewed" else 0.0,
            holes=0.4 if scenario == "holes" else 0.0,
            repeats=scenario == "repeats",
            dtype=torch.float64 if f["dispatch_format"] == "fp64" else torch.bfloat16,
        )
        if f.get("mode") == "allreduce" and source != rank:
            return self.data(0)
        ids, x = data.topk_ids, data.x * (1 + self.variant)
        if scenario == "one_expert":
            ids = torch.full_like(ids, min(2, self.setup.num_experts - 1))
        if self.input_dtype is not None:  # values that bf16 does not have, where they can be
            x = (x if self.input_dtype == torch.bfloat16 else x.double() * 1.1).to(self.input_dtype)
        weights = data.topk_weights.to(self.weight_dtype) / (1 + self.variant)
        return RankData(x, ids.to(self.id_dtype), weights)

    @property
    def travel(self) -> bool:
        """Whether router weights go into dispatch."""
        return self.weights in ("dispatch", "left")

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.float64 if self.setup.fields["combine_dtype"] == torch.float64 else torch.float32

    def expert_rows(self, rank: int, *rows: int) -> torch.Tensor:
        """What the experts of ``rank`` return for ``rows`` rows, or groups of rows."""
        generator = torch.Generator().manual_seed(1000 + self.seed * 100 + rank)
        f = self.setup.fields
        return torch.randn(*rows, f["hidden_size"], generator=generator).to(f["combine_dtype"])

    def shared_rows(self, rank: int) -> torch.Tensor | None:
        if not self.shared:
            return None
        return self.expert_rows(rank + 50, len(self.data(rank).x))


@dataclass(frozen=True)
class Packed:
    """A tensor on its way between processes (pickle knows no 8-bit float storages)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> Packed | None:
        if tensor is None:
            return None
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return cls(tensor.dtype, tuple(tensor.shape), raw.numpy().tobytes())

    def tensor(self) -> torch.Tensor:
        return (
            torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(self.dtype).view(self.shape)
            if self.data
            else torch.empty(self.shape, dtype=self.dtype)
        )


def unpack(packed: Packed | None) -> torch.Tensor | None:
    return None if packed is None else packed.tensor()


FIELDS = (
    "tokens",
    "scales",
    "row_offsets",
    "expert_ids",
    "src_info",
    "scales_offsets",
    "weights",
    "num_recv_tokens",
    "overflow",
    "topk_ids",
    "topk_weights",
)


PER_EXPERT = "num_recv_per_expert"
"""What an output of a communicator has besides; the contract's launchers return no such tensor."""


@dataclass(frozen=True)
class Result:
    """What one rank got. ``combined`` is None where it did not combine."""

    fields: dict[str, Packed | None]
    combined: Packed | None

    @classmethod
    def of(cls, recv: moelink.DispatchOutput, out: torch.Tensor) -> Result:
        """Of what dispatch and combine returned."""
        return dataclasses.replace(cls.received(recv), combined=Packed.of(out))

    @classmethod
    def received(cls, recv: moelink.DispatchOutput) -> Result:
        """Of what dispatch returned, as it is now."""
        return cls({name: Packed.of(getattr(recv, name)) for name in (*FIELDS, PER_EXPERT)}, None)

    @classmethod
    def around(cls, recv: moelink.DispatchOutput, combine: Callable[[], torch.Tensor]) -> Result:
        """Of what dispatch returned and ``combine`` returns. Rows are read after it, unless they end with it."""
        if recv.rows_in_place is None:
            return cls.of(recv, combine())
        return dataclasses.replace(cls.received(recv), combined=Packed.of(combine()))


def run_case(ep: moelink.Communicator, case: Case, rank: int) -> Result:
    """One dispatch and one combine of ``case`` on this rank."""
    data = case.data(rank)
    x, ids, weights = (t.to(ep.device) for t in (data.x, data.topk_ids, data.topk_weights))
    recv = ep.dispatch(x, ids, weights if case.travel else None)
    shared = case.shared_rows(rank)
    y = case.expert_rows(rank, *recv.tokens.shape[:-1]).to(ep.device)

    def combine() -> torch.Tensor:
        return ep.combine(
            y,
            recv,
            weights if case.weights == "combine" else None,
            reduce=case.reduce,
            shared=None if shared is None else shared.to(ep.device),
            weigh=case.weights != "left",
        )

    return Result.around(recv, combine)


def run_cases(rank: int, world_size: int, cases: Sequence[Case], options: dict[str, Any] | None = None) -> list[Result]:
    """Entry point of a rank: every case, one communicator per setup."""
    results = []
    for setup, group in by_setup(cases):
        with moelink.init(**setup.fields, timeout=60, **(options or {})) as ep:
            results += [run_case(ep, case, rank) for case in group]
    return results


def by_setup(cases: Sequence[Case]) -> Iterator[tuple[Setup, list[Case]]]:
    """Runs of consecutive cases with the same setup."""
    group: list[Case] = []
    for case in cases:
        if group and case.setup != group[0].setup:
            yield group[0].setup, group
            group = []
        group.append(case)
    if group:
        yield group[0].setup, group


def check_case(case: Case, world_size: int, results: Sequence[Result]) -> None:
    """Compare what every rank returned with the oracle, bit for bit."""
    config = case.setup.config(world_size)
    data = [case.data(rank) for rank in range(world_size)]
    ids = [d.topk_ids for d in data]
    weights = [d.topk_weights for d in data]
    rows = reference.reference_dispatch(
        config, [d.x for d in data], ids, weights if case.travel else None, max_tokens=case.max_tokens or None
    )
    if case.exact:
        rows = [exact_rows(case.setup.config(world_size, rank), expected) for rank, expected in enumerate(rows)]
    for rank, (expected, result) in enumerate(zip(rows, results, strict=True)):
        check_rows(f"{case.id} rank {rank}", expected, {name: unpack(value) for name, value in result.fields.items()})
    shared = [case.shared_rows(rank) for rank in range(world_size)] if case.shared else None
    ys = [case.expert_rows(rank, *rows[rank].tokens.shape[:-1]) for rank in range(world_size)]
    outs = reference.reference_combine(
        config, ys, rows, ids, weights if case.weights == "combine" else None, reduce=case.reduce, shared=shared,
        weigh=case.weights != "left",
    )  # fmt: skip
    for rank, (expected, result) in enumerate(zip(outs, results, strict=True)):
        if result.combined is not None:
            assert_bitwise_equal(result.combined.tensor(), expected, f"{case.id} rank {rank}: combine")


BY_ROW = ("tokens", "scales", "src_info", "weights", "topk_ids", "topk_weights")


def exact_rows(config: moelink.EPConfig, expected: reference.ReferenceRows) -> reference.ReferenceRows:
    """What a dispatch with ``host_counts`` returns instead of ``expected``."""
    if config.rows_by_group:
        return expected
    cut = {name: cut_rows(config, name, getattr(expected, name), expected.num_rows) for name in BY_ROW}
    return dataclasses.replace(expected, **cut)


def cut_rows(config: moelink.EPConfig, name: str, tensor: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """A field as an output with ``rows`` rows has it."""
    if tensor is None or name not in BY_ROW:
        return tensor
    if name != "scales":
        return tensor[:, :rows] if config.layout == "masked" else tensor[:rows]
    raw = bits_of(tensor)
    return raw[tuple(slice(size) for size in config.scale_shape(rows))].contiguous().view(tensor.dtype)


def check_rows(what: str, expected: reference.ReferenceRows, got: dict[str, torch.Tensor | None]) -> None:
    """The defined part of a dispatch output against the oracle's."""
    for name in (*FIELDS, PER_EXPERT) if PER_EXPERT in got else FIELDS:
        want, have = getattr(expected, name), got[name]
        if name in ("tokens", "src_info", "weights", "topk_weights") and want is not None and have is not None:
            assert have.shape == want.shape, f"{what}: {name} has shape {list(have.shape)}, expected {list(want.shape)}"
            want, have = (defined_rows(expected, each) for each in (want, have))
        elif name == "scales" and want is not None and have is not None:
            assert have.shape == want.shape, (
                f"{what}: scales have shape {list(have.shape)}, expected {list(want.shape)}"
            )
            want, have = defined_scales(expected, want), defined_scales(expected, have)
        assert_bitwise_equal(have, want, f"{what}: {name}")


def used_rows(counts: torch.Tensor, size: int) -> torch.Tensor:
    """[groups, size] bool: of groups of ``size`` rows, layout "masked", the first ``counts`` of each."""
    return torch.arange(size, device=counts.device)[None, :] < counts[:, None]


def defined_rows(expected: reference.ReferenceRows, rows: torch.Tensor) -> torch.Tensor:
    """The rows of a field that the layout defines."""
    if expected.src_info.dim() == 2:
        return rows[: expected.num_rows]
    return bits_of(rows)[expected.src_info[:, :, 0] >= 0].view(rows.dtype)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or of 8-bit floats, which can hardly be indexed, their bits."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def rows_of_scales(scales: torch.Tensor, size: int) -> torch.Tensor:
    """[groups, size, n] of the scales of layout "masked", however they are laid out."""
    raw = bits_of(scales)
    if raw.dim() == 6:  # row i of a tile is [i % 32, i // 32]
        return raw.permute(0, 1, 4, 3, 2, 5).reshape(len(raw), size, 4 * raw.shape[2])
    # Transposed scales have 4 bytes each, row-major ones of fp8_token are one a row.
    return raw.transpose(1, 2) if raw.element_size() == 4 and raw.shape[2] == size else raw


def defined_scales(expected: reference.ReferenceRows, scales: torch.Tensor) -> torch.Tensor:
    """The part of a scale tensor that the layout defines, in a comparable form."""
    if expected.src_info.dim() == 3:
        used = expected.src_info[:, :, 0] >= 0
        return (rows_of_scales(scales, used.shape[1]) if expected.topk_ids is None else bits_of(scales))[used]
    raw = scales.contiguous().view(torch.uint8)
    if scales.dim() == 5:
        offsets, block_offsets = expected.row_offsets.tolist(), expected.scales_offsets.tolist()
        blocks = []
        for group, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            base = start // 128 + block_offsets[group]
            blocks += range(base, base + -(-(end - start) // 128))
        return raw[blocks]
    # Transposed scales are [w, rows] in 4 bytes each, row-major ones of fp8_token [rows, 1].
    if expected.topk_ids is None and scales.dtype.itemsize == 4 and scales.shape[1] == len(expected.tokens):
        return scales[:, : expected.num_rows].contiguous()
    return raw[: expected.num_rows]


def matrix(formats: Sequence[str] = SCALE_LAYOUTS) -> list[Case]:
    """``formats`` x (layout and reduction) x scenarios."""
    cases = []
    for fmt in formats:
        for options in ({}, {"pre_reduce": False}, {"layout": "rank"}):
            setup = Setup(fmt, tuple(options.items()))
            cases += [Case(setup, scenario, seed=i) for i, scenario in enumerate(SCENARIOS)]
    return cases


def features() -> list[Case]:
    """Every option of DESIGN at least once, over several formats."""
    cases = []

    def add(fmt: str, scenario: str = "uniform", *, num_experts: int = 7, **options: Any) -> None:
        extra = {k: options.pop(k) for k in ("weights", "reduce", "shared") if k in options}
        setup = Setup(fmt, tuple(options.items()), num_experts=num_experts)
        cases.append(Case(setup, scenario, seed=len(cases) + 40, **extra))

    for fmt in ("bf16", "fp8_block128", "nvfp4"):
        for scenario in ("uniform", "one_rank_empty", "holes"):
            add(fmt, scenario, fused_shared_expert=True)
            add(fmt, scenario, fused_shared_expert=True, pre_reduce=False)
            add(fmt, scenario, mode="allreduce")
            add(fmt, scenario, mode="allreduce", fused_shared_expert=True, pre_reduce=False)
        add(fmt, expert_alignment=8)
        add(fmt, expert_alignment=6, fused_shared_expert=True)
        for capacity in (0, 1, 9, 13):
            add(fmt, "skewed", capacity=capacity)
            add(fmt, "skewed", capacity=capacity, expert_alignment=4, fused_shared_expert=True)
            add(fmt, "skewed", capacity=capacity, layout="rank")
            add(fmt, "skewed", capacity=capacity, pre_reduce=False)
        add(fmt, weights="none")
        add(fmt, layout="rank", weights="none")
        add(fmt, "repeats", pre_reduce=False, weights="combine")
        add(fmt, "holes", pre_reduce=False, weights="none", reduce=False)
        add(fmt, "repeats", reduce=False)
        add(fmt, "repeats", mode="allreduce", reduce=False, weights="none")
        add(fmt, shared=True)
        add(fmt, "holes", shared=True, pre_reduce=False)
        add(fmt, shared=True, layout="rank")
        add(fmt, "uniform", mode="allreduce", layout="rank")
        add(fmt, num_experts=1)
        add(fmt, "repeats", num_experts=16)
    add("fp8_block128", "one_rank_empty", hidden_size=128)
    add("bf16", "one_rank_empty", hidden_size=1)
    add("bf16", mode="allreduce", pre_reduce=False, weights="combine")
    add("fp32", combine_dtype=torch.float32)
    add("fp32", combine_dtype=torch.float16, pre_reduce=False)
    add("bf16", combine_dtype=torch.float64)
    add("bf16", "skewed", layout="rank", global_ids=True)
    add("bf16", "repeats", weights="left")
    add("nvfp4", "holes", weights="left", pre_reduce=False)
    add("bf16", weights="left", mode="allreduce", fused_shared_expert=True)
    return cases


def real_shapes() -> list[Case]:
    """Hidden sizes, top-k and experts of real models, few tokens, so that the oracle can follow."""
    shapes = (
        ("bf16", 7168, 8, 256), ("fp8_block128", 7168, 8, 256), ("nvfp4", 7168, 8, 256), ("mxfp8", 6144, 4, 128),
        ("mxfp4", 2880, 4, 32), ("nvfp4", 2880, 1, 8), ("bf16", 3000, 6, 60), ("fp32", 3000, 10, 72),
    )  # fmt: skip
    cases = []
    for index, (fmt, hidden, topk, experts) in enumerate(shapes):
        setup = Setup(fmt, (("hidden_size", hidden),), num_experts=experts, topk=topk)
        cases += [Case(setup, scenario, seed=index) for scenario in ("uniform", "holes", "one_rank_empty")]
    return cases
