"""What one rank does with the models of :mod:`transformers_models`; the tests judge what comes back."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import moelink
from moelink.integrations.transformers import LoadReport, ParallelModel, from_pretrained, parallelize, register
from tests.integrations.transformers.transformers_models import MAX_TOKENS, NEW_TOKENS, generate, share, tokens, train

COMMON: dict[str, Any] = {"max_tokens_per_rank": MAX_TOKENS}


@dataclass(frozen=True)
class Folders:
    """Of one family: the checkpoint, this rank's part of it, where to write it again; and the device to use."""

    whole: str
    own: str
    saved: str
    device: str = "cpu"


@dataclass(frozen=True)
class Answers:
    """One rank's, of one family.

    Attributes:
        replicated, sharded: logits of the whole batch, and of this rank's sequences.
        continuation: of the whole batch. own_continuation: of this rank's sequences, each rank of another length.
        losses, gradients: of a training step, by way of feeding ("recomputed": alltoall with gradient checkpointing).
            Experts' gradients are those of this rank's experts. norms: of the whole model's gradient.
        by_format: logits of this rank's sequences, by dispatch format.
        bf16: logits of this rank's sequences of the model in bf16.
        read: what was read of a checkpoint that has no other rank's experts.
    """

    replicated: Tensor
    sharded: Tensor
    continuation: Tensor
    own_continuation: Tensor
    losses: dict[str, Tensor]
    gradients: dict[str, dict[str, Tensor]]
    norms: dict[str, Tensor]
    by_format: dict[str, Tensor]
    bf16: Tensor
    read: LoadReport


def gradients(parallel: ParallelModel) -> dict[str, Tensor]:
    named = parallel.model.named_parameters()
    return {name: p.grad.cpu().clone() for name, p in named if p.grad is not None}


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits.cpu()


def answers(rank: int, world_size: int, folders: Folders) -> Answers:
    ids = tokens().to(folders.device)
    own = ids[share(rank, world_size)]
    common = COMMON | {"device": folders.device}
    losses, grads, by_format, norms = {}, {}, {}, {}
    with from_pretrained(folders.own, mode="allreduce", **common) as parallel:
        assert parallel.ep.config.dispatch_format == "fp32"
        replicated, continuation = logits(parallel.model, ids), generate(parallel.model, ids).cpu()
        losses["allreduce"] = train(parallel.model, ids)
        parallel.sum_gradients()
        grads["allreduce"], norms["allreduce"] = gradients(parallel), parallel.grad_norm().cpu()
        read = parallel.loaded
        assert read is not None
        parallel.save_pretrained(folders.saved)
    # The second way to get there: a model that every rank has loaded whole.
    model = AutoModelForCausalLM.from_pretrained(folders.whole).to(folders.device)
    with parallelize(model, **common) as parallel:
        sharded = logits(model, own)
        own_continuation = generate(model, own, new_tokens=NEW_TOKENS - rank, synced_gpus=world_size > 1).cpu()
        for name in ("alltoall", "recomputed"):
            model.zero_grad()
            if name == "recomputed":
                # The second name is the older one, of transformers before 5.23.
                newer = getattr(model, "activation_checkpointing_enable", None)
                (newer or model.gradient_checkpointing_enable)()
            losses[name] = train(model, own)
            parallel.sum_gradients()
            grads[name], norms[name] = gradients(parallel), parallel.grad_norm().cpu()
    for name in ("bf16", "fp8_block128"):
        with from_pretrained(folders.own, dispatch_format=name, **common) as parallel:
            by_format[name] = logits(parallel.model, own)
    with from_pretrained(folders.own, dtype=torch.bfloat16, **common) as parallel:
        assert parallel.ep.config.dispatch_format == "bf16"
        # The experts: transformers keeps some routers in fp32.
        experts = [p for name, p in parallel.model.named_parameters() if ".experts." in name]
        assert {p.dtype for p in experts} == {torch.bfloat16}
        bf16 = logits(parallel.model, own)
    return Answers(replicated, sharded, continuation, own_continuation, losses, grads, norms, by_format, bf16, read)


@dataclass(frozen=True)
class Registered:
    """One rank's answers from models that transformers itself sharded, with moelink registered.

    Attributes:
        replicated, continuation: of the whole batch. sharded: logits of this rank's sequences.
        losses, gradients: of a training step, by way of feeding; gradients whole.
        modes: of the communicators that were made, in order.
        refused: what a mixture of both is told.
    """

    replicated: Tensor
    continuation: Tensor
    sharded: Tensor
    losses: dict[str, Tensor]
    gradients: dict[str, dict[str, Tensor]]
    modes: list[str]
    refused: str


