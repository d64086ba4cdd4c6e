"""Cases of gradients, the ranks that compute them, and the layer in one process that judges them.

Everything a rank passes is a function of (case, rank); the judge is a loop over tokens and slots in fp64 with torch's
own autograd. Ranks return what they got; the parent compares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import moelink
from moelink.ops import dequantize
from moelink.testing import rank_data

EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 5, 3, 6, 4


@dataclass(frozen=True)
class Case:
    """One layer: communicator options, and how it is called.

    Attributes:
        options: keyword arguments of ``moelink.init`` besides the sizes.
        weights: where router weights go: "dispatch", "combine" or "none"; "left": into dispatch, and the
            experts multiply by them.
        added: what is added in combine: "", "shared", "bias" or "residual".
        slots: ``reduce=False``; weights are then applied and summed outside.
        lazy: experts without rows are skipped, so a rank without rows builds no graph.
        split: dispatch_async and combine_async.
        reroute: dispatch a second time with ``routing=`` and use those rows.
        frozen: x does not require grad.
        tokens: of every rank, instead of one number or another by rank.
    """

    options: tuple[tuple[str, Any], ...] = ()
    weights: str = "dispatch"
    added: str = ""
    slots: bool = False
    host_counts: bool = False
    lazy: bool = False
    split: bool = False
    reroute: bool = False
    scenario: str = "uniform"
    tokens: int | None = None
    frozen: bool = False

    @property
    def id(self) -> str:
        named = [name for name in ("slots", "host_counts", "lazy", "split", "reroute", "frozen") if getattr(self, name)]
        options = [f"{name}={value}" for name, value in self.options]
        return "-".join(filter(None, [*options, f"w:{self.weights}", self.added, *named, self.scenario]))

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)

    @property
    def fields(self) -> dict[str, Any]:
        sizes = {
            "num_experts": EXPERTS,
            "topk": TOPK,
            "hidden_size": HIDDEN,
            "max_tokens_per_rank": MAX_TOKENS,
            "dispatch_format": "fp64",
            "combine_dtype": torch.float64,
        }
        return {**sizes, **dict(self.options)}

    @property
    def dtype(self) -> torch.dtype:
        return self.fields["combine_dtype"]

    @property
    def hidden(self) -> int:
        return self.fields["hidden_size"]


def gradient_cases() -> list[Case]:
    """Every option that dispatch and combine have, in fp64."""
    rank = (("layout", "rank"),)
    late = (("pre_reduce", False),)
    fused = (("fused_shared_expert", True),)
    local = (("mode", "allreduce"),)
    return [
        Case(),
        Case(weights="none"),
        Case(scenario="holes"),
        Case(scenario="one_rank_empty", lazy=True),
        Case(scenario="all_to_last", lazy=True),
        Case(late),
        Case(late, weights="combine"),
        Case(late, weights="combine", scenario="holes", added="residual"),
        Case(late, weights="none", slots=True),
        Case(weights="left", scenario="holes"),
        Case(late, weights="left", scenario="one_rank_empty", lazy=True, frozen=True),
        Case(slots=True, scenario="holes"),
        Case(added="shared"),
        Case(added="bias"),
        Case(added="residual"),
        Case(rank),
        Case(rank, weights="none", scenario="one_rank_empty", lazy=True),
        Case(scenario="one_rank_empty", lazy=True, frozen=True),
        Case(rank, scenario="all_to_last", lazy=True, frozen=True),
        Case(fused),
        Case((*fused, *late), weights="combine"),
        Case((("expert_alignment", 4),), scenario="holes"),
        Case((("capacity", 5),)),
        Case((("capacity", 5), *late), weights="combine"),
        Case((("capacity", 2), *rank)),
        Case(host_counts=True),
        Case(rank, host_counts=True),
        Case(split=True, added="shared"),
        Case(reroute=True),
        Case(local),
        Case((*local, *late), weights="combine"),
        Case((*local, *fused)),
    ]


@dataclass(frozen=True)
class Inputs:
    """What one rank passes. Everything but ``ids`` may require grad.

    Attributes:
        experts: [experts, H, H], all of them on every rank; a rank uses its own.
        bias: [H]. extra: [T, H], for ``shared`` and residuals. out_grad: gradient of the result.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    experts: Tensor
    bias: Tensor
    extra: Tensor
    out_grad: Tensor

    def leaves(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("x", "weights", "experts", "bias", "extra")}

    def learning(self) -> Inputs:
        """Copies whose gradients are wanted."""
        return replace(self, **{name: leaf.clone().requires_grad_() for name, leaf in self.leaves().items()})


