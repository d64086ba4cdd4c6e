"""Make a communicator: ``moelink.init``."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from moelink.communicator import Communicator, open_communicator
from moelink.config import MAX_TIMEOUT, EPConfig
from moelink.control.admission import arrive, named
from moelink.control.group import connect, default_device, leave, plain_device, with_spare
from moelink.control.handshake import refuse
from moelink.errors import ConfigError, UnsupportedError
from moelink.metrics import endpoint_of_environment
from moelink.names import FormatName, Layout, Mode, OnFailure, TransportName
from moelink.transports.build import refuse_newcomers


def init(
    *,
    num_experts: int,
    topk: int,
    hidden_size: int,
    max_tokens_per_rank: int,
    dispatch_format: FormatName = "bf16",
    combine_dtype: torch.dtype = torch.bfloat16,
    combine_format: str | None = None,
    layout: Layout = "expert",
    expert_alignment: int = 1,
    capacity: int | None = None,
    rows_per_expert: int | None = None,
    pre_reduce: bool | None = None,
    batch_invariant: bool = False,
    fused_shared_expert: bool = False,
    global_ids: bool = False,
    zero_copy: bool = False,
    mode: Mode = "alltoall",
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    transport: TransportName = "auto",
    ranks_per_node: int | None = None,
    two_level: bool | Literal["auto"] = False,
    num_sms: int | None = None,
    lanes: int = 1,
    timeout: float = 60.0,
    on_failure: OnFailure = "raise",
    spare_ranks: int = 0,
) -> Communicator:
    """Make this rank's communicator. Collective over ``group``, torchrun's world, or one rank without either.

    Parameters other than ``group``, ``device`` and ``spare_ranks`` are the fields of :class:`moelink.EPConfig`. All
    ranks must pass the same values, but for ``device``.

    Args:
        group: the ranks of the communicator; default: torchrun's world.
        device: of this rank; default: the CUDA device of LOCAL_RANK, or the CPU of a machine without CUDA devices.
        spare_ranks: ranks beyond those of ``group``, which are masked at first. ``world_size`` counts them, memory is
            laid out for them, and they own experts, which are absent until processes take their places
            (:func:`join`).

    Raises:
        ConfigError: a value is not acceptable; peers get PeerAbortedError.
        ConfigMismatchError: ranks passed different values; raised on every rank.
        PeerTimeoutError: a rank did not arrive within ``timeout``.

    Example:
        >>> import torch, moelink
        >>> with moelink.init(num_experts=4, topk=2, hidden_size=8, max_tokens_per_rank=3) as ep:
        ...     x = torch.ones(3, 8, dtype=torch.bfloat16)
        ...     recv = ep.dispatch(x, torch.tensor([[0, 1], [1, 2], [3, -1]]), torch.full((3, 2), 0.5))
        ...     out = ep.combine(recv.tokens, recv)
        >>> recv.row_offsets.tolist()
        [0, 1, 3, 4, 5]
        >>> out[:, 0].tolist()
        [1.0, 1.0, 0.5]
    """
    settings = {name: value for name, value in locals().items() if name not in ("group", "device", "spare_ranks")}
    refused: ConfigError | None = None
    try:
        where = default_device() if device is None else plain_device(device)
    except ConfigError as error:
        refused, where = error, default_device()
    usable = timeout if isinstance(timeout, (int, float)) and 0 < timeout <= MAX_TIMEOUT else 60.0
    world = connect(group, where, usable)
    try:
        if refused is not None:
            raise refused
        if isinstance(spare_ranks, bool) or not isinstance(spare_ranks, int) or spare_ranks < 0:
            raise ConfigError("spare_ranks", "an integer >= 0", spare_ranks)
        config = EPConfig(**settings, world_size=world.world_size + spare_ranks, rank=world.rank)
        endpoint = endpoint_of_environment(world.rank)
    except (ConfigError, UnsupportedError) as error:
        try:
            refuse(world, usable)
        finally:
            leave(world, error)
        raise
    ep = open_communicator(config, where, with_spare(world, spare_ranks))
    if endpoint is not None:
        endpoint.collector.add(ep)
    return ep


def join(
    store: Store, rank: int, world_size: int, *, device: torch.device | str | None = None, **settings: Any
) -> Communicator:
    """Take the place of a masked or spare rank of a running communicator, whose ranks call
    :meth:`~moelink.Communicator.admit`.

    Args:
        store: the store that they pass to ``admit``.
        rank, world_size: the place, and the number of ranks of the communicator, masked and spare ones included.
        device: as of :func:`init`.
        settings: the other keywords of :func:`init`, as they passed them, without ``group`` and ``spare_ranks``.

    Raises:
        ConfigError: a value is not acceptable.
        ConfigMismatchError: the others have another version of moelink or other settings; raised on every rank.
        UnsupportedError: symmetric memory of several nodes.
        PeerTimeoutError: nobody admits this rank within ``timeout``, or another rank did not come.
    """
    where = default_device() if device is None else plain_device(device)
    config = EPConfig(**settings, world_size=world_size, rank=rank)
    refuse_newcomers("join", config)
    world = arrive(rank, store, config.timeout)
    with named(world.ranks, rank):
        return open_communicator(config, where, world)


def _described_by_fields(text: str) -> str:
    """Return a docstring whose arguments begin with the fields of EPConfig, as the class describes them."""
    lines = (inspect.getdoc(EPConfig) or "").partition("Attributes:\n")[2].splitlines()
    fields = lines[: next(i for i, line in enumerate(lines) if line.startswith("    rank, world_size:"))]
    return text.replace("    Args:\n", "\n    ".join(["    Args:", *fields, ""]).removesuffix("    "), 1)


if init.__doc__:  # none with python -OO
    init.__doc__ = _described_by_fields(init.__doc__)
