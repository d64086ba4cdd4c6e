"""Measure FlashInfer for the preset ``roles``: a process that answers one case after the other.

All ranks of its one-sided all-to-all live on one device; their workspaces are the rows of one tensor. A rank's dispatch
stores rows, tells all ranks and waits for all ranks in one kernel, and so does its combine, which then reads the rows
of all. So there are two roles, ``dispatch`` and ``combine``. Ranks run one after the other on one stream. Before each
phase, outside of what is timed, a graph writes the flags that the ranks will wait for.

Programmatic dependent launch is FlashInfer's default and stays on: the launch of a rank overlaps the end of the one
before it, which may make its figures a little better than those of ranks with a device of their own.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moelink.arith import align_up
from moelink.routing import ExpertMap
from moelink_bench import presets
from moelink_bench.peers import payloads, require_flashinfer
from moelink_bench.roles_worker import Case, Inputs, capture, replay, serve

PHASES = ("dispatch", "combine")
FLAGS = {"dispatch": "DISPATCH_COMPLETION_FLAGS_OFFSET_INDEX", "combine": "COMBINE_COMPLETION_FLAGS_OFFSET_INDEX"}
EPOCH = "FLAG_VAL_OFFSET_INDEX"


def library() -> Any:
    """Return FlashInfer's module. Raises UnsupportedError where it is missing or another release."""
    require_flashinfer()
    return importlib.import_module("flashinfer.comm.trtllm_moe_alltoall")


def offsets_of(module: Any, metainfo: Tensor) -> dict[str, int]:
    """Return bytes from the begin of a rank's workspace to each of its fields, by the library's name of the field."""
    names, indices = module.get_moe_alltoall_module().moe_a2a_get_metainfo_index_pairs()
    fields = {str(name).removeprefix("MOE_A2A_"): int(index) for name, index in zip(names, indices, strict=True)}
    return {name: int(metainfo[index]) for name, index in fields.items() if index < len(metainfo)}


