"""What each rank does in tests/gpu/test_vllm_gpu.py: steps of a layer of vLLM over moelink, without vLLM.

vLLM's wheel is too large for machines whose tests bring everything along. So this calls moelink with the arguments and
in the order of ``MoelinkPrepareAndFinalize``, and torch stands for vLLM's experts: they get rows with global ids, -1
where there is nothing to do, weigh, and sum. Sizes and bounds are those of vLLM's tests of its DeepEP v2 backend.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import silu

import moelink
from moelink.integrations.settings import Settings
from moelink.integrations.vllm.settings import Quantization, bound_of, init_arguments, rows_of
from tests.gpu import gpu_ranks

EXPERTS, TOPK = 32, 6
SCALE, INNER_SCALE = 1 / 448, 8 / 448
"""Static scales of fp8 experts: of their input, and of what the second product reads."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Tokens of a rank, columns between the products, hidden size, whether experts compute in fp8, most tokens."""

    tokens: int
    inner: int
    hidden: int
    fp8: bool = False
    most: int = 256


@dataclasses.dataclass(frozen=True)
class Answer:
    """What moelink made of some tokens, and what one rank alone makes of them."""

    what: str
    ours: Tensor
    truth: Tensor


def rounded(x: Tensor, scale: float, *, fp8: bool) -> Tensor:
    """``x`` in bf16 as fp8 experts see it: quantised with a static scale."""
    if not fp8:
        return x
    seen = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (seen.float() * scale).to(x.dtype)


def batch(case: Case, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and router weights; some ids are -1."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(case.tokens, case.hidden, device=device, generator=generator) / 10
    scores = torch.rand(case.tokens, EXPERTS, device=device, generator=generator)
    chosen = torch.randn(case.tokens, TOPK, device=device, generator=generator)
    ids = scores.topk(TOPK).indices
    ids[::5, 0] = -1
    return x.bfloat16(), ids, chosen


def compute(rows: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, first: int, *, fp8: bool) -> Tensor:
    """Experts ``first`` and on of all rows, weighed and summed in fp32. Graphs can capture it."""
    rows, total = rounded(rows, SCALE, fp8=fp8), rows.new_zeros(rows.shape, dtype=torch.float32)
    for number, (one, two) in enumerate(zip(up, down, strict=True)):
        mine = ids == first + number
        gate, value = (rows @ one.T).chunk(2, -1)
        made = rounded(silu(gate) * value, INNER_SCALE, fp8=fp8) @ two.T
        share = torch.where(mine, weights, 0.0).sum(1, keepdim=True)
        total += torch.where(mine.any(1, keepdim=True), share * made.float(), 0.0)  # other rows may hold anything
    return total.to(rows.dtype)


def started(ep: moelink.Communicator, lane: int, x: Tensor, ids: Tensor, weights: Tensor, bound: int | None):
    """Prepare a microbatch, as the backend does it: what waits for the rows."""
    return ep.lane(lane).dispatch_async(x, ids, weights, max_tokens=bound)


def ended(ep: moelink.Communicator, lane: int, y: Tensor, recv: moelink.DispatchOutput, output: Tensor):
    """Finalize a microbatch, as the backend does it: what waits for the sums."""
    return ep.lane(lane).combine_async(y, recv, out=output)


def answers(rank: int, world_size: int, case: Case, kind: str = "cuda") -> list[Answer]:
    """One step without bound, one with, two microbatches side by side, and on GPUs a captured step replayed twice."""
    device = gpu_ranks.prepare(rank, kind)
    generator = torch.Generator(device).manual_seed(7)
    up = torch.randn(EXPERTS, 2 * case.inner, case.hidden, device=device, generator=generator).bfloat16() / 15
    down = torch.randn(EXPERTS, case.hidden, case.inner, device=device, generator=generator).bfloat16() / 15
    config = SimpleNamespace(
        num_experts=EXPERTS, experts_per_token=TOPK, hidden_dim=case.hidden, max_num_tokens=case.most,
        in_dtype=torch.bfloat16,
    )  # fmt: skip
    wanted = Quantization(torch.float8_e4m3fn, static=True) if case.fp8 else Quantization()
    rows_wanted = rows_of(torch.bfloat16, wanted)
    assert rows_wanted.quantized_by == ("arrival" if case.fp8 else "nobody")
    ep = moelink.init(**init_arguments(rows_wanted, settings=Settings(), config=config, device=device, microbatches=2))
    mine = EXPERTS // world_size
    own, first = slice(rank * mine, (rank + 1) * mine), rank * mine
    bound = bound_of(case.tokens, own=case.tokens, shards=1, limit=case.most)

    def experts(recv: moelink.DispatchOutput) -> Tensor:
        return compute(recv.tokens, recv.topk_ids, recv.topk_weights, up[own], down[own], first, fp8=case.fp8)

    def step(x: Tensor, ids: Tensor, weights: Tensor, output: Tensor, most: int | None) -> None:
        recv = ep.dispatch(x, ids, weights, max_tokens=most)
        ep.combine(experts(recv), recv, out=output)

    def truth(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return compute(x, ids, weights, up, down, 0, fp8=case.fp8)

    made = []
    for what, most in (("no bound", None), ("a bound", bound)):
        given = batch(case, rank, device)
        output = torch.full_like(given[0], torch.nan)
        step(*given, output, most)
        made.append(Answer(what, output, truth(*given)))

    pair = [batch(case, 50 + 10 * lane + rank, device) for lane in range(2)]
    outputs = [torch.full_like(x, torch.nan) for x, _, _ in pair]
    waiting = [started(ep, lane, *given, bound) for lane, given in enumerate(pair)]
    received = [pending.wait() for pending in waiting]
    waiting = [ended(ep, lane, experts(recv), recv, outputs[lane]) for lane, recv in enumerate(received)]
    for pending in reversed(waiting):
        pending.wait()
    made += [Answer("a microbatch", output, truth(*given)) for output, given in zip(outputs, pair, strict=True)]

    if kind == "cuda":
        given = batch(case, rank, device)
        output = torch.empty_like(given[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(*given, output, bound)
        for seed in (200, 300):
            for held, fresh in zip(given, batch(case, seed + rank, device), strict=True):
                held.copy_(fresh)
            output.fill_(torch.nan)
            graph.replay()
            made.append(Answer("a replay", output.clone(), truth(*given)))
    ep.check()
    ep.close()
    torch.distributed.destroy_process_group()
    return [Answer(answer.what, answer.ours.float().cpu(), answer.truth.float().cpu()) for answer in made]