def inputs(case: Case, rank: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Deterministic inputs of ``rank``. Replicated activations are those of rank 0."""
    source = 0 if case.option("mode") == "allreduce" else rank
    tokens = case.tokens or MAX_TOKENS - source % 2
    if (case.scenario, rank) == ("one_rank_empty", 0):
        tokens = 0
    data = rank_data(
        seed=3,
        rank=source,
        num_tokens=tokens,
        hidden_size=case.hidden,
        num_experts=EXPERTS,
        topk=TOPK,
        holes=0.4 if case.scenario == "holes" else 0.0,
        dtype=dtype,
    )
    ids = torch.full_like(data.topk_ids, EXPERTS - 1) if case.scenario == "all_to_last" else data.topk_ids
    generator = torch.Generator().manual_seed(source)
    shared_by_all = torch.Generator().manual_seed(99)

    def random(*shape: int, of: torch.Generator = generator) -> Tensor:
        return torch.randn(*shape, generator=of, dtype=torch.float64).to(dtype)

    return Inputs(
        x=data.x,
        ids=ids,
        weights=data.topk_weights.to(torch.float64 if dtype == torch.float64 else torch.float32),
        experts=random(EXPERTS + 1, case.hidden, case.hidden, of=shared_by_all) / case.hidden**0.5,
        bias=random(case.hidden, of=shared_by_all),
        extra=random(tokens, case.hidden),
        out_grad=random(tokens, case.hidden),
    )


def expert(x: Tensor, matrix: Tensor) -> Tensor:
    """What an expert does; not linear, so that gradients depend on where they are taken."""
    return torch.tanh(x @ matrix)


def apply_experts(ep: moelink.Communicator, case: Case, recv: moelink.DispatchOutput, m: Inputs) -> Tensor:
    """y for every row: by group in the expert layout, by local id and weighted in the rank layout."""
    config, rows = ep.config, dequantize(ep, recv)
    first = moelink.routing.ExpertMap(EXPERTS, config.world_size).first(config.rank)
    offsets = recv.row_offsets.tolist()
    if case.lazy and offsets[-1] == 0:
        return torch.zeros(len(rows), config.hidden_size, dtype=rows.dtype)
    pad = rows.new_zeros(len(rows) - offsets[-1], config.hidden_size)
    if config.layout == "expert":
        own = [EXPERTS] if config.fused_shared_expert else []
        matrices = [*own, *range(first, first + config.num_local_experts)]
        groups = [
            expert(rows[start:stop], m.experts[e])
            for e, start, stop in zip(matrices, offsets[:-1], offsets[1:], strict=True)
        ]
        return torch.cat([*groups, pad])
    rows = rows[: offsets[-1]]
    total = torch.zeros_like(rows)
    for slot in range(TOPK):
        ids = recv.topk_ids[: offsets[-1], slot].long()
        y = torch.tanh(torch.einsum("rh,rhk->rk", rows, m.experts[ids.clamp(min=0) + first]))
        weight = 1.0 if recv.topk_weights is None else recv.topk_weights[: offsets[-1], slot, None]
        total = total + torch.where((ids >= 0)[:, None], y * weight, 0.0)
    return torch.cat([total, pad])


def _weighed(case: Case, y: Tensor, recv: moelink.DispatchOutput) -> Tensor:
    """Multiply y by the weights that travelled, as experts do that combine leaves them to."""
    if case.lazy and int(recv.row_offsets[-1]) == 0:
        return y
    rows = torch.arange(len(y)) < recv.row_offsets[-1]
    return y * torch.where(rows, recv.weights, 0.0)[:, None]


def layer(ep: moelink.Communicator, case: Case, m: Inputs) -> Tensor:
    """The layer on one rank: [T, H]."""
    weights = m.weights if case.weights in ("dispatch", "left") else None
    call = {"host_counts": case.host_counts}
    if case.split:
        recv = ep.dispatch_async(m.x, m.ids, weights, **call).wait()
    else:
        recv = ep.dispatch(m.x, m.ids, weights, **call)
    if case.reroute:
        recv = ep.dispatch(m.x, None, weights, routing=recv, **call)
    y = apply_experts(ep, case, recv, m)
    options: dict[str, Any] = {"reduce": not case.slots}
    if case.weights == "left":
        y, options["weigh"] = _weighed(case, y, recv), False
    if case.added:
        name = "shared" if case.added == "shared" else "epilogue"
        options[name] = m.bias if case.added == "bias" else m.extra
    given = m.weights if case.weights == "combine" else None
    out = ep.combine_async(y, recv, given, **options).wait() if case.split else ep.combine(y, recv, given, **options)
    return (out * m.weights[:, :, None]).sum(1) if case.slots else out


def gradients(rank: int, world_size: int, cases: list[Case], options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Entry point of a rank: result and gradients of every case."""
    results = []
    for case in cases:
        with moelink.init(**case.fields, timeout=60, **options) as ep:
            m = inputs(case, rank, case.dtype).learning()
            m.x.requires_grad_(not case.frozen)
            out = layer(ep, case, m)
            out.backward(m.out_grad)
            grads = {name: leaf.grad for name, leaf in m.leaves().items()}
            results.append({"out": out.detach(), **{n: g for n, g in grads.items() if g is not None}})
    return results


def kept(case: Case, world_size: int) -> set[tuple[int, int, int]]:
    """(source, token, slot) of the rows that fit ``capacity``, from the oracle."""
    from moelink import reference

    config = moelink.EPConfig(**case.fields, world_size=world_size)
    ms = [inputs(case, rank) for rank in range(world_size)]
    rows = reference.reference_dispatch(config, [m.x for m in ms], [m.ids for m in ms], None)
    found = set()
    for rank, got in enumerate(rows):
        for source, token, slot in got.src_info[: got.num_rows].tolist():
            local = moelink.routing.ExpertMap(EXPERTS, world_size)
            for k in range(TOPK):
                e = int(ms[source].ids[token, k]) if source >= 0 else -1
                mine = e >= 0 and int(local.owner(torch.tensor([e]))) == rank
                if mine and slot in (k, -1) and (slot >= 0 or config.layout == "rank"):
                    found.add((0 if config.mode == "allreduce" else source, token, k))
    return found


def expected(case: Case, world_size: int, *, rounded: Any = None) -> list[dict[str, Tensor]]:
    """What ranks should get, from one process: results by rank, and gradients of the sum over ranks of <out, out_grad>.

    ``rounded``: what rows become on the way, through which gradients go straight. Activations that are replicated have
    one result and one gradient, which the ranks' add up to.
    """
    replicated = case.option("mode") == "allreduce"
    ms = [inputs(case, rank, case.dtype) for rank in range(1 if replicated else world_size)]
    wide = [replace(m, **{n: t.double() for n, t in m.leaves().items()}).learning() for m in ms]
    experts = wide[0].experts
    present = kept(case, world_size)
    outs = []
    for rank, m in enumerate(wide):
        x = m.x if rounded is None else m.x + (rounded(ms[rank].x).double() - m.x).detach()
        rows = []
        for token in range(len(x)):
            total = torch.zeros(case.hidden, dtype=torch.float64)
            for slot in range(TOPK):
                if (rank, token, slot) in present:
                    y = expert(x[token], experts[int(m.ids[token, slot])])
                    total = total + (y if case.weights == "none" and not case.slots else y * m.weights[token, slot])
            if case.option("fused_shared_expert"):
                total = total + expert(x[token], experts[EXPERTS])
            rows.append(total)
        out = torch.stack(rows) if rows else torch.zeros(0, case.hidden, dtype=torch.float64)
        if case.added:
            out = out + (m.bias if case.added == "bias" else m.extra)
        outs.append(out)
    # No rank may have a token: experts are part of the graph all the same.
    sum(((out * m.out_grad.double()).sum() for out, m in zip(outs, wide, strict=True)), 0 * experts.sum()).backward()
    return [
        {
            "out": out.detach(),
            "experts": experts.grad,
            **{
                n: t.grad
                for n, t in m.leaves().items()
                if t.grad is not None and n != "experts" and not (n == "x" and case.frozen)
            },
        }
        for out, m in zip(outs, wide, strict=True)
    ]
