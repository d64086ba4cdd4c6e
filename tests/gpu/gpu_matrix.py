"""Every format x layout x mode x reduction at real sizes on GPUs: what the ranks do with ``matrix_configs.CONFIGS``.

A configuration is compiled once and called often: with full, uneven and absent tokens, spread evenly, skewed, with
holes and repeated ids, where the symmetric transport must return the bits of the collective one on NCCL; and with few
tokens, where both must also return the bits of the oracle.

``test_matrix_gpu.py`` runs it format by format. ``python -m tests.gpu.gpu_matrix`` runs all of it, or some formats, on
the GPUs of this machine; ``--dry`` prints what it covers.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

import moelink
from moelink import reference
from moelink.arith import align_up
from moelink.testing import assert_bitwise_equal, rank_data, run_ranks
from tests.gpu import gpu_ranks
from tests.gpu.gpu_compile import FUSED, Kernel, compile_all, kernels_of
from tests.kernels.matrix_configs import CONFIGS, Config, describe
from tests.support.cases import FIELDS, FORMATS, Case, Packed, Result, Setup, check_case, cut_rows

ROUNDS = ("full", "holes", "skewed", "one_expert", "one_token", "nothing")
SCENARIOS = ("holes", "repeats", "one_rank_empty", "uniform", "one_expert", "skewed")
PATIENCE = 45.0
"""Seconds after which a rank that is still with the same configuration prints where it is."""


@dataclass(frozen=True)
class FewTokens(Case):
    """A dispatch and combine of a configuration that the oracle can follow. The setup has the rows it needs."""

    name: str = ""

    @property
    def id(self) -> str:
        return f"{self.name} seed {self.seed} ({self.scenario}): oracle"


@dataclass(frozen=True)
class Job:
    """What the ranks do with one configuration."""

    config: Config
    seed: int
    rounds: tuple[str, ...]
    few: tuple[FewTokens, ...]


def jobs_of(
    configs: Sequence[Config], world_size: int, *, rounds: tuple[str, ...] = ROUNDS, few: int = 2, small: bool = False
) -> list[Job]:
    """All rounds, and ``few`` cases for the oracle, of every configuration; ``small``: with at most 3 tokens."""
    jobs = []
    for index, config in enumerate(configs):
        number = CONFIGS.index(config) if config in CONFIGS else len(CONFIGS) + index
        seed = 100 * number
        scenarios = [SCENARIOS[(number * few + i) % len(SCENARIOS)] for i in range(few)]
        cases = [few_tokens(config, world_size, scenario, seed + 50 + i, small) for i, scenario in enumerate(scenarios)]
        jobs.append(Job(config, seed, rounds, tuple(cases)))
    return jobs


def few_tokens(config: Config, world_size: int, scenario: str, seed: int, small: bool) -> FewTokens:
    """A case whose capacity is what its rows need (the oracle says how many) and three that stay undefined. Of layout
    "masked", rows of an expert, up to whole tiles."""
    masked = config.form.layout == "masked"
    bound = "rows_per_expert" if masked else "capacity"

    def case(**options: Any) -> FewTokens:
        fields = {**config.fields, **options}
        fmt, experts, topk = (fields.pop(name) for name in ("dispatch_format", "num_experts", "topk"))
        setup = Setup(fmt, tuple(fields.items()), num_experts=experts, topk=topk)
        return FewTokens(
            setup, scenario, config.weights, seed=seed, small=small, name=config.name,
            input_dtype=config.input_dtype, id_dtype=config.id_dtype,
        )  # fmt: skip

    group = config.config(1).format.group
    narrow = case(hidden_size=group, max_tokens_per_rank=7, combine_format=None, **{bound: None})
    data = [case(**{bound: 0}).data(rank) for rank in range(world_size)]
    hidden = narrow.setup.fields["hidden_size"]
    rows = reference.reference_dispatch(
        narrow.setup.config(world_size), [d.x[:, :hidden] for d in data], [d.topk_ids for d in data]
    )
    if masked:
        most = max(int(row.num_recv_per_expert.max()) for row in rows if len(row.num_recv_per_expert))
        return case(rows_per_expert=min(config.fields["rows_per_expert"], align_up(3 + most, 128)))
    return case(capacity=3 + max(row.num_rows for row in rows))


@dataclass(frozen=True)
class Outcome:
    """What one rank reports: differences between the transports, what the oracle is to judge, and seconds."""

    differences: list[str]
    results: list[list[Result]]
    opening: float
    calling: float


def run_jobs(rank: int, world_size: int, jobs: Sequence[Job], kind: str = "cuda") -> Outcome:
    """Entry point of a rank. A difference does not end it, so that ranks stay in step and all of them are told."""
    device = gpu_ranks.prepare(rank, kind)
    differences: list[str] = []
    results, opening, calling = [], 0.0, 0.0
    for job in jobs:
        start = time.monotonic()
        print(f"rank {rank}: {job.config.name}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(PATIENCE)
        with contextlib.ExitStack() as stack:
            pair = []
            for transport in ("symmetric", "collective"):
                with named(f"{job.config.name}: {transport} init"):
                    fields = {**job.config.fields, "transport": transport, "timeout": 60.0}
                    pair.append(stack.enter_context(moelink.init(**fields, device=device)))
            opened = time.monotonic()
            run_rounds(pair, job, rank, differences)
            results.append([run_few(pair, case, rank, differences) for case in job.few])
            bounded = job.config.fields.keys() & {"capacity", "rows_per_expert"}
            full = (moelink.CapacityError,) if bounded else ()
            with named(job.config.name), contextlib.suppress(*full):
                pair[0].check()
            calling += time.monotonic() - opened
        opening += opened - start
        if kind == "cuda":
            torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()
    return Outcome(differences, results, opening, calling)


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """An error inside says which configuration it met."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def noting(differences: list[str]) -> Iterator[None]:
    """A failed comparison inside is added to ``differences``, and told at once: a run may end before its time."""
    try:
        yield
    except AssertionError as error:
        print(error, file=sys.stderr, flush=True)
        differences.append(str(error))


