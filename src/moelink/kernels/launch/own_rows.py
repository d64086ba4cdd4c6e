"""Choose the combines in which rows of a rank's own tokens stay where they are (``kernels.combine.own_rows``)."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch

from moelink.kernels.launch.constants import CombineSpec
from moelink.memory.workspace import Workspace
from moelink.tuning import MANY_TOKENS


def own_rows_stay(workspace: Workspace, device: torch.device, *, sums: bool) -> bool:
    """Return whether own rows stay where they are in a combine in which ``sums`` travel, or else every row.

    A combine of two ranks with many tokens (more than MANY_TOKENS; on CPUs, where all numbers are small, 5 or more) is
    bound by memory, not by the link: half of all sums are of own tokens, and each of them would be stored, and loaded
    again. Of fewer tokens, and of more ranks, the home role is what a call waits for last, and its sums would come
    behind everything else. With layout "rank" an own row is one load, which waits for nothing, so there it pays from
    fewer tokens on (``Workspace.two_copies``). docs/lab/combine.md has the figures.

    Ranks need not choose alike. Sums in a combine format are not among these, because they are encoded and decoded as
    they travel; nor are those of two nodes, where the network is the bound; nor, with layout "expert", those that may
    come without flags.

    So where sums come without flags, own rows stay if and only if ``Workspace.two_copies``, on every device. By the
    same property the workspace has no Lamport slots for own rows (``Workspace.lamport_ranks``).
    """
    config = workspace.config
    many = config.max_tokens_per_rank > (4 if device.type == "cpu" else MANY_TOKENS) and not workspace.lamport_tokens
    return sums and workspace.two_near_ranks and (many or workspace.two_copies)


@lru_cache(maxsize=256)
def with_own_rows(spec: CombineSpec, workspace: Workspace, device: torch.device) -> CombineSpec:
    """Return the launch constants ``spec`` with the choice of :func:`own_rows_stay`, for a launch of either role or of
    both.

    All launches of a call must have the same choice: own rows that one role does not send, the other must not await.
    """
    stay = own_rows_stay(workspace, device, sums=bool(spec.SENDS_SUMS))
    return dataclasses.replace(spec, OWN_ROWS_STAY=1) if stay else spec
