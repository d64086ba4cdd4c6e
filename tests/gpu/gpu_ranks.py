"""What each rank does in the GPU tests: real sizes, long runs, graphs, faults. Ranks are processes, one per device."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import moelink
from moelink.testing import assert_bitwise_equal, rank_data
from tests.support import cases

# (hidden_size, topk, num_experts, most tokens, format, options): sizes where the format's group divides them.
REAL_SIZES: tuple[tuple[int, int, int, int, str, dict[str, Any]], ...] = (
    (7168, 8, 256, 128, "fp8_block128", {}),
    (7168, 8, 256, 4096, "bf16", {"capacity": 48_000}),
    (6144, 4, 128, 512, "mxfp8", {"pre_reduce": False}),
    (2880, 4, 32, 300, "mxfp4", {"fused_shared_expert": True}),
    (2880, 1, 8, 77, "nvfp4", {"layout": "rank"}),
    (3000, 6, 60, 130, "bf16", {"expert_alignment": 16}),
    (3000, 10, 72, 33, "fp32", {"mode": "allreduce", "combine_dtype": torch.float32}),
    (7168, 6, 64, 1000, "nvfp4", {"fused_shared_expert": True, "pre_reduce": False}),
    # Neither few tokens nor many, and more bytes than sums without flags may take, on two ranks, too.
    (8192, 4, 32, 600, "bf16", {"combine_dtype": torch.float32}),
)

MANY = {
    "num_experts": 32, "topk": 4, "hidden_size": 256, "max_tokens_per_rank": 16, "transport": "symmetric",
    "timeout": 100.0,
}  # fmt: skip
ABSENT = {"num_experts": 16, "topk": 2, "hidden_size": 256, "max_tokens_per_rank": 8, "transport": "symmetric"}


def graph_fields(world_size: int) -> dict[str, Any]:
    """What :func:`graphs` runs."""
    sizes = {"num_experts": 8 * world_size, "topk": 4, "hidden_size": 512, "max_tokens_per_rank": 64}
    return {**sizes, "transport": "symmetric", "timeout": 100.0}


def prepare(rank: int, kind: str = "cuda") -> torch.device:
    """This rank's device, after the default group has been made."""
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=None)
    return torch.device("cuda", rank)


def run_cases(rank: int, world_size: int, case_list: list[cases.Case]) -> list[cases.Result]:
    """The cases of the CPU tests on CUDA tensors."""
    prepare(rank)
    return cases.run_cases(rank, world_size, case_list, {"transport": "symmetric"})


def inputs(rank: int, *, seed: int, tokens: int, hidden: int, experts: int, topk: int, dtype=torch.bfloat16, **options):
    data = rank_data(
        seed=seed,
        rank=rank,
        num_tokens=tokens,
        hidden_size=hidden,
        num_experts=experts,
        topk=topk,
        dtype=dtype,
        **options,
    )
    return data.x.cuda(), data.topk_ids.cuda(), data.topk_weights.cuda()


def real_fields(index: int) -> dict[str, Any]:
    hidden, topk, experts, most, fmt, options = REAL_SIZES[index]
    sizes = {"num_experts": experts, "topk": topk, "hidden_size": hidden, "max_tokens_per_rank": most}
    return {**sizes, "dispatch_format": fmt, "timeout": 100.0, **options}


def equals_collective(
    rank: int, world_size: int, indices: tuple[int, ...] = tuple(range(len(REAL_SIZES))), more: dict | None = None
) -> list[str]:
    """Dispatch and combine at real sizes on both transports, bit for bit; uneven and zero token counts. ``more``: other
    arguments of ``init`` for the symmetric one."""
    prepare(rank)
    done, more = [], more or {}
    for index in indices:
        hidden, topk, experts, most, fmt, options = REAL_SIZES[index]
        fields = real_fields(index)
        replicated = options.get("mode") == "allreduce"
        with (
            moelink.init(**fields, transport="symmetric", **more) as one,
            moelink.init(**fields, transport="collective") as two,
        ):
            for seed, share in ((1, 1.0), (2, 0.5), (3, 0.0), (4, 1.0)):
                source = 0 if replicated else rank
                tokens = most if share == 1.0 else int(most * share * ((source * 3 + 1) % 4) / 3)
                x, ids, weights = inputs(
                    source, seed=seed * 100 + index, tokens=tokens, hidden=hidden, experts=experts, topk=topk,
                    skew=1.0 if seed == 4 else 0.0, holes=0.1 if seed == 2 else 0.0, repeats=seed == 4,
                    dtype=torch.float32 if fmt == "fp32" else torch.bfloat16,
                )  # fmt: skip
                recvs = [ep.dispatch(x, ids, weights) for ep in (one, two)]
                same_rows(f"{fields} seed {seed}", *recvs)
                y = torch.randn(recvs[0].tokens.shape[0], hidden, device="cuda").to(one.config.combine_dtype)
                outs = [ep.combine(y, recv) for ep, recv in zip((one, two), recvs, strict=True)]
                assert_bitwise_equal(outs[0], outs[1], f"{fields} seed {seed}: combine")
            done.append(f"{fmt}-{hidden}-{topk}-{experts}-{most}")
    return done


