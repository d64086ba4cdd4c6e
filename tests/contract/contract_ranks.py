"""Ranks of one process that call the contract's launchers, and the tensors that they own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from moelink import contract
from moelink.memory import create_all
from tests.support.cases import FIELDS, Case, Packed, Result, Setup, check_case


def params_of(setup: Setup, world_size: int, **changes):
    """A setup's fields by the contract's names."""
    fields = setup.fields
    replicated = fields.get("mode") == "allreduce"
    names = {
        "dispatch_fmt_str": fields["dispatch_format"],
        "hidden_size": fields["hidden_size"],
        "top_k": fields["topk"],
        "n_experts": fields["num_experts"],
        "max_token_per_rank": fields["max_tokens_per_rank"],
        "n_gpus_per_node": world_size,
        "combine_dtype": fields["combine_dtype"],
        "fused_shared_expert": fields.get("fused_shared_expert", False),
        "skip_a2a": replicated,
        "allreduce_world_size": world_size if replicated else 1,
        "pre_reduce": fields.get("pre_reduce", True),
        "expert_alignment": fields.get("expert_alignment", 1),
    }
    return contract.EPParams(**{**names, **changes})


def ranks_of(params, *devices: str) -> list:
    """All ranks, on ``devices`` in turn; default the CPU."""
    places = [(devices or ("cpu",))[rank % max(1, len(devices))] for rank in range(params.n_ranks)]
    memories = create_all(places, params.nbytes)
    return [contract.ep_init(params, memory) for memory in memories]


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Everything that the caller of one rank owns."""

    handler: object
    row_offsets: torch.Tensor
    expert_ids: torch.Tensor
    src_info: torch.Tensor
    routing: object

    @classmethod
    def allocate(cls, ep, *, rows: int | None = None, weighted: bool = False) -> Buffers:
        handler = contract.TokenHandler.allocate(ep, rows=rows, weighted=weighted)
        count, groups = len(handler.output_tokens), ep.config.num_groups
        made = cls(
            handler,
            torch.empty(groups + 1, dtype=torch.int32, device=ep.device),
            torch.empty(groups, dtype=torch.int32, device=ep.device),
            torch.empty(count, 3, dtype=torch.int32, device=ep.device),
            contract.EPRouting.allocate(ep),
        )
        owned = (handler.output_tokens, handler.output_scales, handler.scales_offsets, handler.weights)
        for tensor in (*owned, made.row_offsets, made.expert_ids, made.src_info):
            if tensor is not None and tensor.numel():
                tensor.view(torch.uint8).fill_(0xAA)
        return made

    def fields(self) -> dict[str, Packed | None]:
        handler, routing = self.handler, self.routing
        values = {
            "tokens": handler.output_tokens,
            "scales": handler.output_scales,
            "row_offsets": self.row_offsets,
            "expert_ids": self.expert_ids,
            "src_info": self.src_info,
            "scales_offsets": handler.scales_offsets,
            "weights": handler.weights,
            "num_recv_tokens": routing.num_recv_tokens,
            "overflow": routing.overflow,
        }
        return {name: Packed.of(values.get(name)) for name in FIELDS}


def on_devices(eps: Sequence, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each rank's tensor on its device."""
    return [tensor.to(ep.device) for ep, tensor in zip(eps, tensors, strict=True)]


def dispatch_all(eps: Sequence, buffers: Sequence[Buffers], case: Case) -> None:
    """One dispatch of a case on all ranks."""
    datas = [case.data(rank) for rank in range(len(eps))]
    contract.distributed_ep_dispatch(
        eps,
        [b.handler for b in buffers],
        [b.row_offsets for b in buffers],
        [b.expert_ids for b in buffers],
        [b.src_info for b in buffers],
        [ep.atomic_counters[contract.DISPATCH] for ep in eps],
        on_devices(eps, [d.x for d in datas]),
        on_devices(eps, [d.topk_ids for d in datas]),
        [ep.pointers[contract.DISPATCH] for ep in eps],
        [b.routing for b in buffers],
        router_weights=on_devices(eps, [d.topk_weights for d in datas]) if case.weights == "dispatch" else None,
    )


def combine_all(eps: Sequence, buffers: Sequence[Buffers], case: Case) -> list[torch.Tensor]:
    """One combine of a case on all ranks."""
    datas = [case.data(rank) for rank in range(len(eps))]
    params = eps[0].params
    outs = []
    for d in datas:
        shape = (len(d.x), params.hidden_size) if case.reduce else (len(d.x), params.top_k, params.hidden_size)
        outs.append(torch.full(shape, float("nan"), dtype=params.combine_dtype))
    outs = on_devices(eps, outs)
    travelled = case.weights == "dispatch"
    contract.distributed_ep_combine(
        eps,
        outs,
        [ep.atomic_counters[contract.COMBINE] for ep in eps],
        on_devices(eps, [case.expert_rows(rank, len(b.src_info)) for rank, b in enumerate(buffers)]),
        [b.routing for b in buffers],
        [ep.pointers[contract.COMBINE] for ep in eps],
        on_devices(eps, [d.topk_ids for d in datas]),
        router_weights=on_devices(eps, [d.topk_weights for d in datas]) if case.weights == "combine" else None,
        row_weights=[b.handler.weights for b in buffers] if travelled else None,
        shared=on_devices(eps, [case.shared_rows(rank) for rank in range(len(eps))]) if case.shared else None,
    )
    for ep in eps:
        if ep.device.type == "cuda":
            torch.cuda.synchronize(ep.device)
        ep.raise_error()
    return outs


def warm_up(ep, case: Case, forms: Sequence[str]) -> None:
    """Compile what calls of ``case`` launch in ``forms``, and what calls with other weights do."""
    data = case.data(0)
    ep.warmup(input_dtypes=(data.x.dtype,), id_dtypes=(data.topk_ids.dtype,), forms=forms, shared=case.shared)


@dataclasses.dataclass(frozen=True)
class Launched:
    """What ranks of one device launch for a dispatch and a combine of ``case``, or what :func:`warm_up` compiles for a
    rank: a task of ``gpu_compile``."""

    case: Case
    world_size: int
    forms: tuple[str, ...] = ()

    def compile(self) -> None:
        """On one device nobody waits for a launch that comes later, so the calls are made as they are."""
        device = f"cuda:{torch.cuda.current_device()}"
        eps = ranks_of(params_of(self.case.setup, self.world_size), device)
        if self.forms:
            warm_up(eps[0], self.case, self.forms)
            return
        buffers = [Buffers.allocate(ep, weighted=self.case.weights == "dispatch") for ep in eps]
        dispatch_all(eps, buffers, self.case)
        combine_all(eps, buffers, self.case)


def run(eps: Sequence, case: Case) -> None:
    """A case through the launchers, against the oracle."""
    buffers = [Buffers.allocate(ep, weighted=case.weights == "dispatch") for ep in eps]
    dispatch_all(eps, buffers, case)
    outs = combine_all(eps, buffers, case)
    results = [Result(b.fields(), Packed.of(out)) for b, out in zip(buffers, outs, strict=True)]
    check_case(case, len(eps), results)


def setup(fmt: str = "bf16", **options) -> Setup:
    return Setup(fmt, tuple({"pre_reduce": False, **options}.items()))
