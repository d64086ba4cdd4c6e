"""Compare moelink's collective transport with a sort and ``all_to_all_single`` of top-k copies, on CPU ranks over gloo.

Both move the same tokens, in the same run, iteration by iteration in turn. Nothing is timed before both results have
passed the correctness gate. A time is the median over iterations of the slowest rank.

* **moelink**: ``ep.dispatch`` and ``ep.combine``: one row per (token, destination rank) out, one pre-reduced row home.
* **baseline**: the code without a library: sort the (token, expert) pairs by expert, exchange counts, send one
  row per pair in one ``all_to_all_single``, group by expert on arrival; results return the same way, and are then
  summed with the router weights.

The figures are those of a small machine without a GPU, and say nothing about GPUs.

    python -m moelink_bench.collective
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moelink
from moelink.routing import ExpertMap
from moelink.testing import run_ranks
from moelink_bench import presets
from moelink_bench.contenders import difference_from_truth, expert_factor
from moelink_bench.exchange import Exchange, Home
from moelink_bench.script import Save, Script, add_numbers
from moelink_bench.timing import Action, Turns, WallClock, everyone, in_turns, slowest_rank
from moelink_bench.workload import Batch, rank_batch

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

    @property
    def of_rank(self) -> presets.Case:
        """The same case for one call."""
        return presets.Case(
            tokens=self.tokens_per_rank, hidden_size=self.hidden_size, num_experts=self.num_experts, topk=self.topk,
            format="bf16",
        )  # fmt: skip


def run_experts(rows: Tensor, row_offsets: Tensor, first_expert: int) -> Tensor:
    """Multiply each row with its expert's factor, which is exact, so that the result is known."""
    sizes = row_offsets[1:] - row_offsets[:-1]
    experts = torch.arange(first_expert, first_expert + sizes.numel())
    return rows * torch.repeat_interleave(expert_factor(experts), sizes)[:, None].to(rows.dtype)


def bytes_sent(case: Case, batch: Batch, rank: int) -> tuple[int, int]:
    """Return the bytes to other ranks (dispatch, combine) that the tokens of ``rank`` cause in the baseline."""
    experts = ExpertMap(case.num_experts, case.ranks)
    remote = int((experts.owner(batch.topk_ids) != rank).sum())
    row = case.hidden_size * batch.x.dtype.itemsize
    return remote * row + 8 * (case.num_experts - experts.num_local(rank)), remote * row


@dataclass(frozen=True)
class RankResult:
    """The result of one rank: the fault that the gate found, or ""; microseconds per iteration and bytes, by phase."""

    gate: str
    microseconds: dict[str, list[float]]
    bytes: dict[str, int]


def correctness_gate(case: Case, batch: Batch, outputs: dict[str, Tensor], same_rows: bool) -> str:
    """Return the fault of the outputs, or "" if both are the layer's result and both delivered equal rows."""
    for name, out in outputs.items():
        fault = difference_from_truth(out, batch, case.of_rank)
        if fault:
            return f"{name}: {fault}"
    return "" if same_rows else "the two did not deliver the same rows"


def rank_main(rank: int, world_size: int, case: Case) -> RankResult:
    """Pass the gate, warm up and time both on one rank."""
    torch.set_num_threads(1)
    drawn = {"seed": case.seed, "rank": rank, "copy": 0, "world_size": world_size}
    batch = rank_batch(case.of_rank, **drawn, device=torch.device("cpu"))
    batch = dataclasses.replace(batch, topk_ids=batch.topk_ids.long())  # as torch's topk returns them
    baseline = Exchange(num_experts=case.num_experts, topk=case.topk, rank=rank, world_size=world_size, wide=True)
    with moelink.init(
        num_experts=case.num_experts, topk=case.topk, hidden_size=case.hidden_size,
        max_tokens_per_rank=case.tokens_per_rank, transport="collective",
    ) as ep:  # fmt: skip
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        first = ExpertMap(case.num_experts, case.ranks).first(rank)

        def dispatch() -> moelink.DispatchOutput:
            # Exact-size output, like the baseline's.
            return ep.dispatch(batch.x, batch.topk_ids, batch.topk_weights, host_counts=True)

        def dispatch_copies() -> tuple[Tensor, Tensor, Home]:
            return baseline.dispatch(batch.x, batch.topk_ids, batch.topk_weights)

        recv = dispatch()
        y = run_experts(recv.tokens, recv.row_offsets, first)
        out = ep.combine(y, recv)
        traffic = ep.traffic()
        rows, offsets, home = dispatch_copies()
        y_rows = run_experts(rows, offsets, first)
        outputs = {"moelink": out, "baseline": baseline.combine(y_rows, home)}
        gate = correctness_gate(case, batch, outputs, torch.equal(recv.tokens, rows))
        verdicts: list[str] = everyone(gate)
        sent = bytes_sent(case, batch, rank)
        counted = {
            "moelink_dispatch": traffic.dispatch, "moelink_combine": traffic.combine,
            "baseline_dispatch": sent[0], "baseline_combine": sent[1],
        }  # fmt: skip
        if any(verdicts):
            return RankResult(gate, {}, counted)
        calls: dict[str, Action] = {
            "baseline_dispatch": dispatch_copies,
            "moelink_dispatch": dispatch,
            "baseline_combine": lambda: baseline.combine(y_rows, home),
            "moelink_combine": lambda: ep.combine(y, recv),
        }
        times = in_turns(calls, WallClock(), Turns(turns=case.iterations, dropped=case.warmup))
    return RankResult(gate, times, counted)