def full(value: Tensor) -> Tensor:
    """A parameter's gradient, whole, however transformers has sharded it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def same_batch(family: str, world_size: int) -> Any:
    """The two ways to ask transformers for it: by sizes, and by the flag that sizes have replaced."""
    from transformers.distributed import DistributedConfig

    if family == "qwen3_moe":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it is deprecated, and still there
            return DistributedConfig(tp_plan="auto", enable_expert_parallel=True, ep_implementation="moelink")
    return DistributedConfig(tp_size=world_size, ep_size=world_size, ep_implementation="moelink")


def mixture_refused(folder: str, world_size: int) -> str:
    """What is said to ranks of which two each hold the same batch."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=2, fsdp_size=world_size // 2, ep_size=world_size, ep_implementation="moelink")
    with register(max_tokens_per_rank=MAX_TOKENS):
        try:
            AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        except moelink.UnsupportedError as error:
            return str(error)
    return ""


def registered(rank: int, world_size: int, folders: dict[str, str]) -> dict[str, Registered]:
    from transformers.distributed import DistributedConfig

    ids = tokens()
    own = ids[share(rank, world_size)]
    found = {}
    refused = mixture_refused(folders["mixtral"], world_size) if world_size == 4 else ""
    for name, folder in folders.items():
        with register(max_tokens_per_rank=MAX_TOKENS) as registration:
            losses, grads = {}, {}
            config = same_batch(name, world_size)
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
            replicated, continuation = logits(model, ids), generate(model, ids)
            losses["allreduce"] = train(model, ids)
            grads["allreduce"] = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            config = DistributedConfig(fsdp_size=world_size, ep_size=world_size, ep_implementation="moelink")
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
            sharded = logits(model, own)
            losses["alltoall"] = train(model, own)
            grads["alltoall"] = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            modes = [ep.config.mode for ep in registration.communicators]
        found[name] = Registered(replicated, continuation, sharded, losses, grads, modes, refused)
    return found


def everything(
    rank: int, world_size: int, folders: dict[str, str], own: dict[str, list[str]], saved: str
) -> tuple[dict[str, Answers], dict[str, Registered]]:
    """``own``: folders by family and rank that have the files of that rank's experts only."""
    mine = {name: Folders(folder, own[name][rank], f"{saved}/{name}") for name, folder in folders.items()}
    found = {name: answers(rank, world_size, its) for name, its in mine.items()}
    has_registry = find_spec("transformers.distributed.expert_parallel") is not None
    return found, registered(rank, world_size, folders) if world_size > 1 and has_registry else {}


def compiled(rank: int, world_size: int, folder: str) -> bool:
    """Whether the model as one graph, forward and backward, gives what it gives without a compiler."""
    ids = tokens()
    with from_pretrained(folder, mode="allreduce", device="cpu", **COMMON) as parallel:
        loss, want = train(parallel.model, ids), gradients(parallel)
        parallel.model.zero_grad()
        again = train(torch.compile(parallel.model, backend="aot_eager", fullgraph=True), ids)
        got = gradients(parallel)
    same = all(torch.allclose(got[name], want[name], atol=1e-6) for name in want)
    return same and got.keys() == want.keys() and torch.allclose(loss, again)


def on_gpus(rank: int, world_size: int, folders: dict[str, str], saved: str) -> dict[str, Answers]:
    return {
        name: answers(rank, world_size, Folders(folder, folder, f"{saved}/{name}", device=f"cuda:{rank}"))
        for name, folder in folders.items()
    }


def mishaps(rank: int, world_size: int, folder: str, broken: str, small: str, malformed: str) -> dict[str, Any]:
    """What wrong uses say, and that the ranks can go on afterwards, with experts that their number does not divide."""
    said: dict[str, Any] = {}
    mine = malformed if rank == 1 else folder
    for what, where in {"small": small, "broken": broken, "malformed": mine}.items():
        try:
            from_pretrained(where, device="cpu", **COMMON)
        except moelink.MoelinkError as error:
            said[what] = f"{type(error).__name__}: {error}"
    with from_pretrained(folder, mode="allreduce", device="cpu", **COMMON) as parallel:
        said["experts"] = parallel.ep.config.num_local_experts
        said["logits"] = logits(parallel.model, tokens())
        said["saved"] = None
        try:
            parallel.model.save_pretrained(folder)
        except moelink.UnsupportedError as error:
            said["saved"] = str(error)
    return said
