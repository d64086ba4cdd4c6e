"""Settings of a layer of vLLM: refusals, the format of rows, arguments of ``init``. vLLM is not imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelink.config import EPConfig
from moelink.env import VLLM
from moelink.errors import UnsupportedError
from moelink.formats.scale_layouts import Transposed
from moelink.integrations.settings import Settings, SharedCommunicators
from moelink.nn.experts import group_of_rows
from moelink.output import DispatchOutput
from moelink.routing import ExpertMap

COMMUNICATORS = SharedCommunicators()
close = COMMUNICATORS.close
"""Close the communicators of all layers in this process. Collective."""

BACKEND = "allgather_reducescatter"
"""The ``--all2all-backend`` in whose place moelink works: vLLM's default, which brings no library of its own."""

PLAIN = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""By dtype of the activations, the format that carries them exactly."""

LOCAL_IDS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
"""The module of vLLM's experts for CPUs. They ignore ``expert_map``, and their kernels index weights by any id."""


@dataclass(frozen=True)
class Parallelism:
    """Options of vLLM that matter here, by their names.

    Attributes:
        backend: ``--all2all-backend``.
        spread: whether experts and tokens are both spread over ranks, so that tokens travel.
        monolithic: whether the experts route tokens themselves.
        lora, elastic, fault_tolerance: whether these are on.
        microbatches: that are in flight at a time, 2 with ``--enable-dbo``.
    """

    backend: str
    spread: bool
    monolithic: bool = False
    lora: bool = False
    elastic: bool = False
    fault_tolerance: bool = False
    microbatches: int = 1


def refuse(asked: Parallelism) -> None:
    """Refuse options that moelink does not support.

    Raises:
        UnsupportedError: it names the option and the alternative.
    """
    off = f"or unset {VLLM.name}"
    if asked.backend != BACKEND:
        raise UnsupportedError(
            f"--all2all-backend: expected {BACKEND}, vLLM's default, whose place moelink takes, got {asked.backend}; "
            f"leave the option out, {off}"
        )
    if not asked.spread:
        raise UnsupportedError(
            "--enable-expert-parallel, --data-parallel-size: expected expert parallelism over several data-parallel "
            f"ranks, got a layer whose tokens do not travel; set both, {off}"
        )
    if asked.monolithic:
        raise UnsupportedError(
            "--moe-backend: expected experts that take topk_ids, got monolithic ones, which route tokens themselves; "
            f"choose triton, deep_gemm or cutlass, {off}"
        )
    for on, option, why, instead in (
        (
            asked.lora, "--enable-lora", "adapters compute inside of vLLM's experts",
            "merge the adapter into the checkpoint",
        ),
        (
            asked.elastic, "--enable-elastic-ep", "vLLM scales over groups that torch.distributed does not know",
            "restart with another --data-parallel-size, or replicate experts by --enable-eplb, which is served",
        ),
        (
            asked.fault_tolerance, "--enable-fault-tolerance", "vLLM masks ranks in its own backends alone",
            "start anew after a fault",
        ),
    ):  # fmt: skip
        if on:
            raise UnsupportedError(f"{option}: expected it off, as {why}, got it on; leave it out ({instead}), {off}")


@dataclass(frozen=True)
class Quantization:
    """The input of experts, by vLLM's ``FusedMoEQuantConfig`` and the experts.

    Attributes:
        dtype: of the quantised input: a torch dtype, a name ("nvfp4"), or None.
        block_shape: rows and columns that share a scale, or None.
        per_token: one scale for each token.
        static: the scale is known before the tokens are.
        deferred: the experts quantise their input themselves.
        e8m0: scales are powers of two (DeepGEMM on Blackwell).
        transposed: scales are [scales per row, rows].
    """

    dtype: torch.dtype | str | None = None
    block_shape: tuple[int, ...] | None = None
    per_token: bool = False
    static: bool = False
    deferred: bool = False
    e8m0: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Rows:
    """How rows travel.

    Attributes:
        format: moelink's dispatch format.
        quantized_by: "moelink", as they leave; "vllm", before; "arrival", by vLLM as they arrive; or "nobody".
    """

    format: str
    quantized_by: str