def run_rounds(pair: Sequence[moelink.Communicator], job: Job, rank: int, differences: list[str]) -> None:
    """Each round on both transports, compared bit for bit on the device. Experts return the same noise every time."""
    one, config = pair[0], job.config
    generator = torch.Generator(one.device).manual_seed(job.seed * 1000 + rank)
    shape = (*rows_of(one.config), config.hidden_size)
    y = torch.randn(shape, dtype=config.combine_dtype, device=one.device, generator=generator)
    source = 0 if config.form.mode == "allreduce" else rank
    for number, name in enumerate(job.rounds):
        seed = job.seed + number
        what = f"{config.name} seed {seed} ({name}): transports"
        with named(what):
            x, ids, weights = round_data(config, name, seed=seed, source=source, device=one.device)
            recvs = call_both(pair, x, ids, weights, y, config.weights, what, differences)[0]
            if number == 0:
                call_again(pair, recvs, x.flip(0).contiguous(), weights, config.weights, what, differences)


def rows_of(config: moelink.EPConfig) -> tuple[int, ...]:
    """Rows of an output, of layout "masked" after its groups."""
    return (config.num_groups,) * (config.layout == "masked") + (config.row_capacity,)


def call_both(
    pair: Sequence[moelink.Communicator], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, y: torch.Tensor,
    weigh: str, what: str, differences: list[str],
) -> tuple[list[moelink.DispatchOutput], torch.Tensor]:  # fmt: skip
    """Dispatch and combine on both transports; what both dispatches returned, and the symmetric combine."""
    recvs = [ep.dispatch(x, ids, weights if weigh == "dispatch" else None) for ep in pair]
    with noting(differences):
        gpu_ranks.same_rows(what, *recvs)
    home = weights if weigh == "combine" else None
    outs = [ep.combine(y, recv, home) for ep, recv in zip(pair, recvs, strict=True)]
    with noting(differences):
        same_bits(f"{what}: combine", *outs)
    return recvs, outs[0]


def call_again(
    pair: Sequence[moelink.Communicator], recvs: Sequence[moelink.DispatchOutput], x: torch.Tensor,
    weights: torch.Tensor, weigh: str, what: str, differences: list[str],
) -> None:  # fmt: skip
    """Other rows over the routing of ``recvs`` on both transports, which on the symmetric one are other kernels."""
    given = weights if weigh == "dispatch" else None
    again = [ep.dispatch(x, None, given, routing=recv) for ep, recv in zip(pair, recvs, strict=True)]
    with noting(differences):
        gpu_ranks.same_rows(f"{what}, over the same routing", *again)


