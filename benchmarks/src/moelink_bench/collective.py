"""Compare moelink's collective transport with a sort and ``all_to_all_single`` of top-k copies, on CPU ranks over gloo.

Both move the same tokens, in the same run, iteration by iteration in turn. Nothing is timed before both results have
passed the correctness gate. A time is the median over iterations of the slowest rank.

* **moelink**: ``ep.dispatch`` and ``ep.combine``: one row per (token, destination rank) out, one pre-reduced row home.
* **baseline**: what one writes without a library: sort the (token, expert) pairs by expert, exchange counts, send one
  row per pair in one ``all_to_all_single``, group by expert on arrival; results return the same way, and are then
  summed with the router weights.

The figures are those of a small machine without a GPU, and say nothing about GPUs.

    python -m moelink_bench.collective
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moelink
from moelink.control.values import gather_values
from moelink.routing import ExpertMap
from moelink.testing import run_ranks
from moelink_bench import presets
from moelink_bench.contenders import difference_from_truth, expert_factor
from moelink_bench.document import head, results_folder, script_parser, write
from moelink_bench.timing import slowest_rank
from moelink_bench.workload import Batch

BYTES_FORMULA = (
    "bytes that all ranks send to other ranks in one call. moelink (counted by the transport): one message per (token, "
    "remote rank) = row + token number + ids + weights, each padded to 16; one row per (token, remote rank) home. "
    "baseline: one row per (token, remote expert) each way, and 8 bytes per remote expert for the counts"
)


@dataclass(frozen=True)
class Case:
    """One case. Rows are bf16."""

    ranks: int = 4
    tokens_per_rank: int = 512
    hidden_size: int = 2048
    num_experts: int = 64
    topk: int = 8
    seed: int = 0
    warmup: int = 5
    iterations: int = 50


def make_batch(case: Case, rank: int) -> Batch:
    """Draw a rank's input: ids are int64, distinct in a token, and uniform."""
    generator = torch.Generator().manual_seed(case.seed * 1009 + rank)
    x = torch.randn(case.tokens_per_rank, case.hidden_size, generator=generator).to(torch.bfloat16)
    scores = torch.rand(case.tokens_per_rank, case.num_experts, generator=generator)
    weights = torch.rand(case.tokens_per_rank, case.topk, generator=generator)
    return Batch(x, scores.topk(case.topk, dim=-1).indices, weights / weights.sum(-1, keepdim=True))


def run_experts(rows: Tensor, row_offsets: Tensor, first_expert: int) -> Tensor:
    """Multiply each row with its expert's factor, which is exact, so that the result is known."""
    sizes = row_offsets[1:] - row_offsets[:-1]
    experts = torch.arange(first_expert, first_expert + sizes.numel())
    return rows * torch.repeat_interleave(expert_factor(experts), sizes)[:, None].to(rows.dtype)


@dataclass(frozen=True)
class Received:
    """What the baseline's dispatch returns: rows grouped by local expert, and what combine needs to undo it.

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
            raise ValueError(
                f"expected as many experts on every rank, got {case.num_experts} experts on {case.ranks} ranks: "
                "choose a number of experts that the number of ranks divides"
            )

    def dispatch(self, batch: Batch) -> Received:
        """Sort pairs by expert; send counts first, then all rows at once; group them by expert on arrival."""
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
        """Return rows in arrival order, put them back in (token, slot) order, and sum them with the router weights."""
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
        """Return the bytes to other ranks (dispatch, combine) that this rank's tokens cause."""
        case = self.case
        remote = int((self.experts.owner(batch.topk_ids) != self.rank).sum())
        row = case.hidden_size * batch.x.dtype.itemsize
        return remote * row + 8 * (case.num_experts - self.experts.num_local(self.rank)), remote * row


@dataclass(frozen=True)
class RankResult:
    """What one rank saw: why the gate failed ("" if it did not), seconds per iteration by phase, and bytes by phase."""

    gate: str
    seconds: dict[str, list[float]]
    bytes: dict[str, int]


def correctness_gate(case: Case, batch: Batch, outputs: dict[str, Tensor], same_rows: bool) -> str:
    """Return what is wrong with the outputs, or "" when both are the layer's result and both delivered equal rows."""
    layer = presets.Case(
        tokens=case.tokens_per_rank, hidden_size=case.hidden_size, num_experts=case.num_experts, topk=case.topk,
        format="bf16",
    )  # fmt: skip
    for name, out in outputs.items():
        fault = difference_from_truth(out, batch, layer)
        if fault:
            return f"{name}: {fault}"
    return "" if same_rows else "the two did not deliver the same rows"


