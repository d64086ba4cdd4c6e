"""``create_memory`` and ``ep_init``: from a block of symmetric memory on every rank to pointer tables, counters and an
error record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from moelink.arith import is_integer
from moelink.config import EPConfig
from moelink.contract.combine_kernel import EPCombineKernel, combine_kernel, limit_sms
from moelink.contract.layouts import EPDispatchKernel, dispatch_kernel
from moelink.contract.notes import CallNotes
from moelink.contract.params import EPParams
from moelink.contract.warmup import warm_up
from moelink.control.error_record import ErrorRecord, Losses, raise_losses
from moelink.control.group import connect as connect_ranks
from moelink.control.group import default_device, gather_bytes, part, plain_device, setting_up
from moelink.control.probe import Failure
from moelink.errors import ArgumentError, ProtocolError, UnsupportedError
from moelink.hooks import Hook
from moelink.kernels.launch.device import clock_ticks, is_interpreted, sm_limit_of
from moelink.kernels.launch.grid import sm_count
from moelink.kernels.launch.launcher import Launcher
from moelink.kernels.records import Peers
from moelink.memory import Network, SymmetricMemory, connect
from moelink.memory.choices import choices_in
from moelink.memory.protocol import RECORD_WORDS
from moelink.memory.workspace import COMBINE, DISPATCH, REGIONS, Workspace, pointer_table
from moelink.routing import ExpertMap
from moelink.transports.build import memory_of_group
from moelink.transports.symmetric.rank import give_up
from moelink.version import check_pair


@dataclass(frozen=True)
class EPBuffers:
    """The result of ``ep_init`` on a rank. ``W`` is the ranks that exchange: ``n_ranks``, or 1 with ``skip_a2a``.

    Attributes:
        params: the parameters.
        my_rank: this rank.
        dev_ptrs: [2, 3] int64 on the host: this rank's own buffers, [dispatch, combine] x [send, recv, recv_count];
            0 for the send buffers inside a node.
        pointers: [2, 3, W] int64 on the device: the same of every rank, addresses valid on this device; 0 for ranks of
            other nodes. Across nodes there may be more columns, for the network.
        atomic_counters: the counters of group 0 and of group 1, [24] int64 on the device. Both are one block, whose
            words ``moelink.memory.protocol`` names: calls made, programs arrived, ids refused, rows dropped, bytes
            moved.
        record: [16] int64 on the host: kernels describe errors in it, :meth:`raise_error` reads it.
        errors: its reader.
        memory: the blocks; closing them is the caller's.
        n_sms: SMs that launches keep to.
        spare: [G or W + 1] int32, where numbers go that nobody wants: of groups, and of messages, for dispatches over
            the same routing.
        config: the parameters under this package's names.
        workspace: regions of a block.
        starts: first byte of each group's recv buffer in a block.
        message_of_row: [most rows] int32: the message that each row came with, from a dispatch of many tokens to the
            launch that writes its scales.
        network: the carrier of rows to other nodes; :meth:`close` ends it.
        launcher: the launcher of kernels on this rank's device.
        notes: the arguments of launches.
    """

    params: EPParams
    my_rank: int
    dev_ptrs: Tensor
    pointers: Tensor
    atomic_counters: tuple[Tensor, Tensor]
    record: Tensor = field(repr=False)
    errors: ErrorRecord = field(repr=False)
    memory: SymmetricMemory = field(repr=False)
    n_sms: int
    spare: Tensor = field(repr=False)
    config: EPConfig = field(repr=False)
    workspace: Workspace = field(repr=False)
    starts: tuple[int, int] = field(repr=False)
    message_of_row: Tensor = field(repr=False)
    network: Network = field(repr=False)
    launcher: Launcher = field(repr=False)
    notes: CallNotes = field(default_factory=CallNotes, repr=False)

    def close(self) -> None:
        """Finish all transfers between nodes; before the blocks are closed. Safe to call twice."""
        self.network.close()

    @property
    def device(self) -> torch.device:
        """Where the block and the counters are, and every tensor of a launch must be."""
        return self.pointers.device

    @property
    def me(self) -> int:
        """Index of this rank among those that exchange."""
        return 0 if self.params.skip_a2a else self.my_rank

    @property
    def first_expert(self) -> int:
        """Global id of this rank's first expert."""
        return ExpertMap(self.params.num_experts, self.params.n_ranks).first(self.my_rank)

    @property
    def limit(self) -> int:
        """Clock ticks after which a wait gives up."""
        return clock_ticks(self.params.timeout, self.device)

    @property
    def dispatch_kernel(self) -> EPDispatchKernel:
        """Layout and launch facts of dispatch."""
        return dispatch_kernel(self.params, n_sms=self.n_sms, warp_size=_warp_size())

    @property
    def combine_kernel(self) -> EPCombineKernel:
        """Layout and launch facts of combine."""
        return combine_kernel(self.params, n_sms=self.n_sms, warp_size=_warp_size())

    def warmup(
        self,
        *,
        input_dtypes: Sequence[torch.dtype] | None = None,
        id_dtypes: Sequence[torch.dtype] = (torch.int32,),
        forms: Sequence[str] = ("fused", "split"),
        epilogues: Sequence[Tensor | Hook | None] = (),
        shared: bool = False,
    ) -> None:
        """Compile the launchers' kernels and load them onto the device, without running any or waiting for a rank.

        Without it the first launch of each form compiles, which takes seconds, while peers wait for this rank; two
        ranks on one device would wait for each other. Compiled are: dispatch of each input dtype, with and without
        router weights that travel and with and without an input scale if the format takes one; combine with every kind
        of weights that these parameters allow, and unreduced. A form that is not among them compiles at its first
        launch: other dtypes, a Hook, tensors that do not begin at 16 bytes. Does nothing on CPUs.

        Args:
            input_dtypes: dtypes of ``input_tokens``; default the first that the format takes, bf16.
            id_dtypes: dtypes of ``topk_ids``: int32, int64.
            forms: "fused", "split" and "phases" (of ``combine_kernel``), those that you launch.
            epilogues: the values that you pass as ``epilogue_fn``: a tensor for at least one token, or a Hook.
            shared: whether you pass ``shared=``.

        Raises:
            ArgumentError: a dtype or a form that there is not; nothing was compiled.
        """
        warm_up(self, input_dtypes=input_dtypes, id_dtypes=id_dtypes, forms=forms, epilogues=epilogues, shared=shared)

    def check(self) -> None:
        """Wait for this rank's device, and raise the first error, as :meth:`moelink.Communicator.check` does.

        Not inside a CUDA graph. Kernels check values that the host does not see; only here is it told of lost rows.

        Raises:
            PeerTimeoutError, PeerAbortedError, ProtocolError: as :meth:`raise_error`.
            ProtocolError: a peer sent counts or indices out of range.
            CapacityError: rows did not fit ``output_tokens`` since the last check.
            RoutingError: ids outside [-1, num_experts) were met since the last check, and acted as -1.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.raise_error()
        malformed = self.errors.malformed()
        if malformed is not None:
            raise malformed
        dropped, invalid = self.errors.take_losses()
        capacity = self.config.max_rows if self.notes.fewest_rows is None else self.notes.fewest_rows
        losses = Losses(self.my_rank, dropped, capacity, invalid, self.config.num_experts)
        raise_losses([losses], remedy="allocate more rows for output_tokens")

    def raise_error(self) -> None:
        """Raise the error of the kernels that have run so far; nothing is waited for.

        Raises:
            PeerTimeoutError: a peer did not arrive. These buffers are poisoned: every later launch returns at once.
            PeerAbortedError: a peer refused a call; the next one works.
            ProtocolError: ranks make a call with different options or over different dispatches, and all ranks are
                poisoned as after PeerTimeoutError.
            MoelinkError: the network to other nodes has stopped.
        """
        error = self.errors.error() if self.network.failure is None else self.network.failure.with_traceback(None)
        if isinstance(error, ProtocolError) and not self.record[0]:  # a mismatch, of which no peer has told yet
            self.errors.keep(error)
            give_up(self.launcher, self.workspace, Failure.of(error), me=self.my_rank, timeout=self.params.timeout)
        if error is not None:
            raise error


def _warp_size() -> int:
    return 64 if torch.version.hip else 32


def _rank_of(params: EPParams, memory: SymmetricMemory, my_rank: int | None) -> int:
    """Return which rank this is, after comparing the blocks with the parameters."""
    whole = memory.world_size == params.n_ranks
    if my_rank is not None and not (is_integer(my_rank, 0) and my_rank < params.n_ranks):
        raise ArgumentError("my_rank", f"an integer in [0, {params.n_ranks})", my_rank)
    if my_rank is None and params.skip_a2a and not whole:
        blocks = f"None, and memory with {memory.world_size} of {params.n_ranks} blocks"
        raise ArgumentError("my_rank", f"this process's rank in [0, {params.n_ranks})", blocks)
    rank = memory.rank if my_rank is None else my_rank
    if (whole or not params.skip_a2a) and (not whole or rank != memory.rank):
        raise ArgumentError(
            "memory", f"rank {rank}'s view of {params.n_ranks} blocks", f"rank {memory.rank}'s of {memory.world_size}"
        )
    return rank


def ep_init(params: EPParams, memory: SymmetricMemory, *, my_rank: int | None = None) -> EPBuffers:
    """Lay the buffers of both groups out in ``memory`` and return their addresses, this rank's number and its counters.

    Every rank calls it with the same parameters; it waits for nobody. The blocks must be zero, as they are when new,
    or have been used with the same parameters only. One process with many devices calls it once per device.

    Args:
        params: sizes and options.
        memory: this rank's view of all ranks' blocks, :attr:`EPParams.nbytes` or more each. With ``skip_a2a`` a block
            of one's own is enough.
        my_rank: this rank; default that of ``memory``. With ``skip_a2a`` it is needed unless ``memory`` holds a block
            of every rank, because a block of one's own does not say whose it is.

    Raises:
        ArgumentError: the blocks are too few or too small, or there is no such rank.
        ConfigError: ``params.n_sms`` is more than the device has.
        UnsupportedError: the block of a peer of this node cannot be addressed from here, the device is a CPU and
            kernels are compiled, there is no network for these devices, or torch or Triton is too old.

    Example: two ranks in one process (``TRITON_INTERPRET=1`` on CPUs):

        >>> from moelink.memory import create_all
        >>> params = EPParams(dispatch_fmt_str="BF16", hidden_size=16, top_k=2, n_experts=4, max_token_per_rank=8,
        ...                   n_gpus_per_node=2)
        >>> eps = [ep_init(params, memory) for memory in create_all(["cpu", "cpu"], params.nbytes)]
        >>> eps[1].my_rank, tuple(eps[1].dev_ptrs.shape), tuple(eps[1].pointers.shape)
        (1, (2, 3), (2, 3, 2))
    """
    check_pair(torch.__version__, triton.__version__)
    rank = _rank_of(params, memory, my_rank)
    device = memory.local.device
    if memory.nbytes < params.nbytes:
        raise ArgumentError("memory", f"blocks of at least {params.nbytes} bytes", f"{memory.nbytes} bytes")
    if device.type == "cpu" and not is_interpreted():
        raise UnsupportedError(
            "memory: expected Triton's interpreter for a CPU, got compiled kernels; set TRITON_INTERPRET=1 before "
            "anything imports triton"
        )
    workspace = params.workspace
    blocks = memory.pointers[memory.rank : memory.rank + 1] if params.skip_a2a else memory.pointers
    size = workspace.node_size
    for peer, address in enumerate(blocks.tolist()):
        if address == 0 and (params.skip_a2a or peer // size == rank // size):
            raise UnsupportedError(
                f"rank {rank} cannot address the memory of rank {peer}: P2P is not supported between their devices: "
                f"expected an address, got 0; use moelink.init(transport='collective')"
            )
    network = connect(memory, workspace, rank)
    pointers = pointer_table(workspace, blocks if params.skip_a2a else network.table)
    control = workspace.regions["control"].view(memory.local)
    record = torch.zeros(RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    n_sms = limit_sms(params.n_sms, device)
    return EPBuffers(
        params=params,
        my_rank=rank,
        dev_ptrs=pointers[:, :, 0 if params.skip_a2a else rank].cpu(),
        pointers=pointers,
        atomic_counters=(control, control),
        record=record,
        errors=ErrorRecord(
            record,
            control,
            rank=rank,
            me=0 if params.skip_a2a else rank,
            world_size=workspace.world_size,
            ranks_per_node=workspace.node_size if workspace.inter_node_ranks else None,
            choices=partial(choices_in, memory.local, workspace),
        ),
        memory=memory,
        n_sms=n_sms,
        spare=torch.empty(
            max(params.config(rank).num_groups, workspace.world_size + 1), dtype=torch.int32, device=device
        ),
        config=params.config(rank),
        workspace=workspace,
        starts=(workspace.regions[REGIONS[DISPATCH][0]].offset, workspace.regions[REGIONS[COMBINE][0]].offset),
        network=network,
        launcher=Launcher(
            Peers(network.table, record, control),
            device,
            network=network,
            num_sms=sm_limit_of(params.config(rank), device),
            available=sm_count(device),
        ),
        message_of_row=torch.empty(params.config(rank).max_rows, dtype=torch.int32, device=device),
    )


def create_memory(
    params: EPParams, *, device: torch.device | str | None = None, group: dist.ProcessGroup | None = None
) -> SymmetricMemory:
    """Allocate a block of ``params.nbytes`` bytes on every rank, zero, for :func:`~moelink.contract.ep_init`.

    Collective, as the contract's ``ep.init``, which allocates. Processes on GPUs use torch's symmetric memory, between
    nodes NVSHMEM's, and processes on CPUs shared memory without a name. The block is the caller's: close ``ep`` first,
    then it, on every rank. A process that drives all ranks uses ``moelink.memory.create_all``.

    Args:
        params: of the launchers, the same on every rank.
        device: of this rank; default CUDA device LOCAL_RANK, or the CPU without CUDA.
        group: the ranks, in their order; default all, by torch's default group or by torchrun's variables, from which
            a default group is then made. One process alone needs neither.

    Returns:
        This rank's view. With ``skip_a2a`` it holds this rank's block alone: pass ``my_rank`` to ``ep_init``.

    Raises:
        ArgumentError: there are not ``params.n_ranks`` ranks; raised on every rank.
        ConfigMismatchError: ranks ask for blocks of different sizes.
        PeerTimeoutError: a rank did not arrive within ``params.timeout`` seconds.
        UnsupportedError: memory cannot be shared between these devices; the message says why.
    """
    place = default_device() if device is None else plain_device(device)
    world = connect_ranks(group, place, params.timeout)
    with setting_up(world):
        # No rank may leave, or raise, before all have met (control.meeting), and skip_a2a exchanges nothing below.
        gather_bytes(world, b"", params.timeout)
        if world.world_size != params.n_ranks:
            raise ArgumentError("group", f"{params.n_ranks} ranks, as params say", f"{world.world_size}")
        memory = memory_of_group(params.config(world.rank), params.nbytes, place, world, name="contract")
    part(world)
    return memory
