"""MoE: a Mixture-of-Experts feed-forward layer whose experts are spread over the ranks of a communicator.

One call: route, dispatch, the experts this rank owns, combine. The router and a shared expert are replicated, that is,
every rank has them whole; of the experts a rank has its own only.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelink.communicator import Communicator
from moelink.config import EPConfig
from moelink.errors import ArgumentError, ConfigError, StateError, UnsupportedError
from moelink.initialize import init
from moelink.nn.aux_loss import AuxLossConfig, AuxLosses
from moelink.nn.expert_backends import ExpertsBackend, choose_backend
from moelink.nn.experts import Activation, known_max_tokens, likely_rows, refuse_experts
from moelink.nn.host_copies import HostCopies, keepers
from moelink.nn.load import KIND, SCHEMA_VERSION, BalancedLayer, LoadMeter
from moelink.nn.owned import ignored_by_ddp
from moelink.nn.parameters import part_of
from moelink.nn.placed_experts import Experts, QuantizedExperts, refuse_gradients
from moelink.nn.placement import Placement, PlacementMap
from moelink.nn.router import Router, RouterConfig
from moelink.nn.warmup import rehearse
from moelink.rows.activation import Clamp
from moelink.rows.batch_invariant import refuse_weight
from moelink.rows.dequantize import dequantized
from moelink.rows.scale_rows import cast_rows
from moelink.transports.ahead import Prepared
from moelink.transports.base import Rehearsal

_log = logging.getLogger("moelink")
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.uint8)


class MoE(BalancedLayer):
    """A Mixture-of-Experts feed-forward layer.

    Args:
        communicator: of the caller, who may share it between layers and closes it; or a mapping, the arguments of
            :func:`moelink.init` for a communicator of the layer's own (collective over the ranks), which :meth:`close`
            closes. Layout "expert". With ``fused_shared_expert`` each token also goes through a shared expert of
            ``intermediate_size``, in the same matrix products as the routed ones.
        intermediate_size: of each expert.
        router: the kind of router.
        aux_loss: auxiliary losses of the router in training mode, which :func:`moelink.nn.add_aux_losses` adds to the
            loss; None for none.
        activation: of the gate of experts.
        shared_expert: any module from [num_tokens, hidden_size] to the same, for example
            :class:`moelink.nn.GatedMLP`, whose output is added. It runs beside dispatch, but after it on the symmetric
            transport of one node, where that was measured to be faster; the ``repr`` says which.
        seed: of the first weights. A layer on any number of ranks starts with the same weights.
        host_counts: dispatch gives rows of exactly the size that is needed, in place of the worst case (or capacity),
            for one wait of the host a call: saves memory and work in eager training. Cannot be compiled or captured.
        experts_backend: the product of experts. "dequantize": rows become numbers of ``dtype`` first. "triton",
            "torch", "flashinfer": rows of format fp8_block128 are multiplied in fp8 by weights in fp8, "mxfp4": by
            weights in mxfp4, for inference only (:meth:`quantize_experts`). "auto" takes the product that was measured
            to be fastest, by format and device; the choice is logged, and part of the layer's ``repr``.
        load_steps: steps that :attr:`load` keeps one by one; 0 to count nothing.
        placement: which expert each of the communicator's experts holds (:mod:`moelink.nn.placement`): the router
            chooses among ``placement.num_experts``, and the communicator has ``placement.num_physical``. None: the
            router's experts are the communicator's. :class:`moelink.nn.Balancer` changes it by the load. With replicas
            for inference only.
        host_copies: other ranks that keep each expert's weights in host memory, pinned with a CUDA device, so that the
            expert outlives its rank: :func:`moelink.nn.refresh_host_copies` fills the copies, and
            :func:`moelink.nn.restore_experts` gives ranks the weights of experts that they have come to own.
        device, dtype: of the parameters; default the communicator's device and ``combine_dtype``. "meta" allocates
            nothing, for loading a checkpoint with ``assign=True``.

    Attributes:
        router, experts, shared_expert: the parts.
        load: counts tokens by the communicator's experts, or None.
        router_load: counts tokens by the router's experts in training mode, for
            :func:`moelink.nn.update_router_bias`; None if the router has no correction bias.
        aux_losses: an :class:`moelink.nn.AuxLosses`, or None.
        placement: turns the router's ids into the communicator's, or None.
        copies: host copies of other ranks' experts.
        ep: the communicator.

    In mode "allreduce" tokens are replicated and the result is this rank's part of the sum, as combine's is: all-reduce
    it, and the gradient of ``x``.

    Raises:
        ConfigError: a size or option does not fit; with a mapping also the errors of ``moelink.init``.
        UnsupportedError: ``experts_backend`` names one that cannot run here.

    Example:
        >>> import torch
        >>> from moelink.nn import MoE
        >>> sizes = {"num_experts": 4, "topk": 2, "hidden_size": 16, "max_tokens_per_rank": 8}
        >>> layer = MoE(sizes, intermediate_size=32)
        >>> layer(torch.ones(2, 3, 16, dtype=torch.bfloat16)).shape
        torch.Size([2, 3, 16])
        >>> sum(layer.stats().tokens_per_expert)
        12
        >>> layer.close()
    """

    def __init__(
        self,
        communicator: Communicator | Mapping[str, Any],
        *,
        intermediate_size: int,
        router: RouterConfig | None = None,
        aux_loss: AuxLossConfig | None = None,
        activation: Activation = torch.nn.functional.silu,
        shared_expert: torch.nn.Module | None = None,
        seed: int = 0,
        host_counts: bool = False,
        experts_backend: ExpertsBackend = "dequantize",
        load_steps: int = 1,
        placement: Placement | None = None,
        host_copies: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._ignored: tuple[str, ...] = ()
        if not isinstance(communicator, (Communicator, Mapping)):
            expected = "a Communicator or a mapping of moelink.init's arguments"
            raise ConfigError("communicator", expected, communicator)
        self._owned = not isinstance(communicator, Communicator)
        self.ep = init(**communicator) if isinstance(communicator, Mapping) else communicator
        try:
            config = self._checked(
                intermediate_size, shared_expert, activation, router=router, placement=placement, aux_loss=aux_loss
            )
            if isinstance(host_copies, bool) or host_copies not in range(config.world_size):
                expected = f"an integer in [0, {config.world_size}), as only other ranks keep copies"
                raise ConfigError("host_copies", expected, host_copies)
            if isinstance(load_steps, bool) or not isinstance(load_steps, int) or load_steps < 0:
                raise ConfigError("load_steps", "an integer >= 0", load_steps)
            self.copies = HostCopies(host_copies)
            device, dtype = device or self.ep.device, dtype or config.combine_dtype
            if config.batch_invariant:
                router = dataclasses.replace(router or RouterConfig(), batch_invariant=True)
            replicated = config.mode == "allreduce"
            self.router = Router(
                config.hidden_size, config.num_experts if placement is None else placement.num_experts,
                topk=config.topk, config=router, seed=seed, device=device, dtype=dtype,
            )  # fmt: skip
            self.placement = None
            if placement is not None:  # ranks that hold the same tokens must choose the same replicas
                rank = 0 if replicated else config.rank
                self.placement = PlacementMap(placement, rank=rank, device=self.ep.device)
            self.experts: Experts | QuantizedExperts = Experts(
                config, intermediate_size=intermediate_size, activation=activation, seed=seed, placement=placement,
                device=device, dtype=dtype,
            )  # fmt: skip
            self._wrapping = self.experts.wrapping
            if config.batch_invariant:
                gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
                refuse_experts(activation, gate_up, down, self.ep.device)
                refuse_weight(self.router.weight.shape, torch.float32, self.ep.device)
            self.quantize_experts(experts_backend)
            self.shared_expert = shared_expert
            self.host_counts = host_counts
            where: dict[str, Any] = {"rank": config.rank, "world_size": config.world_size, "device": self.ep.device}
            self.load = None if load_steps == 0 else LoadMeter(
                config.num_experts, replicated=replicated, steps=load_steps, **where
            )  # fmt: skip
            self.router_load = None if self.router.correction_bias is None else LoadMeter(
                len(self.router.weight), replicated=replicated, **where
            )  # fmt: skip
            self.aux_losses = None if aux_loss is None else AuxLosses(
                aux_loss, self.router.config, timeout=config.timeout, **where
            )  # fmt: skip
        except (ConfigError, UnsupportedError):
            self.close()
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """Return a layer with parameters of its own over the same communicator, which the copy does not close."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        made._owned = False
        return made

    @property
    def holder(self) -> Experts | QuantizedExperts:
        """The module with this rank's weights."""
        return self.experts

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """The names that DistributedDataParallel(layer) leaves alone, the assigned ones among them."""
        return [*self._ignored, *ignored_by_ddp(self)]

    @_ddp_params_and_buffers_to_ignore.setter
    def _ddp_params_and_buffers_to_ignore(self, names: Iterable[str]) -> None:
        self._ignored = tuple(names)

    def quantize_experts(self, backend: ExpertsBackend = "auto") -> None:
        """Quantise the experts' weights, to mxfp4 for that ``backend``, else to fp8, once, and multiply by it from now
        on. With "dequantize", or if "auto" chooses it, nothing changes.

        For weights that were loaded in another dtype: a layer with ``experts_backend`` has quantised experts from the
        start, and loads codes and scales. Afterwards :attr:`experts` is a :class:`QuantizedExperts`, which has no
        parameters.

        Raises:
            ConfigError: there is no such backend.
            UnsupportedError: ``backend`` is named and cannot run here.
            StateError: the experts are quantised already.
        """
        if isinstance(self.experts, QuantizedExperts):
            raise StateError(
                "quantize_experts: expected experts that are not quantised, got quantised ones, for backend "
                f"{self.experts.backend!r}; make another layer"
            )
        weight = self.experts.down_proj
        choice = choose_backend(
            backend, self.ep.config, intermediate_size=weight.shape[2], activation=self.experts.activation,
            device=self.ep.device, dtype=weight.dtype,
        )  # fmt: skip
        self.experts_backend = choice.backend
        if backend == "auto":
            because = f" ({choice.reason})" if choice.reason else ""
            _log.info("experts_backend 'auto': %s%s", choice.backend, because)
        if choice.backend != "dequantize":
            self.experts = self.experts.quantized(choice.backend)

    @property
    def host_copy_bytes(self) -> int:
        """Bytes of host memory that copies of other ranks' experts take here from the first refresh on."""
        config = self.ep.config
        kept = keepers(self.experts.placement, config.world_size, self.copies.count)
        return sum(rank == config.rank for _, _, rank in kept) * self.expert_bytes

    def use_communicator(self, ep: Communicator, placement: Placement, weights: Sequence[Tensor]) -> None:
        """Go on as a rank of ``ep``, whose experts are placed so, with the weights of this rank's experts, in the order
        of ``experts.stacked``. :func:`moelink.nn.restore_experts` calls it; nothing is checked here."""
        config = ep.config
        if self.aux_losses is not None:
            self.aux_losses.move(config.rank, config.world_size)
        placed_anew = placement != self.experts.placement
        self.ep = ep
        self.experts.take(config, placement, weights)
        if self.placement is not None:
            self.placement.rank = 0 if config.mode == "allreduce" else config.rank
            self.placement.set(placement)
        for meter in (self.load, self.router_load):
            if meter is not None:
                meter.rank, meter.world_size = config.rank, config.world_size
        if placed_anew and self.load is not None:
            self.load.reset()

    def extra_repr(self) -> str:
        copies = f", host_copies={self.copies.count} of {self.host_copy_bytes} bytes here" if self.copies.count else ""
        shared = ""
        if self.shared_expert is not None:
            shared = f", shared_expert {'beside' if self._hides_dispatch else 'after'} dispatch"
        return f"experts_backend={self.experts_backend!r}{copies}{shared}"

    @property
    def _hides_dispatch(self) -> bool:
        """Whether the shared expert runs while dispatch is under way.

        Within a node kernels of both take SMs and memory from each other, and a dispatch in two launches is longer:
        together they take 11 to 29 % more than one after the other, from 128 tokens on (docs/lab/overlap.md).
        """
        return self.ep.config.ranks_per_node is not None or self.ep._session.transport.name != "symmetric"

    def _checked(
        self, intermediate_size: int, shared_expert: torch.nn.Module | None, activation: object, **given: Any
    ) -> EPConfig:
        config = self.ep.config
        kinds = {"router": RouterConfig, "placement": Placement, "aux_loss": AuxLossConfig}
        for name, value in given.items():
            if value is not None and not isinstance(value, kinds[name]):
                raise ConfigError(name, f"a {kinds[name].__name__} or None", value)
        if not callable(activation) and not isinstance(activation, Clamp):
            raise ConfigError("activation", "a function of a tensor, such as torch.nn.functional.silu", activation)
        placement = given["placement"]
        if placement is not None and placement.num_physical != config.num_experts:
            raise ConfigError("placement", f"{config.num_experts} physical experts", placement.num_physical)
        if placement is not None and placement.num_experts < config.topk:
            raise ConfigError("placement", f"at least topk = {config.topk} experts", placement.num_experts)
        if config.layout != "expert":
            expected = "'expert' for moelink.nn.MoE (other layouts are for experts of your own)"
            raise ConfigError("layout", expected, config.layout)
        if config.num_experts < config.world_size:
            raise ConfigError("num_experts", f"at least one for each of {config.world_size} ranks", config.num_experts)
        if isinstance(intermediate_size, bool) or not isinstance(intermediate_size, int) or intermediate_size < 1:
            raise ConfigError("intermediate_size", "an integer >= 1", intermediate_size)
        if shared_expert is not None and (config.fused_shared_expert or config.mode == "allreduce"):
            reason = "fused_shared_expert" if config.fused_shared_expert else "mode='allreduce' (fuse it)"
            raise ConfigError("shared_expert", f"None with {reason}", type(shared_expert).__name__)
        if config.batch_invariant and not getattr(shared_expert, "batch_invariant", shared_expert is None):
            expected = "a module with batch_invariant = True, such as GatedMLP(batch_invariant=True), as ep has it"
            raise ConfigError("shared_expert", expected, type(shared_expert).__name__)
        return config

    def forward(
        self,
        x: Tensor,
        *,
        num_tokens: Tensor | None = None,
        padding_mask: Tensor | None = None,
        input_scale: Tensor | None = None,
        max_tokens: int | None = None,
    ) -> Tensor:
        """The layer's output, of the shape and dtype of ``x``. Collective: every rank calls it, with any number of
        tokens up to ``max_tokens_per_rank``, none included.

        Args:
            x: [..., hidden_size], of the dtypes that dispatch takes.
            num_tokens: [] integer on the device: the first rows of ``x`` that are tokens. The others may hold anything;
                they are not sent, not counted, and come out as zeros. For CUDA graphs, whose shapes are fixed.
            padding_mask: [...] bool on the device, the leading dimensions of ``x``: True for padding, which is treated
                as rows past ``num_tokens`` are. It counts in no auxiliary loss, and its gradient is zero.
            input_scale: the global scale of format nvfp4.
            max_tokens: a bound on the tokens that any rank passes in this call, which sizes all rows between dispatch
                and combine (see :meth:`moelink.Communicator.dispatch`). Default: the tokens of ``x`` if only own tokens
                arrive here (one rank, or mode "allreduce"), else ``max_tokens_per_rank``.

        Raises: as ``Communicator.dispatch``.
        """
        config = self.ep.config
        if not x.dim() or x.shape[-1] != config.hidden_size:
            raise ArgumentError("x", f"shape [..., {config.hidden_size}]", list(x.shape))
        self._wrapping.look(config.mode, config.world_size)
        # Torch takes host time to find that it has nothing to do.
        experts, router = (part_of(self, self._modules, name) for name in ("experts", "router"))
        quantized = isinstance(experts, QuantizedExperts)
        if quantized:
            refuse_gradients(x, self)
        elif self.placement is not None and experts.placement.num_physical > experts.num_experts:
            refuse_gradients(
                x,
                self,
                name="placement",
                why="replicas of an expert would get different weights",
                instead="each expert once",
            )
        tokens = x if x.dim() == 2 else x.reshape(-1, config.hidden_size)
        if not tokens.is_contiguous():
            tokens = tokens.contiguous()
        present = present_tokens(x, num_tokens, padding_mask)
        if present is not None:
            # Zeros, not only ids of -1: the shared expert sees these rows too, and 0 * NaN would reach its gradients.
            tokens = tokens.where(present[:, None], 0)
        routing = router(tokens)
        ids = routing.topk_ids if present is None else routing.topk_ids.where(present[:, None], -1)
        if self.router_load is not None and self.training:
            self.router_load.record(ids)
        if self.placement is not None:
            ids = self.placement(ids)
        if self.load is not None:
            self.load.record(ids)
        weights = routing.topk_weights
        if weights.dtype != config.weight_dtype:
            weights = weights.to(config.weight_dtype)
        if self.aux_losses is not None:
            length = max(1, x.shape[-2]) if x.dim() > 1 else 1
            weights = self.aux_losses(weights, routing, present, length, self._wrapping.mean_over())
        bound = known_max_tokens(config, tokens.shape[0]) if max_tokens is None else max_tokens
        options: dict[str, Any] = {
            "input_scale": input_scale, "host_counts": self.host_counts, "max_tokens": bound,
        }  # fmt: skip
        shared = pending = None
        if self.shared_expert is not None and self._hides_dispatch:
            pending = self.ep.dispatch_async(tokens, ids, weights, **options)
        else:
            recv = self.ep.dispatch(tokens, ids, weights, **options)
        if self.shared_expert is not None:
            shared = self.shared_expert(tokens)
            if present is not None:
                shared = shared.where(present[:, None], 0)  # not zero already if the module has a bias
        if pending is not None:
            recv = pending.wait()
        if quantized:
            likely = likely_rows(config, bound)
            if self.host_counts:
                likely = min(likely, len(recv.tokens))
            y = experts(recv.tokens, recv.scales, recv.row_offsets, likely_rows=likely)
        else:
            rows = dequantized(recv, config, input_scale=input_scale, dtype=experts.down_proj.dtype)
            y = experts(rows, recv.row_offsets)
        out = self.ep.combine(cast_rows(y, recv.row_offsets, config.combine_dtype), recv, shared=shared)
        if out.dtype != x.dtype:
            out = out.to(x.dtype)
        return out if x.dim() == 2 else out.view(x.shape)  # fully_shard of torch warns of views

    def warmup(self, *, max_tokens: Sequence[int] = (), training: bool = False) -> Prepared:
        """Compile and load every kernel that calls of this layer launch, several at a time, before the first one.

        Nothing is launched but products of empty groups, and nothing travels. Layers of equal sizes share their
        kernels. On a CPU there is nothing to do.

        Args:
            max_tokens: those of later calls (:meth:`forward`), by which kernels of dispatch and products are chosen.
                Calls that give none are always included.
            training: also for calls with gradients and their backwards. Their communicators are made now, so it is
                collective then: every rank calls it.

        Returns:
            What :meth:`moelink.Communicator.warmup` returns, which does the same for calls without a layer.

        Raises:
            ArgumentError: ``max_tokens`` has a number that no call may give.

        Example:
            >>> from moelink.nn import MoE
            >>> layer = MoE({"num_experts": 4, "topk": 2, "hidden_size": 16, "max_tokens_per_rank": 8},
            ...             intermediate_size=32)
            >>> layer.warmup(max_tokens=[1, 8]).kernels    # on a GPU: their names
            ()
            >>> layer.close()
        """
        config = self.ep.config
        most = config.max_tokens_per_rank
        for bound in max_tokens:
            if isinstance(bound, bool) or not isinstance(bound, int) or not 0 <= bound <= most:
                raise ArgumentError("max_tokens", f"integers in [0, {most}]", bound)
        shared = self.shared_expert is not None
        calls = Rehearsal(
            dispatch=("split" if shared and self._hides_dispatch else "fused",), combine=("fused",), weighted=(True,),
            shared=(shared,), bounds=() if known_max_tokens(config, most) is not None else (None, *max_tokens),
        )  # fmt: skip
        bounds = tuple(sorted({*max_tokens, most} - {0}))
        rows = partial(rehearse, self, config, bounds, training=training)
        return self.ep.warmup(calls=calls, gradients=training, beside=(rows,))

    def reset_parameters(self) -> None:
        """First weights again, of the router and the experts, by their seed.

        Raises:
            StateError: the experts are quantised.
        """
        if isinstance(self.experts, QuantizedExperts):
            raise StateError(
                "reset_parameters: expected experts with parameters, got quantised ones; make another layer"
            )
        self.router.reset_parameters()
        self.experts.reset_parameters()

    def close(self) -> None:
        """Close the communicator if the layer made it."""
        if self._owned:
            self.ep.close()


