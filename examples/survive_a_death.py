"""Four ranks, one of which is killed in the middle; the other three go on in the same processes, with all experts.

python examples/survive_a_death.py

torchrun would kill the survivors. This launcher leaves them alone, and hosts the store that ranks find each other in,
so that no rank's death takes it away.
"""

import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist

import moelink
from moelink.nn import MoE, refresh_host_copies, restore_experts

RANKS, STEPS, VICTIM = 4, 6, 0


def launch() -> None:
    """Start the ranks, wait for all of them, and count the dead."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # With an agent's store every rank is a client of it; otherwise rank 0 would open one of its own.
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = []
    for rank in range(RANKS):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        ranks.append(subprocess.Popen([sys.executable, __file__], env={**os.environ, **common, **own}))
    codes = [process.wait() for process in ranks]
    print(f"{codes.count(0)} of {RANKS} ranks came to the end, {codes.count(-signal.SIGKILL)} was killed")
    sys.exit(any(code not in (0, -signal.SIGKILL) for code in codes))


@torch.no_grad()
def work() -> None:
    """One rank: steps of a layer whose experts have copies on other ranks. Survivors repeat a step that fails."""
    me = int(os.environ["RANK"])
    ep = moelink.init(num_experts=8, topk=2, hidden_size=16, max_tokens_per_rank=4, device="cpu", timeout=30)
    layer = MoE(ep, intermediate_size=32, host_copies=1)
    refresh_host_copies(layer)  # after each change of the weights that must not be lost
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(me)).bfloat16()
    expected = layer(x)
    step = 0
    while step < STEPS:
        try:
            if (me, step) == (VICTIM, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            torch.testing.assert_close(layer(x), expected, atol=0.01, rtol=0.02)  # sums are rounded elsewhere
            step += 1
        except moelink.PeerTimeoutError as error:
            left = [rank for rank in range(ep.config.world_size) if rank != error.peer]
            ep = ep.recover(left)
            (report,) = restore_experts(layer, ep)
            refresh_host_copies(layer)  # for the next death
            print(
                f"{error}\n -> now rank {ep.config.rank} of {ep.config.world_size}, repeating step {step}, "
                f"{report.copied} experts restored from host copies\n",
                end="",
            )
    ep.close()


if __name__ == "__main__":
    work() if "RANK" in os.environ else launch()