class Ranks:
    """All ranks of one case.

    Attributes:
        sent: [source rank][payload] tensors [tokens, n]: quantised rows, scales if any, ids, weights.
        goes: [source rank] bool [tokens, ranks]: the token has experts of that rank.
    """

    def __init__(self, module: Any, case: Case, inputs: Inputs) -> None:
        self.module, self.case = module, case
        self.ids, device = inputs.ids, inputs.x[0].device
        same = presets.Case(
            tokens=case.tokens, hidden_size=case.hidden, num_experts=case.experts, topk=case.topk, format=case.format
        )
        self.sent = [
            payloads(same, x, ids, weights)
            for x, ids, weights in zip(inputs.x, inputs.ids, inputs.weights, strict=True)
        ]
        owner = ExpertMap(case.experts, case.ranks).owner
        self.goes = [
            torch.stack([(owner(ids) == rank).any(1) for rank in range(case.ranks)], 1)  # type: ignore[union-attr]
            for ids in inputs.ids
        ]
        self.row_bytes = sum(payload[0].nbytes for payload in self.sent[0])
        size = module.moe_a2a_get_workspace_size_per_rank(case.ranks, case.tokens, self.row_bytes, 2 * case.hidden)
        self.workspace = torch.zeros(case.ranks, align_up(size, 128), dtype=torch.uint8, device=device)
        self.metainfo = [
            module.moe_a2a_initialize(self.workspace, rank, case.ranks, case.tokens) for rank in range(case.ranks)
        ]
        self.offsets = offsets_of(module, self.metainfo[0])
        self.received: list[list[Tensor]] = []
        self.ready: list[Tensor] = []
        self.combined: list[Tensor] = []

    def _words(self, name: str, count: int) -> Tensor:
        """[ranks, count] int32: a field of every rank's workspace."""
        begin = self.offsets[name] // 4
        return self.workspace.view(torch.int32)[:, begin : begin + count]

    def tell(self, phase: str) -> None:
        """Write what every rank's next call of ``phase`` waits for: its own count of calls, from every rank."""
        self._words(FLAGS[phase], self.case.ranks).copy_(self._words(EPOCH, 1) + 1)

    def dispatch(self) -> None:
        """Dispatch of every rank, whose flags are written."""
        case, self.received, offsets = self.case, [], []
        for rank in range(case.ranks):
            rows, offset, _ = self.module.moe_a2a_dispatch(
                self.ids[rank], self.sent[rank], self.workspace, self.metainfo[rank], case.tokens, rank, case.ranks,
                case.topk, case.experts,
            )  # fmt: skip
            self.received.append(rows)
            offsets.append(int(offset))
        count = case.ranks * case.tokens * case.hidden * 2
        self.ready = [
            self.workspace[rank, begin : begin + count].view(torch.bfloat16).view(case.ranks, case.tokens, case.hidden)
            for rank, begin in enumerate(offsets)
        ]

    def combine(self) -> None:
        """Combine of every rank, whose flags are written, from rows that lie in its workspace."""
        case = self.case
        begins = [int(ready.data_ptr() - self.workspace[rank].data_ptr()) for rank, ready in enumerate(self.ready)]
        self.combined = [
            self.module.moe_a2a_combine(
                self.ready[rank], case.tokens, self.workspace, self.metainfo[rank], case.tokens, rank, case.ranks,
                case.topk, begins[rank], payload_in_workspace=True,
            )
            for rank in range(case.ranks)
        ]  # fmt: skip

    def steps(self) -> list[Callable[[], None]]:
        """Flags and phases, in their order. Only the phases' times are of interest."""
        return [lambda: self.tell("dispatch"), self.dispatch, lambda: self.tell("combine"), self.combine]

    def fault(self) -> str:
        """Return what is wrong after all steps with rows of ones to combine, or ""."""
        for rank in range(self.case.ranks):
            for source, goes in enumerate(self.goes):
                chosen = goes[:, rank]
                count = int(chosen.sum())
                for sent, received in zip(self.sent[source], self.received[rank], strict=True):
                    want = sent.view(torch.uint8)[chosen].sum(dtype=torch.int64)
                    if not torch.equal(received[source, :count].view(torch.uint8).sum(dtype=torch.int64), want):
                        return f"dispatch lost or changed bytes from rank {source} to rank {rank}"
            if not bool((self.combined[rank] == self.goes[rank].sum(1, keepdim=True).to(torch.bfloat16)).all()):
                return f"combine on rank {rank} does not sum one row of each rank"
        return ""

    def bytes(self) -> dict[str, int]:
        """Bytes that each phase of one rank reads and writes in device memory, averaged over ranks, at the least."""
        case, wide = self.case, 2 * self.case.hidden
        messages = sum(int(goes.sum()) for goes in self.goes) // case.ranks
        return {
            "dispatch": (case.tokens + messages) * self.row_bytes,
            "combine": (case.tokens + messages) * wide,
        }


def check_once(ranks: Ranks, steps: list[Callable[[], None]]) -> None:
    """Run ``steps`` with rows of ones to combine. Raises RuntimeError where the results are wrong."""
    for number, step in enumerate(steps):
        step()
        if number == 1:
            for ready in ranks.ready:
                ready.fill_(1)
    torch.cuda.synchronize()
    fault = ranks.fault()
    if fault:
        raise RuntimeError(f"{ranks.case}: {fault}")


def measure(case: Case, device_name: str, *, check: bool) -> dict[str, Any]:  # noqa: ARG001 - always checked
    """FlashInfer's times for ``case`` in microseconds of one rank, and its bytes.

    Raises:
        RuntimeError: its results are wrong, before or after what is timed.
    """
    module, device = library(), torch.device(device_name)
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        inputs = Inputs(case, device)
        inputs.y.clear()
        ranks = Ranks(module, case, inputs)
        check_once(ranks, ranks.steps())
        graphs = capture(ranks.steps())
        samples = replay(graphs)
        check_once(ranks, [graph.replay for graph in graphs])
        found = dict(zip(PHASES, samples[1::2], strict=True))
        times = {phase: statistics.median(each) / case.ranks for phase, each in found.items()}
        said = {"times": times, "bytes": ranks.bytes(), "kernels": {}}
        for graph in graphs:
            graph.reset()
    del ranks, graphs
    gc.collect()
    torch.cuda.empty_cache()  # the process that measures moelink lives on the same device
    return said


def main() -> None:
    """Answer cases."""
    parser = argparse.ArgumentParser(description="Measure FlashInfer; started by moelink_bench.roles_preset.")
    parser.add_argument("--device", required=True, help="cuda:N")
    serve(parser.parse_args().device, measure)


if __name__ == "__main__":
    main()