def same_rows(what: str, got: moelink.DispatchOutput, want: moelink.DispatchOutput) -> None:
    """The defined part of two outputs, bit for bit, on the device."""
    for name in ("row_offsets", "expert_ids", "scales_offsets", "num_recv_tokens", "overflow"):
        assert_bitwise_equal(getattr(got, name), getattr(want, name), f"{what}: {name}")
    if want.src_info.dim() == 3:
        same_groups(what, got, want)
        return
    rows = int(want.row_offsets[-1])
    for name in ("tokens", "src_info", "weights", "topk_ids", "topk_weights"):
        a, b = getattr(got, name), getattr(want, name)
        if b is None:
            assert a is None, what
            continue
        a, b = a[:rows].contiguous().view(torch.uint8), b[:rows].contiguous().view(torch.uint8)
        assert torch.equal(a, b), f"{what}: {name}"
    if want.scales is not None:
        a, b = got.scales.view(torch.uint8), want.scales.view(torch.uint8)
        if want.scales.dim() == 5:
            used = block_mask(want, len(a))
            a, b = a[used], b[used]
        elif want.topk_ids is None and want.scales.dtype.itemsize == 4 and want.scales.shape[1] == len(want.tokens):
            a, b = got.scales[:, :rows], want.scales[:, :rows]
        else:
            a, b = a[:rows], b[:rows]
        assert torch.equal(a, b), f"{what}: scales"


def same_groups(what: str, got: moelink.DispatchOutput, want: moelink.DispatchOutput) -> None:
    """The defined rows of two outputs of layout "masked"."""
    counts = want.num_recv_per_expert
    assert torch.equal(got.num_recv_per_expert, counts), f"{what}: num_recv_per_expert"
    used = cases.used_rows(counts, want.src_info.shape[1])
    for name in ("tokens", "src_info", "weights", "scales"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), f"{what}: {name}"
        if b is None:
            continue
        if name == "scales":
            a, b = (cases.rows_of_scales(each, used.shape[1]) for each in (a, b))
        a, b = (cases.bits_of(each)[used].contiguous().view(torch.uint8) for each in (a, b))
        assert torch.equal(a, b), f"{what}: {name}"