def rank_main(rank: int, world_size: int, case: Case) -> RankResult:
    """Pass the gate, warm up and time both on one rank."""
    torch.set_num_threads(1)
    batch = make_batch(case, rank)
    baseline = Baseline(case, rank)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object], record: bool) -> None:
        dist.barrier()
        start = time.perf_counter()
        action()
        if record:
            seconds.setdefault(name, []).append(time.perf_counter() - start)

    with moelink.init(
        num_experts=case.num_experts, topk=case.topk, hidden_size=case.hidden_size,
        max_tokens_per_rank=case.tokens_per_rank, transport="collective",
    ) as ep:  # fmt: skip
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        first = baseline.experts.first(rank)

        def dispatch() -> moelink.DispatchOutput:
            # Exact-size output, like the baseline's.
            return ep.dispatch(batch.x, batch.topk_ids, batch.topk_weights, host_counts=True)

        recv = dispatch()
        y = run_experts(recv.tokens, recv.row_offsets, first)
        out = ep.combine(y, recv)
        traffic = ep.traffic()
        rows = baseline.dispatch(batch)
        y_rows = run_experts(rows.rows, rows.row_offsets, first)
        outputs = {"moelink": out, "baseline": baseline.combine(y_rows, rows, batch)}
        gate = correctness_gate(case, batch, outputs, torch.equal(recv.tokens, rows.rows))
        verdicts: list[str] = gather_values(gate)
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
            timed("moelink_dispatch", dispatch, record)
            timed("baseline_combine", lambda: baseline.combine(y_rows, rows, batch), record)
            timed("moelink_combine", lambda: ep.combine(y, recv), record)
    return RankResult(gate, seconds, counted)


def slowest(results: list[RankResult], *phases: str) -> dict[str, float]:
    """Return milliseconds over the iterations: the sum of ``phases``, each at its slowest rank."""
    per_phase = [[max(column) for column in zip(*(r.seconds[p] for r in results), strict=True)] for p in phases]
    figure = slowest_rank([[1e3 * sum(column) for column in zip(*per_phase, strict=True)]])
    return {"median": figure.median, "p20": figure.p20, "p80": figure.p80}


def summarize(case: Case, results: list[RankResult], commit: str | None) -> dict[str, Any]:
    """Return the JSON document of a run."""
    rows: list[dict[str, Any]] = []
    for name in ("baseline", "moelink"):
        phases = (f"{name}_dispatch", f"{name}_combine")
        dispatch, combine = (sum(result.bytes[phase] for result in results) for phase in phases)
        rows.append({
            "name": name,
            "dispatch_ms": slowest(results, phases[0]),
            "combine_ms": slowest(results, phases[1]),
            "total_ms": slowest(results, *phases),
            "dispatch_bytes": dispatch,
            "combine_bytes": combine,
            "total_bytes": dispatch + combine,
        })  # fmt: skip
    baseline, ours = rows
    return {
        **head("collective_vs_topk", script="collective", commit=commit),
        "case": {**asdict(case), "dtype": "bfloat16", "transport": "gloo"},
        "bytes_formula": BYTES_FORMULA,
        "gate": "passed",
        "rows": rows,
        "bytes_ratio": ours["total_bytes"] / baseline["total_bytes"],
        "time_ratio": ours["total_ms"]["median"] / baseline["total_ms"]["median"],
    }


def print_table(document: dict[str, Any]) -> None:
    """Print the document as a table."""
    print(f"{'':10}{'dispatch ms':>26}{'combine ms':>26}{'total ms':>26}{'MB':>10}")
    for row in document["rows"]:
        cells = (row[f"{phase}_ms"] for phase in ("dispatch", "combine", "total"))
        text = "".join(f"{c['median']:>10.1f} ({c['p20']:5.1f} .. {c['p80']:5.1f})" for c in cells)
        print(f"{row['name']:10}{text}{row['total_bytes'] / 1e6:>10.1f}")
    print(f"time ratio {document['time_ratio']:.2f}, bytes ratio {document['bytes_ratio']:.2f}")
    print("median (20th .. 80th percentile) of the slowest rank;", document["bytes_formula"])


def main() -> int:
    """Run the case and write the result."""
    parser = script_parser(__doc__, out="benchmarks/results/collective_vs_topk.json")
    for name, value in asdict(Case()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    arguments = vars(parser.parse_args())
    commit, out = arguments.pop("commit"), arguments.pop("out") or results_folder() / "collective_vs_topk.json"
    case = Case(**arguments)
    results: list[RankResult] = run_ranks(rank_main, case.ranks, case, timeout=600.0)
    failures = [f"rank {rank}: {result.gate}" for rank, result in enumerate(results) if result.gate]
    if failures:
        print("correctness gate failed; nothing was timed\n" + "\n".join(failures))
        return 1
    document = summarize(case, results, commit)
    write(document, out)
    print_table(document)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