def slowest(results: list[RankResult], *phases: str) -> dict[str, float]:
    """Return milliseconds over the iterations: the sum of ``phases``, each at its slowest rank."""
    per_phase = [[max(column) for column in zip(*(r.microseconds[p] for r in results), strict=True)] for p in phases]
    figure = slowest_rank([[sum(column) / 1e3 for column in zip(*per_phase, strict=True)]])
    return {"median": figure.median, "p20": figure.p20, "p80": figure.p80}


def summarize(case: Case, results: list[RankResult]) -> dict[str, Any]:
    """Return the fields of the result."""
    rows: list[dict[str, Any]] = []
    for name in ("baseline", "moelink"):
        phases: dict[str, tuple[str, ...]] = {one: (f"{name}_{one}",) for one in ("dispatch", "combine")}
        phases["total"] = phases["dispatch"] + phases["combine"]
        sent = {phase: sum(result.bytes[p] for result in results for p in parts) for phase, parts in phases.items()}
        rows.append({
            "name": name, **{f"{phase}_ms": slowest(results, *parts) for phase, parts in phases.items()},
            **{f"{phase}_bytes": count for phase, count in sent.items()},
        })  # fmt: skip
    baseline, ours = rows
    return {
        "case": {**asdict(case), "dtype": "bfloat16", "transport": "gloo"}, "bytes_formula": BYTES_FORMULA,
        "gate": "passed", "rows": rows, "bytes_ratio": ours["total_bytes"] / baseline["total_bytes"],
        "time_ratio": ours["total_ms"]["median"] / baseline["total_ms"]["median"],
    }  # fmt: skip


def print_table(fields: dict[str, Any]) -> None:
    """Print the result as a table."""
    print(f"{'':10}{'dispatch ms':>26}{'combine ms':>26}{'total ms':>26}{'MB':>10}")
    for row in fields["rows"]:
        cells = (row[f"{phase}_ms"] for phase in ("dispatch", "combine", "total"))
        text = "".join(f"{c['median']:>10.1f} ({c['p20']:5.1f} .. {c['p80']:5.1f})" for c in cells)
        print(f"{row['name']:10}{text}{row['total_bytes'] / 1e6:>10.1f}")
    print(f"time ratio {fields['time_ratio']:.2f}, bytes ratio {fields['bytes_ratio']:.2f}")
    print("median (20th .. 80th percentile) of the slowest rank;", fields["bytes_formula"])


def run(args: argparse.Namespace, save: Save) -> int:
    """Run the case and save the result."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    case = Case(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Case)})
    case.of_rank.ep_config(0, case.ranks)  # refuses sizes before ranks start
    results: list[RankResult] = run_ranks(rank_main, case.ranks, case, timeout=600.0)
    failures = [f"rank {rank}: {result.gate}" for rank, result in enumerate(results) if result.gate]
    if failures:
        print("correctness gate failed; nothing was timed\n" + "\n".join(failures))
        return 1
    print_table(save("collective_vs_topk", summarize(case, results)))
    return 0


main = Script(
    "collective", __doc__, lambda parser: add_numbers(parser, asdict(Case())), run, out="collective_vs_topk.json"
).main

if __name__ == "__main__":
    raise SystemExit(main())