def block_mask(recv: moelink.DispatchOutput, blocks: int) -> torch.Tensor:
    used = torch.zeros(blocks, dtype=torch.bool)
    offsets, bases = recv.row_offsets.tolist(), recv.scales_offsets.tolist()
    for group, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        base = start // 128 + bases[group]
        used[base : base + -(-(end - start) // 128)] = True
    return used.to(recv.scales.device)


def many_calls(rank: int, world_size: int, calls: int, more: dict | None = None) -> tuple[int, float]:
    """``calls`` dispatches, each combined, with changing routing and counts; every result is checked on the device.

    Experts are the identity and router weights sum to one per token, so combine returns the tokens themselves.
    """
    prepare(rank)
    most, hidden, experts, topk = (MANY[name] for name in ("max_tokens_per_rank", "hidden_size", "num_experts", "topk"))
    generator = torch.Generator(device="cuda").manual_seed(rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    start = time.monotonic()
    with moelink.init(**MANY, **(more or {})) as ep:
        x = torch.randint(-8, 9, (most, hidden), device="cuda", generator=generator).to(torch.bfloat16)
        weights = torch.tensor([[0.5, 0.25, 0.125, 0.125]], device="cuda").expand(most, topk).contiguous()
        scores = torch.rand(64, most, experts, device="cuda", generator=generator)
        routings = scores.topk(topk).indices.int()
        for call in range(calls):
            tokens = (call * 7 + rank * 3) % (most + 1)
            ids = routings[call % 64, :tokens]
            sent = x[:tokens] + (call % 5)
            recv = ep.dispatch(sent, ids, weights[:tokens])
            out = ep.combine(recv.tokens, recv)
            wrong += (out != sent).sum()
            if call % 1000 == 999:
                ep.check()
        ep.check()
    return int(wrong), time.monotonic() - start


def graphs(rank: int, world_size: int, more: dict | None = None) -> dict[str, bool]:
    """A captured pair replayed with other inputs; ranks replay graphs of different sizes, mixed with eager calls."""
    prepare(rank)
    fields = graph_fields(world_size)
    hidden, experts, topk = (fields[name] for name in ("hidden_size", "num_experts", "topk"))
    results = {}
    with moelink.init(**fields, **(more or {})) as ep:
        captured = {}
        for size in (8, 64):
            x = torch.zeros(size, hidden, dtype=torch.bfloat16, device="cuda")
            ids = torch.zeros(size, topk, dtype=torch.int32, device="cuda")
            weights = torch.full((size, topk), 0.25, device="cuda")
            for _ in range(2):
                recv = ep.dispatch(x, ids, weights)
                ep.combine(recv.tokens, recv)
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                recv = ep.dispatch(x, ids, weights)
                out = ep.combine(recv.tokens, recv)
            captured[size] = (graph, x, ids, out, weights)  # a graph reads its inputs where they were
        for step in range(12):
            size = (8, 64)[(step + rank) % 2]
            graph, x, ids, out, _ = captured[size]
            real = (size * (step + 1)) // 12
            fresh, routing, _ = inputs(rank, seed=step, tokens=size, hidden=hidden, experts=experts, topk=topk)
            routing[real:] = -1
            x.copy_(fresh)
            ids.copy_(routing)
            if step % 4 == 3:
                recv = ep.dispatch(x, ids, torch.full((size, topk), 0.25, device="cuda"))
                got = ep.combine(recv.tokens, recv)
            else:
                graph.replay()
                got = out
            torch.cuda.synchronize()
            expected = fresh.clone()
            expected[real:] = 0
            results[f"step {step} size {size} real {real}"] = torch.equal(got, expected)
        ep.check()
    return results


def absent_rank(rank: int, world_size: int, more: dict | None = None) -> dict[str, Any]:
    """Rank 1 never makes the second call: the others learn it in time, and later calls and replays return at once."""
    prepare(rank)
    timeout = 3.0
    x, ids, weights = inputs(rank, seed=1, tokens=8, hidden=256, experts=16, topk=2)
    ep = moelink.init(**ABSENT, timeout=timeout, **(more or {}))
    ep.warmup()
    dist.barrier()
    for _ in range(2):
        recv = ep.dispatch(x, ids, weights)
        ep.combine(recv.tokens, recv)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ep.dispatch(x, ids, weights)
    dist.barrier()
    if rank == 1:
        time.sleep(timeout + 3)
        try:
            ep.dispatch(x, ids, weights)
            ep.check()
            told = None
        except moelink.PeerTimeoutError as error:
            told = error.peer
        ep.close()
        return {"told": told}
    start = time.monotonic()
    try:
        ep.dispatch(x, ids, weights)
        ep.check()
        error = None
    except moelink.PeerTimeoutError as caught:
        error = caught
    took = time.monotonic() - start
    start = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    replay = time.monotonic() - start
    offsets = captured.row_offsets.tolist()
    start = time.monotonic()
    try:
        ep.dispatch(x, ids, weights)
        later = "no error"
    except moelink.PeerTimeoutError as again:
        later = f"rank {again.peer}"
    after = time.monotonic() - start
    ep.close()
    alive = bool(torch.ones(4, device="cuda").sum() == 4)
    return {
        "error": type(error).__name__, "peer": getattr(error, "peer", None), "took": took, "replay": replay,
        "offsets": offsets, "later": later, "after": after, "alive": alive,
    }  # fmt: skip


def mismatched(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 leaves out its weights, in a call, a bound call, a call ahead of which others run, and a replay; each time
    the ranks go on with the communicator that ``recover`` makes."""
    prepare(rank)
    x, ids, weights = inputs(rank, seed=1, tokens=8, hidden=256, experts=16, topk=2)
    mine = () if rank == 1 else (weights,)
    ep = moelink.init(**ABSENT, timeout=60.0)
    said: dict[str, Any] = {}
    for form in ("call", "bound", "ahead", "replay"):
        ep.warmup()
        recv = ep.dispatch(x, ids)
        equal = torch.equal(ep.combine(recv.tokens, recv), 2 * x)
        torch.cuda.synchronize()
        dist.barrier()
        start = time.monotonic()
        try:
            if form == "call":
                ep.dispatch(x, ids, *mine)
            elif form == "bound":
                ep.bind(x, ids, *mine)()
            elif form == "ahead":  # the host reads the record in a later call, or in check
                for _ in range(4):
                    again = ep.dispatch(x, ids, *mine)
                    ep.combine(again.tokens, again)
            else:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    ep.dispatch(x, ids, *mine)
                graph.replay()
                graph.replay()
            ep.check()
            told = "no error"
        except moelink.ProtocolError as error:
            told = str(error)
        try:
            ep.dispatch(x, ids, weights)
            later = "no error"
        except moelink.ProtocolError as error:
            later = str(error)
        said[form] = {"equal": equal, "told": told, "later": later, "took": time.monotonic() - start}
        ep = ep.recover(range(world_size))
    ep.close()
    return said


def allocated(rank: int, world_size: int) -> tuple[int, int]:
    """Symmetric bytes really taken from the device at 4096 tokens, and what DESIGN allows."""
    prepare(rank)
    torch.cuda.synchronize()
    warm = moelink.init(num_experts=8, topk=1, hidden_size=128, max_tokens_per_rank=1, transport="symmetric")
    before = torch.cuda.mem_get_info()[0]
    dist.barrier()
    tokens, hidden = 4096, 7168
    with moelink.init(
        num_experts=256, topk=8, hidden_size=hidden, max_tokens_per_rank=tokens, transport="symmetric", capacity=1
    ):
        torch.cuda.synchronize()
        dist.barrier()
        taken = before - torch.cuda.mem_get_info()[0]
    warm.close()
    allowed = int(1.1 * tokens * (world_size * (hidden * 2 + 128) + world_size * hidden * 2)) + 64 * 2**20
    return taken, allowed
