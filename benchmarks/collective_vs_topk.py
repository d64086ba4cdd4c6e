"""moelink's collective transport against a sort and ``all_to_all_single`` of top-k copies, on CPU ranks over gloo.

Both move the same tokens, in the same run, iteration by iteration in turn. The order is: correctness gate, warm-up,
timing, table, JSON. A red gate prints no time. A time is the median over iterations of the slowest rank.

What is compared:

* **moelink**: ``ep.dispatch`` and ``ep.combine``: one row per (token, destination rank) out, one pre-reduced row home.
* **baseline**: what one writes without a library: sort the (token, expert) pairs by expert, exchange counts, send one
  row per pair in one ``all_to_all_single``, group by expert on arrival; results return the same way, and are then
  summed with the router weights.

Functional numbers of a laptop-sized machine, not a statement about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import moelink
import provenance
from moelink.routing import ExpertMap
from moelink.testing import run_ranks

SCHEMA_VERSION = 1
BYTES_FORMULA = (
    "bytes that all ranks send to other ranks in one call. moelink (counted by the transport): one message per (token, "
    "remote rank) = row + token number + ids + weights, each padded to 16; one row per (token, remote rank) home. "
    "baseline: one row per (token, remote expert) each way, and 8 bytes per remote expert for the counts"
)


@dataclass(frozen=True)
class Case:
    """One benchmark case. Rows are bf16."""

    ranks: int = 4
    tokens_per_rank: int = 512
    hidden_size: int = 2048
    num_experts: int = 64
    topk: int = 8
    seed: int = 0
    warmup: int = 5
    iterations: int = 50


@dataclass(frozen=True)
class Batch:
    """A rank's input: x [T, H] bf16, topk_ids [T, K] int64 distinct per token, topk_weights [T, K] fp32."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


def make_batch(case: Case, rank: int) -> Batch:
    """Seeded per rank, uniform routing."""
    generator = torch.Generator().manual_seed(case.seed * 1009 + rank)
    x = torch.randn(case.tokens_per_rank, case.hidden_size, generator=generator).to(torch.bfloat16)
    scores = torch.rand(case.tokens_per_rank, case.num_experts, generator=generator)
    weights = torch.rand(case.tokens_per_rank, case.topk, generator=generator)
    return Batch(x, scores.topk(case.topk, dim=-1).indices, weights / weights.sum(-1, keepdim=True))


def expert_factor(expert: Tensor) -> Tensor:
    """What an expert multiplies its rows with: +-1, +-2 or +-0.5, exact in bf16."""
    return torch.exp2((expert % 3 - 1).float()) * (1 - 2 * (expert % 2)).float()


def run_experts(rows: Tensor, row_offsets: Tensor, first_expert: int) -> Tensor:
    """Experts that cost nothing and are exact, so that the result is known."""
    sizes = row_offsets[1:] - row_offsets[:-1]
    experts = torch.arange(first_expert, first_expert + sizes.numel())
    return rows * torch.repeat_interleave(expert_factor(experts), sizes)[:, None].to(rows.dtype)


@dataclass(frozen=True)
class Received:
    """The baseline's dispatch result: rows grouped by local expert, and what combine needs to undo it.

    Attributes:
        rows: [R, H], by local expert, then source rank, token, slot.
        row_offsets: [L + 1] exclusive starts.
        order: [T * K] home pairs sorted by expert.
        permutation: [R] arrival position of each row.
        sent, received: rows per destination and per source.
    """

    rows: Tensor
    row_offsets: Tensor
    order: Tensor
    permutation: Tensor
    sent: list[int]
    received: list[int]


