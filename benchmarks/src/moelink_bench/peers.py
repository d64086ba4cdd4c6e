"""Libraries other than moelink: FlashInfer's one-sided all-to-all, and torch's ``all_to_all_vdev_2d``.

FlashInfer (``flashinfer.comm.MoeAlltoAll``) takes part where it is installed. ``all_to_all_vdev_2d`` moves rows sorted
by expert from symmetric memory to symmetric memory over NVSHMEM. FlashInfer as a whole operation also brings rows by
expert, and sums a token's rows on the way home. Torch's symmetric memory has one backend per process
and moelink's transport uses another one, so both run in processes of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moelink.arith import align_up
from moelink.errors import UnsupportedError
from moelink.formats import get_format
from moelink.names import Layout
from moelink.routing import ExpertMap
from moelink.tools.common import version_of
from moelink_bench.contenders import Calls, difference_from_truth, expert_factor
from moelink_bench.presets import Case, Settings
from moelink_bench.timing import everyone
from moelink_bench.workload import Workload, count_messages, num_copies, output_rows, rank_ids, rows_needed

if TYPE_CHECKING:
    from moelink_bench.permute import Permuted

FLASHINFER = "FlashInfer one-sided"
FLASHINFER_LEAVES_OUT = "bringing rows out of its workspace and home through it, quantising (its rows already are)"
FLASHINFER_MARKED = "FlashInfer as engines call it"
"""vLLM, SGLang and TensorRT-LLM pass ``invalid_token_expert_id``."""

FLASHINFER_RELEASE = "0.7.2.post1"
"""The release that is measured, the newest when it was chosen; constraints-cuda.txt names it too."""
FLASHINFER_INSTALL = f"pip install flashinfer-python=={FLASHINFER_RELEASE}"


def flashinfer_refusal() -> str:
    """Return why FlashInfer is not measured here, and what to do; "" when it is.

    Another release than :data:`FLASHINFER_RELEASE` is refused: an older one may be slower, and tables do not tell.
    """
    found = "none"
    if importlib.util.find_spec("flashinfer") is not None:
        found = version_of("flashinfer-python") or version_of("flashinfer") or "an unknown one"
    if found.partition("+")[0] == FLASHINFER_RELEASE:
        return ""
    return f"expected flashinfer-python {FLASHINFER_RELEASE}, got {found}; run {FLASHINFER_INSTALL}"


def require_flashinfer() -> None:
    """Raise UnsupportedError where :func:`flashinfer_refusal` says why."""
    refusal = flashinfer_refusal()
    if refusal:
        raise UnsupportedError(refusal)


class _TorchComm:
    """The group that FlashInfer's set-up needs, over torch.distributed."""

    def Get_rank(self) -> int:  # noqa: N802
        return dist.get_rank()

    def Get_size(self) -> int:  # noqa: N802
        return dist.get_world_size()

    def allgather(self, data: Any) -> list[Any]:
        return everyone(data)

    def bcast(self, data: Any, root: int = 0) -> Any:
        return everyone(data if dist.get_rank() == root else None)[root]

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(1))

    def Split(self, color: int, key: int) -> _TorchComm:  # noqa: N802
        return self


def open_flashinfer(
    *, rank: int, world_size: int, max_tokens: int, topk: int, num_experts: int, hidden_size: int
) -> Any:
    """Open FlashInfer's ``MoeAlltoAll`` over the default group. Collective. Raises UnsupportedError without it."""
    require_flashinfer()
    comm = importlib.import_module("flashinfer.comm")
    mnnvl = importlib.import_module("flashinfer.comm.mnnvl")
    mapping = comm.Mapping(
        rank=rank, world_size=world_size, gpus_per_node=world_size, tp_size=world_size, moe_ep_size=world_size
    )
    return comm.MoeAlltoAll(
        mapping, max_num_tokens=max_tokens, top_k=topk, num_experts=num_experts, hidden_size=hidden_size,
        mnnvl_config=mnnvl.MnnvlConfig(comm_backend=_TorchComm()),
    )  # fmt: skip


