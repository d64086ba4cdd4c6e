"""``parallelize``: a model whose experts are spread over the ranks and whose other weights every rank has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

import moelink
from moelink.control.exchange import BUSY, Peers
from moelink.errors import ArgumentError, ConfigError, UnsupportedError
from moelink.integrations.transformers import adapters as lora
from moelink.integrations.transformers.checkpoint import Checkpoint, LoadReport
from moelink.integrations.transformers.experts import ParallelExperts, refuse_form
from moelink.integrations.transformers.forms import Form, Settings, Shape, experts_of, form_of, topk_of
from moelink.integrations.transformers.fp8 import FORMAT, check_quantization, choose_for, padded, quantized_experts
from moelink.integrations.transformers.loading import Part, empty_model, fill, gathered_state_dict, is_empty, only_own
from moelink.integrations.transformers.padding import Padding
from moelink.integrations.transformers.ranks import CheckedGenerate, agreed, gradient_norm, has_jitter, sum_gradients
from moelink.integrations.versions import require
from moelink.lifetime import peers_of
from moelink.names import Mode, TransportName
from moelink.nn.expert_backends import ExpertsBackend, Stored, require_known
from moelink.nn.owned import mark_experts, owned_tensors
from moelink.nn.placement import Placement


@dataclass(frozen=True)
class ParallelModel:
    """A model and the communicator of its experts. Also a context manager that closes the communicator.

    Attributes:
        model: the model that was passed, changed in place; after :meth:`with_adapters` PEFT's model around it.
        ep: the communicator of its layers with experts, which run one after the other.
        group: the process group of the ranks; None for one rank.
        loaded: the tensors that were read of a checkpoint; None without one.
        peers: the ranks of ``group``, and the timeout of exchanges.
    """

    model: PreTrainedModel
    ep: moelink.Communicator
    group: dist.ProcessGroup | None
    loaded: LoadReport | None
    peers: Peers | None = None

    def sum_gradients(self) -> None:
        """Sum the replicated parameters' gradients over the ranks. Collective; call it after backward.

        In mode "alltoall" each rank's batch gives a share of them. Experts' gradients are whole already: an expert's
        rank has seen every token it served. In mode "allreduce" all gradients are whole, and this does nothing.
        """
        if self.ep.config.mode == "alltoall":
            sum_gradients(self._replicated(), self.peers)

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of the whole model's gradient, [] fp32, the same on every rank. Collective; after sum_gradients.

        ``torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, parallel.grad_norm())`` clips by it.
        (``clip_grad_norm_`` would scale each rank by the norm of its own gradients, and ranks would diverge.)
        """
        return gradient_norm(self._replicated(), self._own(), self.peers)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the whole model, all experts included, as transformers would write it unsharded. Collective. After
        :meth:`with_adapters`: write the adapters, those of all experts included, as PEFT would write them unsharded.

        Rank 0 writes, and holds the whole model in host memory meanwhile; the others send it their experts.
        (``model.save_pretrained`` refuses: it would write one rank's experts as if they were all.)

        Raises:
            UnsupportedError: the experts are quantised, or the model has adapters that :meth:`with_adapters` has
                attached to another ParallelModel.
        """
        if not isinstance(self.model, PreTrainedModel):
            lora.save(self.model, folder, self.peers, self.ep.config.rank)
            return
        self._refuse_adapters("save_pretrained")
        experts = dict(experts_modules(self.model))
        if any(module.quantized is not None for module in experts.values()):
            raise UnsupportedError(
                "save_pretrained: expected experts of the model's dtype, got quantised ones, which are as the "
                "checkpoint has them; copy the checkpoint"
            )
        state = gathered_state_dict(self.model, experts, peers=self.peers, rank=self.ep.config.rank)
        with agreed(self.peers):
            if state is not None:
                type(self.model).save_pretrained(self.model, folder, state_dict=state)

    def load_pretrained(self, folder: str | Path) -> LoadReport:
        """Read the weights of ``folder`` into the model, each rank its own experts only. Collective.

        Parameters stay the same objects, so an optimizer keeps them.

        Args:
            folder: a checkpoint of such a model, or adapters, such as :meth:`save_pretrained` writes.

        Raises:
            UnsupportedError: as :meth:`save_pretrained`.
            CheckpointError: a file or tensor is missing; raised on every rank when one meets it.
        """
        if not isinstance(self.model, PreTrainedModel):
            return lora.load(self.model, folder, self.peers)
        self._refuse_adapters("load_pretrained")
        if any(module.quantized is not None for _, module in experts_modules(self.model)):
            raise UnsupportedError(
                "load_pretrained: expected experts of the model's dtype, got quantised ones; use from_pretrained"
            )
        with agreed(self.peers):
            model = empty_model(folder, dtype=self.model.dtype, auto_class=type(self.model))
            layers = dict(experts_of(model))
            forms = {name: form_of(module) for name, module in layers.items()}
        parts = {
            name: Part.of(self.ep.config, None if module.placement is None else module.placement.placement)
            for name, module in experts_modules(self.model)
        }
        report = _load(model, layers, forms, parts, self.ep.device, checkpoint=folder, peers=self.peers, stored=None)
        self.model.load_state_dict(model.state_dict())
        return report

    def with_adapters(self, adapters: Any, *, trainable: bool = True) -> ParallelModel:
        """Attach LoRA adapters of PEFT, to experts or others, in place. Collective.

        Each rank has the adapters of its own experts. New adapters of replicated weights are those of rank 0.

        Args:
            adapters: a ``peft.LoraConfig``, which names experts in ``target_parameters``; or a folder with adapters of
                the whole model, as PEFT writes them, of which a rank takes its part.
            trainable: whether adapters of a folder learn.

        Returns:
            This object with PEFT's model in place of ``model``: train, save and load the adapters with it. After
            ``merge_and_unload`` of PEFT's model, this object has the merged weights.

        Raises:
            UnsupportedError: PEFT is not installed.
            ArgumentError: ``adapters`` is neither of these.
            CheckpointError: another rank raised, or as PEFT.
        """
        return replace(self, model=lora.attach(self.model, adapters, self.peers, trainable=trainable))

    def _refuse_adapters(self, call: str) -> None:
        if any(hasattr(module, "base_layer") for module in self.model.modules()):
            raise UnsupportedError(
                f"{call}: expected a model without adapters, got adapters attached to it; call {call} of the "
                "ParallelModel that with_adapters returned, or merge them first (merge_and_unload of PEFT's model)"
            )

    def _own(self) -> list[nn.Parameter]:
        return [owned.tensor for owned in owned_tensors(self.model) if isinstance(owned.tensor, nn.Parameter)]

    def _replicated(self) -> list[nn.Parameter]:
        own = {id(parameter) for parameter in self._own()}
        return [parameter for parameter in self.model.parameters() if id(parameter) not in own]

    def close(self) -> None:
        """Release the communicator. The model keeps its weights and cannot run any more."""
        self.ep.close()

    def __enter__(self) -> ParallelModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def experts_modules(model: nn.Module) -> list[tuple[str, ParallelExperts]]:
    """(name, module) of the layers' experts in a model that was parallelised."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, ParallelExperts)]


def parallelize(
    model: PreTrainedModel,
    *,
    max_tokens_per_rank: int,
    mode: Mode = "alltoall",
    dispatch_format: str | None = None,
    combine_dtype: torch.dtype | None = None,
    capacity: int | None = None,
    batch_invariant: bool = False,
    checkpoint: str | Path | None = None,
    experts_backend: ExpertsBackend = "auto",
    topk: int | None = None,
    placement: Placement | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    transport: TransportName = "auto",
    num_sms: int | None = None,
    timeout: float = 60.0,
) -> ParallelModel:
    """Spread the experts of ``model`` over the ranks, in place; the rest stays as it is, on every rank. Collective.

    Rank r keeps a contiguous block of each layer's experts; if their number does not divide, the first ranks keep one
    more. All ranks pass a model with the same weights, or an empty one and ``checkpoint``.

    Args:
        model: whose experts use transformers' experts interface.
        max_tokens_per_rank: the largest batch times sequence length that a rank passes in one forward.
        mode: "alltoall": each rank passes a batch of its own, tokens travel to experts and back. "allreduce": every
            rank passes the same batch, nothing travels but the sum of the experts' outputs. ``generate`` compares the
            ranks' tokens in every forward, and raises ArgumentError on all ranks if they differ.
        dispatch_format: how rows travel; None for the format that carries the model's dtype exactly, or for
            ``fp8_block128`` if the checkpoint's experts are in fp8 or mxfp4.
        combine_dtype: of experts' outputs on the way home; None for the model's dtype.
        capacity: rows a rank receives at most; None for the worst case. ``ep.check()`` reports lost rows.
        batch_invariant: the bits of experts' outputs depend on the token alone, in mode "alltoall"; as for
            :func:`moelink.init`.
        checkpoint: a folder of safetensors files; a rank reads the replicated weights and its own experts only.
        experts_backend: the product of experts of a checkpoint in fp8 or mxfp4, as in :class:`moelink.nn.MoE`.
        topk: experts of a token, if the model's configuration does not have it.
        placement: the expert that each of the communicator's experts holds, in every layer at first, which a
            :class:`moelink.nn.Balancer` changes by the load. It may hold an expert several times (replicas, for
            inference only). None: each expert once, in order, and nothing is counted.
        group, transport, num_sms, timeout: as for :func:`moelink.init`.
        device: of the model after the call; None for its present one, or moelink's default if it is empty.

    Raises:
        ArgumentError: the model has no experts that use the interface, or is empty without a ``checkpoint``.
        ConfigError: there are fewer experts than ranks, ``placement`` is of another number of experts, ``topk`` is not
            that of the model's configuration, or as :func:`moelink.init`.
        UnsupportedError: experts of a form that is not supported, or transformers of such a release.
        CheckpointError: a file or tensor is missing; raised on every rank when one meets it.
    """
    require("transformers")
    require_known(experts_backend)
    layers = dict(experts_of(model))
    forms = {name: form_of(module) for name, module in layers.items()}
    shape = _shape_of(model, layers, forms, topk)
    if placement is not None and placement.num_experts != shape.num_experts:
        raise ConfigError("placement", f"a placement of {shape.num_experts} experts", placement.num_experts)
    shape = replace(shape, num_experts=placement.num_physical) if placement is not None else shape
    empty = is_empty(model)
    if empty and checkpoint is None:
        raise ArgumentError("checkpoint", "a folder, as parameters of the model are on the meta device", None)
    stored = None if checkpoint is None else check_quantization(model.config, f"checkpoint {checkpoint}")
    shape = replace(shape, hidden_size=padded(shape.hidden_size, stored))
    settings = Settings(
        max_tokens_per_rank=max_tokens_per_rank, dispatch_format=dispatch_format or (FORMAT if stored else None),
        combine_dtype=combine_dtype, capacity=capacity, batch_invariant=batch_invariant, transport=transport,
        num_sms=num_sms, timeout=timeout,
    )  # fmt: skip
    where = torch.device(device) if device is not None else None if empty else model.device
    ep = settings.open(shape, mode=mode, group=group, device=where)
    ranks = (group or dist.group.WORLD) if ep.config.world_size > 1 else None
    peers = peers_of(ep, ranks, "an exchange of the model's weights", busy=BUSY) if ranks is not None else None
    layer_peers = peers_of(ep, ranks, "a sum of a layer") if ranks is not None else None
    parts, loaded = dict.fromkeys(layers, Part.of(ep.config, placement)), None
    try:
        for name, form in forms.items():
            refuse_form(form, layers[name]._parameters, ep)
        backends = (
            {name: choose_for(form, ep, experts_backend, stored) for name, form in forms.items()} if stored else {}
        )
        if checkpoint is None:
            _keep(layers, forms, parts, ep.device)
        else:
            loaded = _load(model, layers, forms, parts, ep.device, checkpoint=checkpoint, peers=peers, stored=stored)
    except BaseException:
        ep.close()
        raise
    names, padding = _all_names(model, layers), Padding()
    for name, module in layers.items():
        form = forms[name]
        quantized = quantized_experts(module, form, ep, backend=backends[name], placement=placement) if stored else None
        experts = ParallelExperts(
            ep, module, form, peers=layer_peers, padding=padding, placement=placement, quantized=quantized
        )
        experts.has_jitter = has_jitter(model)
        for each in names[name]:
            model.set_submodule(each, experts)
    model.to(device=ep.device)  # type: ignore[call-arg]
    mark_experts(model)
    padding.watch(model, ParallelExperts)
    lora.keep_adapters_whole(model)
    model.save_pretrained = _refuse_to_save  # type: ignore[method-assign]
    if mode == "allreduce" and layer_peers is not None and callable(getattr(model, "generate", None)):
        model.generate = CheckedGenerate(model, layer_peers)  # type: ignore[method-assign,assignment]
    return ParallelModel(model, ep, ranks, loaded, peers)


def from_pretrained(
    folder: str | Path,
    *,
    max_tokens_per_rank: int,
    mode: Mode = "alltoall",
    dtype: torch.dtype | str | None = None,
    dispatch_format: str | None = None,
    combine_dtype: torch.dtype | None = None,
    capacity: int | None = None,
    batch_invariant: bool = False,
    experts_backend: ExpertsBackend = "auto",
    topk: int | None = None,
    placement: Placement | None = None,
    auto_class: Any = None,
    attn_implementation: str | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    transport: TransportName = "auto",
    num_sms: int | None = None,
    timeout: float = 60.0,
) -> ParallelModel:
    """Load a checkpoint, each rank its own experts only: :func:`empty_model`, then :func:`parallelize`. Collective.

    ``dtype``, ``auto_class`` and ``attn_implementation`` as in :func:`empty_model`, the rest as in :func:`parallelize`.
    The model is in evaluation mode, as with transformers' own ``from_pretrained``.
    """
    model = empty_model(folder, dtype=dtype, auto_class=auto_class, attn_implementation=attn_implementation)
    parallel = parallelize(
        model, max_tokens_per_rank=max_tokens_per_rank, mode=mode, dispatch_format=dispatch_format,
        combine_dtype=combine_dtype, capacity=capacity, batch_invariant=batch_invariant, checkpoint=folder,
        experts_backend=experts_backend, topk=topk, placement=placement, group=group, device=device,
        transport=transport, num_sms=num_sms, timeout=timeout,
    )  # fmt: skip
    model.train(False)
    return parallel


def _shape_of(model: PreTrainedModel, layers: dict[str, Any], forms: dict[str, Form], topk: int | None) -> Shape:
    shapes = {
        Shape(form.num_experts, topk_of(model, layers[name], topk), form.hidden_size, form.dtype)
        for name, form in forms.items()
    }
    if not shapes:
        expected = "layers with experts that use transformers' experts interface, not yet parallelised"
        raise ArgumentError("model", expected, f"{type(model).__name__} without any")
    if len(shapes) > 1:
        raise UnsupportedError(
            f"{type(model).__name__}: expected experts of one shape in all layers, got {shapes}; pass the parts of "
            "the model that have experts of one shape, each by itself"
        )
    return shapes.pop()


def _all_names(model: nn.Module, layers: dict[str, Any]) -> dict[str, list[str]]:
    """All names of each of ``layers``, which may be one module in several places, by its first."""
    first = {id(module): name for name, module in layers.items()}
    names: dict[str, list[str]] = {name: [] for name in layers}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in first:
            names[first[id(module)]].append(name)
    return names


def _keep(layers: dict[str, Any], forms: dict[str, Form], parts: dict[str, Part], device: torch.device) -> None:
    """Leave this rank's experts of the model, on ``device``, and free the others."""
    for name, module in layers.items():
        for own in forms[name].stacked:
            whole = module._parameters[own]
            rows = whole.detach()[list(parts[name].places)].to(device)
            module._parameters[own] = nn.Parameter(rows, requires_grad=whole.requires_grad)


def _load(
    model: PreTrainedModel,
    layers: dict[str, Any],
    forms: dict[str, Form],
    parts: dict[str, Part],
    device: torch.device,
    *,
    checkpoint: str | Path,
    peers: Peers | None,
    stored: Stored | None,
) -> LoadReport:
    """This rank's experts and all that is replicated, from files. Collective."""
    stacked = {name: form.stacked for name, form in forms.items()}
    with only_own(layers, stacked, parts, stored=stored) as named, agreed(peers), Checkpoint(checkpoint) as opened:
        result = fill(model, opened, named, device)
    return result  # noqa: RET504 - mypy takes agreed for one that may suppress errors


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(
        "save_pretrained: expected the ParallelModel that parallelize returned, got its model, which holds this rank's "
        "experts only; call save_pretrained of the ParallelModel on every rank, or use the Trainer of "
        "moelink.integrations.transformers.trainer"
    )