class Baseline:
    """Sort + all_to_all_single of top-k copies."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank, self.experts = case, rank, ExpertMap(case.num_experts, case.ranks)
        if case.num_experts % case.ranks:
            raise ValueError("the baseline needs as many experts on every rank")

    def dispatch(self, batch: Batch) -> Received:
        """Pairs sorted by expert; counts first, then all rows at once; grouped by expert on arrival."""
        case = self.case
        local = case.num_experts // case.ranks
        flat = batch.topk_ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=case.num_experts)
        arriving = torch.empty(case.ranks, local, dtype=torch.int64)
        dist.all_to_all_single(arriving, counts.view(case.ranks, local))
        sent, received = counts.view(case.ranks, local).sum(1).tolist(), arriving.sum(1).tolist()
        rows = batch.x.index_select(0, order // case.topk)
        arrived = torch.empty(sum(received), case.hidden_size, dtype=batch.x.dtype)
        dist.all_to_all_single(arrived, rows, received, sent)
        expert = torch.arange(local).repeat(case.ranks).repeat_interleave(arriving.reshape(-1))
        permutation = expert.argsort(stable=True)
        row_offsets = torch.nn.functional.pad(arriving.sum(0).cumsum(0), (1, 0))
        return Received(arrived.index_select(0, permutation), row_offsets, order, permutation, sent, received)

    def combine(self, y: Tensor, received: Received, batch: Batch) -> Tensor:
        """Rows return in arrival order, are put back in (token, slot) order, and summed with the router weights."""
        case = self.case
        back = torch.empty_like(y)
        back[received.permutation] = y
        home = torch.empty(received.order.numel(), case.hidden_size, dtype=y.dtype)
        dist.all_to_all_single(home, back, received.sent, received.received)
        copies = torch.empty_like(home)
        copies[received.order] = home
        copies = copies.view(case.tokens_per_rank, case.topk, case.hidden_size)
        out = torch.zeros(case.tokens_per_rank, case.hidden_size)
        for slot in range(case.topk):
            out.addcmul_(copies[:, slot], batch.topk_weights[:, slot, None])
        return out.to(y.dtype)

    def bytes_sent(self, batch: Batch) -> tuple[int, int]:
        """Bytes to other ranks (dispatch, combine) that this rank's tokens cause."""
        case = self.case
        remote = int((self.experts.owner(batch.topk_ids) != self.rank).sum())
        row = case.hidden_size * batch.x.dtype.itemsize
        return remote * row + 8 * (case.num_experts - self.experts.num_local(self.rank)), remote * row


def moelink_dispatch(ep: moelink.Communicator, batch: Batch) -> moelink.DispatchOutput:
    """Exact-size output, like the baseline's."""
    return ep.dispatch(batch.x, batch.topk_ids, batch.topk_weights, host_counts=True)


@dataclass(frozen=True)
class RankResult:
    """What one rank saw: whether the gate passed, why not, seconds per iteration by phase, and bytes by phase."""

    gate: str
    seconds: dict[str, list[float]]
    bytes: dict[str, int]


def exact_result(case: Case, batch: Batch) -> tuple[Tensor, Tensor]:
    """The unsharded result, and the sum of magnitudes that roundings are relative to; fp64 [T, H]."""
    factors = batch.topk_weights.double() * expert_factor(batch.topk_ids).double()
    x = batch.x.double()
    return x * factors.sum(1, keepdim=True), x.abs() * factors.abs().sum(1, keepdim=True)


def correctness_gate(case: Case, batch: Batch, outputs: dict[str, Tensor], same_rows: bool) -> str:
    """Empty when both outputs equal the unsharded result within three bf16 roundings and both delivered equal rows."""
    exact, magnitude = exact_result(case, batch)
    allowed = 3.1 * torch.finfo(torch.bfloat16).eps / 2 * magnitude
    for name, out in outputs.items():
        if not bool(((out.double() - exact).abs() <= allowed).all()):
            return f"{name} differs from the unsharded result"
    return "" if same_rows else "the two did not deliver the same rows"