class FlashInferContender(Calls):
    """Dispatch of quantised rows, scales, ids and weights; combine of one bf16 row per (token, rank)."""

    name = FLASHINFER
    note = f"{FLASHINFER_LEAVES_OUT}, marking the ids of rows that no token fills"
    alternates = True

    def __init__(self, workload: Workload, *, rank: int, world_size: int) -> None:
        """Set up FlashInfer. Collective. Raises UnsupportedError where :func:`flashinfer_refusal` says why."""
        self._case = case = workload.case
        self._moe = open_flashinfer(
            rank=rank, world_size=world_size, max_tokens=case.tokens, topk=case.topk, num_experts=case.num_experts,
            hidden_size=case.hidden_size,
        )  # fmt: skip
        self._ids = [batch.topk_ids for batch in workload.batches]
        self._payloads = [payloads(case, batch.x, batch.topk_ids, batch.topk_weights) for batch in workload.batches]

    def dispatch(self, copy: int) -> Tensor:
        self._arrived(copy)
        return self._ready()

    def _arrived(self, copy: int) -> list[Tensor]:
        """Dispatch input ``copy``, and return what arrived, [ranks, tokens, ...] each."""
        arrived: list[Tensor] = self._moe.dispatch(self._ids[copy], self._payloads[copy], self._case.tokens)
        return arrived

    def _ready(self) -> Tensor:
        """Return the rows of its workspace that combine takes, [ranks, tokens, hidden_size] bf16."""
        case = self._case
        ready: Tensor = self._moe.get_combine_payload_tensor_in_workspace(case.tokens, case.hidden_size, torch.bfloat16)
        return ready.view(-1, case.tokens, case.hidden_size)

    def combine(self, copy: int, handle: Tensor) -> Tensor:
        combined: Tensor = self._moe.combine(handle, self._case.tokens, payload_in_workspace=True)
        return combined

    def check(self) -> str:
        """Combine rows of ones, and expect the number of ranks that each token went to."""
        case, ids = self._case, self._ids[0]
        ready = self.dispatch(0)
        ready.fill_(1)
        combined = self.combine(0, ready)
        owner = ExpertMap(case.num_experts, dist.get_world_size()).owner(ids)
        ranks = sum((owner == rank).any(1).to(combined.dtype) for rank in range(dist.get_world_size()))
        return "" if bool((combined == ranks[:, None]).all()) else "combine does not sum one row of each rank"  # type: ignore[index]


class FlashInferMarked(FlashInferContender):
    """The same with ids -1 in rows that no token fills, as moelink returns them, by a kernel after its dispatch."""

    name = FLASHINFER_MARKED
    note = FLASHINFER_LEAVES_OUT

    def _arrived(self, copy: int) -> list[Tensor]:
        sent = self._payloads[copy]
        arrived: list[Tensor] = self._moe.dispatch(
            self._ids[copy], sent, self._case.tokens, invalid_token_expert_id=-1, expert_id_payload_index=len(sent) - 2
        )
        return arrived

    def check(self) -> str:
        """Expect -1 in the ids of rows that no token fills, and what :class:`FlashInferContender` expects."""
        rank = dist.get_rank()
        sent = everyone(count_messages(self._ids[0], self._case, dist.get_world_size()))
        counts = [each[rank] for each in sent]
        ids = self._arrived(0)[-2]
        marked = [bool((ids[source, count:] == -1).all()) for source, count in enumerate(counts)]
        named = [bool((ids[source, :count] >= 0).all()) for source, count in enumerate(counts)]
        self.combine(0, self._ready())
        return super().check() or ("" if all(marked + named) else "ids of rows that no token fills are not marked")