def present_tokens(x: Tensor, num_tokens: Tensor | None, padding_mask: Tensor | None) -> Tensor | None:
    """Return which rows of ``x`` are tokens, [T] bool; None for all."""
    present = None
    if padding_mask is not None:
        shape = list(x.shape[:-1])
        if padding_mask.dtype != torch.bool or list(padding_mask.shape) != shape:
            expected = f"torch.bool of shape {shape}, True for padding (attention_mask == 0)"
            raise ArgumentError("padding_mask", expected, f"{padding_mask.dtype} of shape {list(padding_mask.shape)}")
        present = ~padding_mask.reshape(-1)
    if num_tokens is not None:
        if isinstance(num_tokens, Tensor) and (num_tokens.numel() != 1 or num_tokens.dtype not in _INTEGERS):
            got = f"{num_tokens.dtype} of shape {list(num_tokens.shape)}"
            raise ArgumentError("num_tokens", "a tensor of one integer", got)
        first = torch.arange(x.shape[:-1].numel(), device=x.device) < num_tokens
        present = first if present is None else first & present
    return present


def load_report(model: torch.nn.Module) -> dict[str, Any]:
    """The statistics of all MoE layers of ``model`` that count, on this rank, for JSON. Synchronises with the host.

    ``{"schema_version": 1, "kind": "expert_load", "layers": [{"name": ..., **LoadStats}, ...]}``.
    """
    layers = [
        {"name": name or "moe", **dataclasses.asdict(module.stats())}
        for name, module in model.named_modules()
        if isinstance(module, BalancedLayer) and module.load is not None
    ]
    return {"schema_version": SCHEMA_VERSION, "kind": KIND, "layers": layers}


def save_load(model: torch.nn.Module, path: Path | str) -> None:
    """Write :func:`load_report` to ``path``, which ``moelink plot`` draws. Each rank has a file of its own to write."""
    Path(path).write_text(json.dumps(load_report(model), indent=1) + "\n")