def rows_of(activations: torch.dtype, wanted: Quantization) -> Rows:
    """Return the rows on their way to experts with the input ``wanted``.

    Raises:
        UnsupportedError: activations of this dtype, or a quantisation of which a row depends on other rows.
    """
    if activations not in PLAIN:
        raise UnsupportedError(
            f"--dtype: expected bfloat16 or float32, whose rows moelink carries exactly, got {activations}; pass "
            "--dtype bfloat16"
        )
    plain = PLAIN[activations]
    if wanted.deferred or wanted.dtype is None:
        return Rows(plain, "nobody")
    if wanted.dtype == torch.float8_e4m3fn and wanted.block_shape is not None:
        if tuple(wanted.block_shape) != (128, 128):
            raise UnsupportedError(
                f"quantization: expected blocks of 128 x 128, got {tuple(wanted.block_shape)}; unset {VLLM.name}"
            )
        if wanted.transposed:
            raise UnsupportedError(
                "--moe-backend: expected experts that take the scales of a row together, got flashinfer_trtllm, which "
                f"takes them transposed; choose triton or deep_gemm, or unset {VLLM.name}"
            )
        return Rows("fp8_block128", "vllm" if wanted.e8m0 else "moelink")
    if wanted.dtype == torch.float8_e4m3fn and wanted.per_token:
        return Rows("fp8_token", "moelink")
    if wanted.static or wanted.per_token or wanted.dtype == "mxfp8":
        return Rows(plain, "arrival")
    raise UnsupportedError(
        f"quantization: expected activations with a scale for each block or token, or a static one, got {wanted.dtype} "
        f"with one scale for all tokens of a rank; use a checkpoint with static scales, or unset {VLLM.name}"
    )


def takes_local_ids(experts: type) -> bool:
    """Return whether a class of experts takes the ids of this rank's experts, counted from 0, and no -1.

    vLLM's classes do not declare it: :data:`LOCAL_IDS` names the module of those that do.
    """
    return any(base.__module__ == LOCAL_IDS for base in experts.__mro__)


def without_gaps(ids: Tensor) -> Tensor:
    """Return ``ids``, [rows, topk], with an expert that the row goes to anyway in place of -1; 0 on rows without one.

    The router weight is 0 there, so that sums are the same.

    >>> without_gaps(torch.tensor([[-1, 2], [1, 0], [-1, -1]])).tolist()
    [[2, 2], [1, 0], [0, 0]]
    """
    return torch.where(ids < 0, ids.amax(1, keepdim=True).clamp(min=0), ids)


def init_arguments(
    rows: Rows, *, settings: Settings, config: Any, device: torch.device, microbatches: int, global_ids: bool = True
) -> dict[str, Any]:
    """Return arguments of :func:`moelink.init`, without the group.

    Args:
        rows: of :func:`rows_of`.
        settings: of the environment variable.
        config: the layer's ``FusedMoEConfig``. Its ``num_experts`` counts physical experts, so that with EPLB replicas
            are experts of their own.
        device: this rank's.
        microbatches: that may be in flight at a time; each has a lane. On a CUDA device they share its SMs evenly,
            unless ``settings`` has a number for each lane.
        global_ids: ids count over all ranks, not from this rank's first expert.
    """
    chosen = settings.arguments()
    if microbatches > 1 and device.type == "cuda" and settings.num_sms is None:
        chosen["num_sms"] = torch.cuda.get_device_properties(device).multi_processor_count // microbatches
    return {
        "num_experts": config.num_experts,
        "topk": config.experts_per_token,
        "hidden_size": config.hidden_dim,
        "max_tokens_per_rank": config.max_num_tokens,
        "dispatch_format": rows.format,
        "combine_dtype": config.in_dtype,
        **({} if settings.batch_invariant else {"layout": "rank", "global_ids": global_ids}),
        "device": device,
        "lanes": microbatches,
        **chosen,
    }


def rows_by_expert(
    recv: DispatchOutput, config: EPConfig, *, local_ids: bool = False
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return scales [rows, scales per row], ids [rows, 1] and weights [rows, 1] of a row for each token and expert.

    The ids are global unless ``local_ids``, and -1 past the end. The weights are 1, as the home rank multiplies by the
    router's.
    """
    group = group_of_rows(recv.row_offsets, recv.tokens.shape[0])[:, None]
    first = 0 if local_ids else ExpertMap(config.num_experts, config.world_size).first(config.rank)
    scales, layout = recv.scales, config.format.scale_layout
    if scales is not None and isinstance(layout, Transposed):
        scales = scales.t().contiguous()
    return scales, torch.where(group >= 0, group + first, -1), torch.ones_like(group, dtype=torch.float32)


def bound_of(largest: int | None, *, own: int, shards: int, limit: int) -> int | None:
    """Return a bound on the tokens of every rank in a call, or None if it is not known.

    It is a power of two, or ``limit``, so that calls of similar sizes are of one kind.

    Args:
        largest: the most tokens of a data-parallel rank, None if vLLM does not say.
        own: this rank's tokens.
        shards: ranks over which sequence parallelism divides the tokens of a data-parallel rank.
        limit: ``max_tokens_per_rank`` of the communicator.

    >>> bound_of(9, own=5, shards=2, limit=64), bound_of(60, own=60, shards=1, limit=48)
    (8, 48)
    """
    if largest is None:
        return None
    tokens = max(1, own, -(-largest // shards))
    return min(limit, 1 << (tokens - 1).bit_length())