def payloads(case: Case, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> list[Tensor]:
    """Return the payloads of each token: quantised rows, row-major scales if there are any, ids, weights."""
    quantized = get_format(case.format).quantize(x)
    rows = [quantized.payload] if quantized.scales is None else [quantized.payload, quantized.scales]
    return [*(row.view(torch.uint8) if row.element_size() == 1 else row for row in rows), topk_ids, topk_weights]


FLASHINFER_WHOLE = "FlashInfer + permute + sum"
WHOLE_LEAVES_OUT = (
    "quantising (its rows already are), the layout of scales and the padding that grouped products take, a fixed order "
    "of an expert's rows; permute and sum are Triton kernels of this benchmark"
)


class FlashInferWhole(FlashInferMarked):
    """Dispatch and permute; sum and combine. Its handle is what :meth:`Permutation.permute` returned."""

    name = FLASHINFER_WHOLE
    note = WHOLE_LEAVES_OUT

    def __init__(self, workload: Workload, *, rank: int, world_size: int) -> None:
        """Set up FlashInfer. Collective. Raises UnsupportedError as :class:`FlashInferContender` does."""
        from moelink_bench.permute import Permutation  # which has kernels

        super().__init__(workload, rank=rank, world_size=world_size)
        self._workload = workload
        case, experts = workload.case, ExpertMap(workload.case.num_experts, world_size)
        self._first, self._slots = experts.first(rank), world_size * case.tokens
        self._permutation = Permutation(
            first=self._first, num_local=experts.num_local(rank), capacity=workload.capacity,
            device=workload.batches[0].x.device,
        )  # fmt: skip

    def dispatch(self, copy: int) -> Permuted:  # type: ignore[override]
        flat = [each.reshape(self._slots, -1) for each in self._arrived(copy)]
        return self._permutation.permute(flat[0], flat[1] if len(flat) > 3 else None, *flat[-2:])

    def combine(self, copy: int, handle: Permuted) -> Tensor:  # type: ignore[override]
        return self._home(self._workload.y[copy], handle)

    def _home(self, y: Tensor, handle: Permuted) -> Tensor:
        ready = self._ready()
        self._permutation.sum(y, handle, ready.view(self._slots, self._case.hidden_size))
        return super().combine(0, ready)

    def experts(self, handle: Permuted) -> Tensor:
        """[capacity, hidden_size] bf16: the dequantised rows, times what their experts multiply with."""
        case, fmt, counts = self._case, get_format(self._case.format), self._permutation.counts.long()
        total = int(counts.sum())
        scales = handle.scales
        if scales is not None and fmt.scale_dtype is not None:
            scales = scales[:total].view(fmt.scale_dtype)
        rows = fmt.dequantize(handle.rows[:total].view(fmt.payload_dtype), scales)
        expert = self._first + torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        y = torch.zeros(self._workload.capacity, case.hidden_size, dtype=torch.bfloat16, device=rows.device)
        y[:total] = (rows * expert_factor(expert)[:, None]).to(torch.bfloat16)
        return y

    def check(self) -> str:
        """Run experts whose result is known, with the first two inputs, and compare what comes home with it."""
        for copy in range(min(2, self._workload.copies)):
            handle = self.dispatch(copy)
            combined = self._home(self.experts(handle), handle)
            fault = difference_from_truth(combined, self._workload.batches[copy], self._case)
            if fault:
                return fault
        return ""


def flashinfer_contenders(layout: Layout) -> tuple[type[FlashInferContender], ...]:
    """Return the contenders for moelink's ``layout``: FlashInfer alone corresponds to layout "rank"."""
    return (FlashInferContender, FlashInferMarked) if layout == "rank" else (FlashInferWhole,)


VDEV = "torch all_to_all_vdev_2d"
MOST_GROUPS = 16
"""Groups of rows per rank that dispatch takes: 512 threads in tiles of 32."""

ENVIRONMENT = {"NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_REMOTE_TRANSPORT": "none", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Set where unset: these calls need no multicast and, on one machine, no network."""


def group_of_expert(case: Case, world_size: int) -> Tensor:
    """Return [num_experts] int64: the group of rows, counted over all ranks, that an expert's rows go to.

    One group per expert, or :data:`MOST_GROUPS` of neighbouring experts where a rank has more.

    Example: 64 experts on 2 ranks: expert 0 and 1 share group 0, expert 32 is the first of group 16.

    Raises:
        UnsupportedError: ranks own different numbers of experts.
    """
    if case.num_experts % world_size:
        raise UnsupportedError(
            f"it needs as many experts on every rank, {case.num_experts} on {world_size} ranks are not"
        )
    local = case.num_experts // world_size
    groups = min(local, MOST_GROUPS)
    expert = torch.arange(case.num_experts)
    return expert // local * groups + expert % local * groups // local


def leaves_out(case: Case, world_size: int) -> str:
    """Return the work that this operation omits."""
    local = case.num_experts // world_size
    grouping = f"groups of {local // MOST_GROUPS} experts or more instead of each expert, " * (local > MOST_GROUPS)
    return (
        f"{grouping}sorting and gathering rows by expert (its input is sorted), quantising (its rows already are, "
        "scales inside), ids, weights and sources; combine returns every row, neither weighted nor summed"
    )


@dataclass(frozen=True)
class Sizes:
    """Of one case, the same on all ranks.

    Attributes:
        copies: rotated inputs.
        groups: of rows, of all ranks.
        sent: rows that a rank sends.
        rows: most that a rank receives, with a margin.
        row_bytes, home_bytes: of a row out (payload and scales, padded to 16) and home.
    """

    copies: int
    groups: int
    sent: int
    rows: int
    row_bytes: int
    home_bytes: int

    @classmethod
    def of(cls, case: Case, settings: Settings, world_size: int) -> Sizes:
        """Compute the sizes of ``case``. Raises UnsupportedError as :func:`group_of_expert` does."""
        copies = num_copies(case, settings)
        groups = int(group_of_expert(case, world_size)[-1]) + 1
        needed = rows_needed(case, seed=settings.seed, copies=copies, world_size=world_size)
        rows = output_rows(case, needed, world_size) + groups // world_size  # an empty group takes a row
        row_bytes = align_up(get_format(case.format).bytes_per_token(case.hidden_size), 16)
        return cls(copies, groups, case.tokens * case.topk, rows, row_bytes, case.hidden_size * 2)


class Pool:
    """Symmetric memory for all cases, allocated once: releasing it would be collective.

    Attributes:
        sends, receives: uint8, rows to dispatch (all copies), rows received.
        results, returns: uint8, rows to send home, rows that came home.
        splits: int64, rows per group, of all copies.
        arrivals, homecomings: int64, rows per group and their starts, after dispatch and after combine, of all copies.
    """

    def __init__(self, sizes: Sequence[Sizes], device: torch.device) -> None:
        """Allocate room for the largest of ``sizes``. Collective."""
        module = symmetric_memory()

        def empty(count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            made: Tensor = module.empty(count, dtype=dtype, device=device)
            module.rendezvous(made, group_name())
            return made

        self.sends = empty(max(s.copies * s.sent * s.row_bytes for s in sizes))
        self.receives = empty(max(s.rows * s.row_bytes for s in sizes))
        self.results = empty(max(s.rows * s.home_bytes for s in sizes))
        self.returns = empty(max(s.sent * s.home_bytes for s in sizes))
        most = max(s.copies * s.groups for s in sizes)
        self.splits = empty(most, torch.int64)
        self.arrivals, self.homecomings = empty(2 * most, torch.int64), empty(2 * most, torch.int64)


def _front(memory: Tensor, *shape: int) -> Tensor:
    """Return the beginning of ``memory`` as a tensor of ``shape``."""
    return memory[: math.prod(shape)].view(shape)


class VdevContender(Calls):
    """Rows of one workload in symmetric memory, and the two calls."""

    name = VDEV

    def __init__(self, case: Case, settings: Settings, pool: Pool, *, rank: int, world_size: int) -> None:
        sizes = Sizes.of(case, settings, world_size)
        self.note = leaves_out(case, world_size)
        self._group = group_name()
        self._sends = _front(pool.sends, sizes.copies, sizes.sent, sizes.row_bytes)
        self._receives = _front(pool.receives, sizes.rows, sizes.row_bytes)
        self._results = _front(pool.results, sizes.rows, sizes.home_bytes)
        self._returns = _front(pool.returns, sizes.sent, sizes.home_bytes)
        self._splits = _front(pool.splits, sizes.copies, sizes.groups)
        self._arrivals = _front(pool.arrivals, sizes.copies, 2, sizes.groups)
        self._homecomings = _front(pool.homecomings, sizes.copies, 2, sizes.groups)
        self._sends.random_(0, 256, generator=torch.Generator(self._sends.device).manual_seed(rank))
        group = group_of_expert(case, world_size)
        for copy in range(sizes.copies):
            ids = rank_ids(case, seed=settings.seed, rank=rank, copy=copy, world_size=world_size)
            self._splits[copy].copy_(torch.bincount(group[ids.flatten().long()], minlength=sizes.groups))
        torch.cuda.synchronize(self._sends.device)

    def dispatch(self, copy: int) -> int:
        torch.ops.symm_mem.all_to_all_vdev_2d(
            self._sends[copy], self._receives, self._splits[copy], self._arrivals[copy], self._group, major_align=1
        )
        return copy

    def combine(self, copy: int, handle: int) -> Tensor:
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(
            self._results, self._returns, self._arrivals[copy], self._homecomings[copy], self._group
        )
        return self._returns

    def check(self) -> str:
        """Return "" when all bytes that were sent arrived, in sum over the ranks, each way. Collective."""
        faults = []
        self._receives.zero_()
        self._results.random_(0, 256)
        self.combine(0, self.dispatch(0))
        torch.cuda.synchronize()
        counts, starts = self._arrivals[0].tolist()
        used = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
        for phase, sent, received in (
            ("dispatch", [self._sends[0]], [self._receives[rows] for rows in used]),
            ("combine", [self._results[rows] for rows in used], [self._returns]),
        ):
            both = torch.tensor([sum(int(part.sum(dtype=torch.int64)) for part in parts) for parts in (sent, received)])
            dist.all_reduce(both)
            if both[0] != both[1]:
                faults.append(f"{phase} lost or changed bytes")
        return "; ".join(faults)


def group_name() -> str:
    """Return the name by which torch's operators know the default group."""
    return str(dist.distributed_c10d._get_default_group().group_name)


def symmetric_memory() -> Any:
    """Return torch's module with its NVSHMEM backend chosen.

    Raises:
        UnsupportedError: this torch or this machine has none.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        raise UnsupportedError(f"this torch has no symmetric memory: {error}") from error
    if not module.is_nvshmem_available():
        raise UnsupportedError("NVSHMEM is not there (torch finds no libnvshmem_host.so.3)")
    if not hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d"):
        raise UnsupportedError("this torch has no all_to_all_vdev_2d")
    module.set_backend("NVSHMEM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch no longer need the call, and say so
        module.enable_symm_mem_for_group(group_name())
    return module
