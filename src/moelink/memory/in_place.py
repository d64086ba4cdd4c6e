"""Begin a block anew where it is, for ranks that go on without some whose processes have ended.

Blocks of CUDA devices cannot be replaced at their addresses by the means that torch offers. So a rank that masks
others writes over its own block in place, in three steps:

1. It waits for its kernels, and until the processes of the masked ranks have ended. The first exchange says that all
   ranks that go on have done so: no store into any of their blocks is under way. That needs dead ranks: a kernel of a
   process that lives, or was stopped, may still store, and may poison its peers when its wait expires.
2. It writes zeros, and what a new block begins with (``memory.absence``), which is poisoned: should a rank fail from
   here on, then calls with the ranks of before raise an error at once, on each rank that has come this far. The second
   exchange says that all have.
3. In the commit it takes the poison away.

The blocks of the masked ranks stay mapped: the driver frees memory once no process maps it. The few words that kernels
store to every rank end there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from moelink.errors import UnsupportedError
from moelink.memory.processes import ProcessName
from moelink.memory.setup import Exchange, set_up

END_SECONDS = 5.0
"""Longest wait for a process that is about to end: the driver takes a moment to free its device."""
_PAUSE_SECONDS = 0.005


def begin_anew(
    block: Tensor, rank: int, members: Sequence[int], leaving: Mapping[int, ProcessName], *, exchange: Exchange,
    fill: Callable[[Tensor], None], synchronize: Callable[[], None],
) -> None:  # fmt: skip
    """Do steps 1 and 2 for the ``block`` of ``rank``, one of ``members``, without the ranks ``leaving``.

    Args:
        exchange: over the members, called exactly twice.
        fill: writes the first contents into zeros.
        synchronize: waits for this device.

    Raises:
        UnsupportedError: a process has not ended; on every rank, and nothing has changed.
    """

    def prepare() -> dict[str, str]:
        end = time.monotonic() + END_SECONDS
        for peer, process in leaving.items():
            while not process.has_ended():
                if time.monotonic() > end:
                    raise UnsupportedError(
                        f"mask: expected ranks whose processes have ended, as kernels of one that lives may store into "
                        f"the memory of the others, got rank {peer}, process {process.pid}, which lives or is in "
                        "another container; close it first, or use transport='collective'"
                    )
                time.sleep(_PAUSE_SECONDS)
        synchronize()
        return {}

    def accept(_peers: object) -> None:
        block.zero_()
        fill(block)
        synchronize()

    set_up(
        exchange, kind="mask", rank=rank, world_size=len(members), schema={}, prepare=prepare, accept=accept,
        members=members,
    )  # fmt: skip