def same_bits(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Compared on the device; only a difference is brought to the host, where it is described."""
    same_kind = (got.dtype, got.shape) == (want.dtype, want.shape)
    if not same_kind or not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
        assert_bitwise_equal(got, want, what)


def round_tokens(name: str, most: int, source: int) -> int:
    """Tokens of ``source``: thirds of ``most`` that differ between ranks, none and all among them."""
    if name == "one_token":
        return int(source == 0)
    thirds = {"full": 3, "holes": (source * 3 + 1) % 4, "skewed": (source * 3 + 2) % 4, "one_expert": (source + 1) % 4}
    return most * thirds.get(name, 0) // 3


def round_data(
    config: Config, name: str, *, seed: int, source: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_ids and topk_weights of ``source``. Rows are made on the device, their magnitudes over a wide range."""
    tokens = round_tokens(name, config.max_tokens_per_rank, source)
    routing = rank_data(
        seed=seed, rank=source, num_tokens=tokens, hidden_size=1, num_experts=config.num_experts, topk=config.topk,
        skew=1.2 if name == "skewed" else 0.0, holes=0.1 if name == "holes" else 0.0, repeats=name == "skewed",
    )  # fmt: skip
    ids = routing.topk_ids if name != "one_expert" else torch.full_like(routing.topk_ids, config.num_experts - 1)
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + source)
    wide = torch.float64 if config.input_dtype == torch.float64 else torch.float32
    x = torch.randn(tokens, config.hidden_size, dtype=wide, device=device, generator=generator)
    x *= torch.exp2(torch.randint(-9, 8, (tokens, 1), device=device, generator=generator))
    dtype = torch.float64 if config.combine_dtype == torch.float64 else torch.float32
    return x.to(config.input_dtype), ids.to(device, config.id_dtype), routing.topk_weights.to(device, dtype)


def run_few(pair: Sequence[moelink.Communicator], case: FewTokens, rank: int, differences: list[str]) -> Result:
    """A case for the oracle on both transports; the symmetric output, cut to the capacity of the case's setup."""
    one = pair[0]
    capacity = case.setup.fields[one.config.row_bound]
    rows = (*rows_of(one.config)[:-1], capacity)
    shape = (*rows_of(one.config), one.config.hidden_size)
    y = torch.full(shape, torch.nan, dtype=one.config.combine_dtype, device=one.device)
    y[..., :capacity, :] = case.expert_rows(rank, *rows).to(one.device)
    data = case.data(rank)
    x, ids, weights = (tensor.to(one.device) for tensor in (data.x, data.topk_ids, data.topk_weights))
    what = f"{case.name} seed {case.seed} ({case.scenario}): transports"
    with named(what):
        (recv, _), out = call_both(pair, x, ids, weights, y, case.weights, what, differences)
        cut = {name: Packed.of(cut_rows(one.config, name, getattr(recv, name), capacity)) for name in FIELDS}
        if one.config.layout == "masked":  # starts of the groups of an output with fewer rows
            cut["row_offsets"] = Packed.of(torch.arange(one.config.num_groups + 1, dtype=torch.int32) * capacity)
        return Result(cut, Packed.of(out))


def differences_of(jobs: Sequence[Job], world_size: int, kind: str = "cuda", *, timeout: float = 200.0) -> list[str]:
    """Run ``jobs`` on ``world_size`` ranks: what differs between the transports, and from the oracle."""
    start, cached = time.monotonic(), cache_entries()
    outcomes = run_ranks(run_jobs, world_size, list(jobs), kind, timeout=timeout)
    ended = time.monotonic()
    found = [f"rank {rank}: {text}" for rank, outcome in enumerate(outcomes) for text in outcome.differences]
    for number, job in enumerate(jobs):
        for case, results in zip(job.few, zip(*(o.results[number] for o in outcomes), strict=True), strict=True):
            with noting(found):
                check_case(case, world_size, results)
    opening, calling = (max(getattr(outcome, name) for outcome in outcomes) for name in ("opening", "calling"))
    print(
        f"{len(jobs)} configurations on {world_size} ranks: {ended - start:.1f} s (opening {opening:.1f}, calls "
        f"{calling:.1f}), oracle {time.monotonic() - ended:.1f} s, {cache_entries() - cached} late cache entries"
    )
    return found


def cache_entries() -> int:
    """Entries of Triton's cache. Ranks add none when everything they launch has been compiled before."""
    with contextlib.suppress(OSError):
        return len(os.listdir(triton.knobs.cache.dir))
    return 0


def kernels(configs: Sequence[Config], world_size: int) -> list[Kernel]:
    """What :func:`run_rounds` launches with ``configs``."""
    return [
        kernel
        for config in configs
        for kernel in kernels_of(
            config.fields, world_size, (*FUSED, "over_routing"), weights=config.weights, input_dtype=config.input_dtype,
            id_dtype=config.id_dtype,
        )
    ]  # fmt: skip


def main() -> None:
    """Print the covering table, or run the matrix on the GPUs of this machine."""
    parser = argparse.ArgumentParser(description="The complete matrix at real sizes.")
    parser.add_argument("--dry", action="store_true", help="print the configurations and the counts per pair of values")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="only these")
    parser.add_argument("--compiled", action="store_true", help="its kernels are compiled already")
    args = parser.parse_args()
    if args.dry:
        print(describe())
        return
    world_size = min(8, torch.cuda.device_count())
    configs = [config for config in CONFIGS if config.form.dispatch_format in args.formats]
    if not args.compiled:
        compile_all(kernels(configs, world_size))
    found = differences_of(jobs_of(configs, world_size), world_size, timeout=500)
    print("\n".join(found) or "everything is equal")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