def rank_main(rank: int, world_size: int, case: Case) -> RankResult:
    """Gate, warm-up and timing on one rank."""
    torch.set_num_threads(1)
    batch = make_batch(case, rank)
    baseline = Baseline(case, rank)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object], record: bool) -> object:
        dist.barrier()
        start = time.perf_counter()
        result = action()
        elapsed = time.perf_counter() - start
        if record:
            seconds.setdefault(name, []).append(elapsed)
        return result

    with moelink.init(
        num_experts=case.num_experts, topk=case.topk, hidden_size=case.hidden_size,
        max_tokens_per_rank=case.tokens_per_rank, transport="collective",
    ) as ep:  # fmt: skip
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        first = baseline.experts.first(rank)
        recv = moelink_dispatch(ep, batch)
        y = run_experts(recv.tokens, recv.row_offsets, first)
        out = ep.combine(y, recv)
        traffic = ep.traffic()
        rows = baseline.dispatch(batch)
        y_rows = run_experts(rows.rows, rows.row_offsets, first)
        outputs = {"moelink": out, "baseline": baseline.combine(y_rows, rows, batch)}
        gate = correctness_gate(case, batch, outputs, torch.equal(recv.tokens, rows.rows))
        verdicts: list[str] = [""] * world_size
        dist.all_gather_object(verdicts, gate)
        sent = baseline.bytes_sent(batch)
        counted = {
            "moelink_dispatch": traffic.dispatch, "moelink_combine": traffic.combine,
            "baseline_dispatch": sent[0], "baseline_combine": sent[1],
        }  # fmt: skip
        if any(verdicts):
            return RankResult(gate, {}, counted)
        for iteration in range(case.warmup + case.iterations):
            record = iteration >= case.warmup
            timed("baseline_dispatch", lambda: baseline.dispatch(batch), record)
            timed("moelink_dispatch", lambda: moelink_dispatch(ep, batch), record)
            timed("baseline_combine", lambda: baseline.combine(y_rows, rows, batch), record)
            timed("moelink_combine", lambda: ep.combine(y, recv), record)
    return RankResult(gate, seconds, counted)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the slowest rank over the iterations."""

    median: float
    p20: float
    p80: float


def slowest(results: list[RankResult], *phases: str) -> Timing:
    """Sum of ``phases``, each at its slowest rank, per iteration."""
    per_phase = [[max(column) for column in zip(*(r.seconds[p] for r in results), strict=True)] for p in phases]
    samples = [1e3 * sum(column) for column in zip(*per_phase, strict=True)]
    quantiles = statistics.quantiles(samples, n=5, method="inclusive")
    return Timing(median=statistics.median(samples), p20=quantiles[0], p80=quantiles[-1])


def summarize(case: Case, results: list[RankResult], command: str) -> dict[str, object]:
    """The JSON document of a run."""
    rows = []
    for name in ("baseline", "moelink"):
        phases = (f"{name}_dispatch", f"{name}_combine")
        dispatch, combine = (sum(result.bytes[phase] for result in results) for phase in phases)
        rows.append({
            "name": name,
            "dispatch_ms": asdict(slowest(results, phases[0])),
            "combine_ms": asdict(slowest(results, phases[1])),
            "total_ms": asdict(slowest(results, *phases)),
            "dispatch_bytes": dispatch,
            "combine_bytes": combine,
            "total_bytes": dispatch + combine,
        })  # fmt: skip
    baseline, ours = rows
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "collective_vs_topk",
        "date": datetime.now(timezone.utc).date().isoformat(),
        **provenance.collect(),
        "command": command,
        "case": {**asdict(case), "dtype": "bfloat16", "transport": "gloo"},
        "bytes_formula": BYTES_FORMULA,
        "gate": "passed",
        "rows": rows,
        "bytes_ratio": ours["total_bytes"] / baseline["total_bytes"],
        "time_ratio": ours["total_ms"]["median"] / baseline["total_ms"]["median"],
    }


def print_table(document: dict[str, object]) -> None:
    """The document as a table."""
    print(f"{'':10}{'dispatch ms':>26}{'combine ms':>26}{'total ms':>26}{'MB':>10}")
    for row in document["rows"]:
        cells = (row[f"{phase}_ms"] for phase in ("dispatch", "combine", "total"))
        text = "".join(f"{c['median']:>10.1f} ({c['p20']:5.1f} .. {c['p80']:5.1f})" for c in cells)
        print(f"{row['name']:10}{text}{row['total_bytes'] / 1e6:>10.1f}")
    print(f"time ratio {document['time_ratio']:.2f}, bytes ratio {document['bytes_ratio']:.2f}")
    print("median (20th .. 80th percentile) of the slowest rank;", document["bytes_formula"])


def main() -> int:
    """Run the case and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = Case()
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "collective_vs_topk.json")
    arguments = vars(parser.parse_args())
    output: Path = arguments.pop("output")
    case = Case(**arguments)
    results: list[RankResult] = run_ranks(rank_main, case.ranks, case, timeout=600.0)
    failures = [f"rank {rank}: {result.gate}" for rank, result in enumerate(results) if result.gate]
    if failures:
        print("correctness gate failed; nothing was timed\n" + "\n".join(failures))
        return 1
    given = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in asdict(case).items() if v != getattr(defaults, k))
    document = summarize(case, results, f"python benchmarks/{Path(__file__).name} {given}".strip())
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=2) + "\n")
    print_table(document)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
