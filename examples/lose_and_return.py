"""Three ranks generate; one is killed in the middle, the others go on, and a new process takes its place.

python examples/lose_and_return.py

Every rank serves a stream of its own through one MoE layer whose experts are spread over the ranks. The communicator
masks the dead rank by itself (``on_failure="mask"``) and its tokens lose what the lost experts would have added. The
launcher starts a new process, which joins between two steps. It hosts the store, which no rank's death takes away.
"""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import moelink

RANKS, STEPS, VICTIM, FATAL, EXPERTS, HIDDEN, VOCABULARY = 3, 12, 1, 4, 6, 32, 64


def launch() -> None:
    """Start the ranks, and a new one in the place of the one that is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int, new: bool) -> subprocess.Popen[bytes]:
        own = {"RANK": str(rank), "STORE_PORT": str(store.port), "NEW": str(int(new))}
        return subprocess.Popen([sys.executable, __file__], env={**os.environ, **own})

    ranks = [start(rank, new=False) for rank in range(RANKS)]
    ranks[VICTIM].wait()
    ranks[VICTIM] = start(VICTIM, new=True)
    sys.exit(any([process.wait() for process in ranks]))


def make_expert(expert: int) -> torch.Tensor:
    """The weights of an expert. A real model loads them from replicas or from a checkpoint."""
    return torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(expert)) / HIDDEN**0.5


def generate(ep: moelink.Communicator, weights: list[torch.Tensor], token: int) -> tuple[int, float]:
    """Return the next token after ``token``, and the share of the router's weight that arrived."""
    shared = torch.Generator().manual_seed(1)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=shared)
    router = torch.randn(HIDDEN, EXPERTS, generator=shared) / HIDDEN**0.5
    head = torch.randn(HIDDEN, VOCABULARY, generator=shared)
    x = embedding[token][None]
    top = (x @ router).softmax(-1).topk(2)
    recv = ep.dispatch(x.bfloat16(), top.indices, top.values)
    edges = recv.row_offsets.tolist()
    y = torch.zeros_like(recv.tokens)
    for expert, (begin, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        y[begin:end] = (recv.tokens[begin:end].float() @ weights[expert]).bfloat16()
    out = recv.rescale(ep.combine(y, recv)).float()
    return int(((x + 4 * out) @ head).argmax()), float(recv.weight_share()[0])


def work() -> None:
    """One rank: generate STEPS tokens; repeat a step that failed, on all ranks that are left."""
    rank, new = int(os.environ["RANK"]), os.environ["NEW"] == "1"
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False, wait_for_workers=False)
    settings = {
        "num_experts": EXPERTS, "topk": 2, "hidden_size": HIDDEN, "max_tokens_per_rank": 1, "transport": "collective",
        "on_failure": "mask", "timeout": 30.0,
    }  # fmt: skip
    if new:
        ep = moelink.join(store, VICTIM, RANKS, device="cpu", **settings)
        step = int(store.get("step"))
    else:
        dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=RANKS)
        ep, step = moelink.init(device="cpu", **settings), 0
    each = EXPERTS // RANKS
    weights = [make_expert(expert) for expert in range(rank * each, (rank + 1) * each)]
    token = rank
    while step < STEPS:
        if (rank, step, new) == (VICTIM, FATAL, False):
            os.kill(os.getpid(), signal.SIGKILL)
        if len(ep.present) < RANKS and step == FATAL + 3:  # a server would ask at every step who has come
            while not ep.applicants(store):
                time.sleep(0.01)
            store.set("step", str(step))
            change = ep.admit([VICTIM], store)
            print(f"rank {rank}: ranks {list(change.present)} again, pause {1e3 * change.seconds:.0f} ms\n", end="")
        try:
            begin = time.monotonic()
            token, share = generate(ep, weights, token)
        except moelink.MembershipError as error:
            pause = 1e3 * (time.monotonic() - begin)
            print(f"rank {rank}: lost {list(error.masked)}, repeats step {step}, pause {pause:.0f} ms\n", end="")
            continue
        print(f"rank {rank}, step {step}: token {token}, {share:.0%} of the router's weight\n", end="")
        step += 1
    ep.close()


if __name__ == "__main__":
    work() if "STORE_PORT" in os.environ else launch()
