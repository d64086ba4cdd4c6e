"""moelink in transformers' own registry of ways to bring tokens to experts (``EPImplementationInterface``).

transformers then shards the model itself, by its plans, and loads each rank's part; moelink moves the tokens. The mode
follows from the sizes in ``DistributedConfig``: "allreduce" if the ranks of the expert group hold the same batch
(``ep_size == tp_size``), "alltoall" if each has a batch of its own (``tp_size == 1``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import moelink
from moelink.errors import ClosedError, UnsupportedError
from moelink.integrations.settings import device_of
from moelink.integrations.transformers.experts import compute, refuse_form, run_experts
from moelink.integrations.transformers.forms import Settings, Shape, form_of, topk_of
from moelink.integrations.versions import require
from moelink.lifetime import peers_of
from moelink.names import Mode, TransportName
from moelink.output import DispatchOutput


class Registration:
    """The communicators of the models that use a registered name; of :func:`register`. Also a context manager."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self._settings = name, settings
        self._communicators: dict[tuple[Any, ...], moelink.Communicator] = {}
        self._closed = False

    def communicator(
        self, shape: Shape, *, mode: Mode, group: dist.ProcessGroup, device: torch.device
    ) -> moelink.Communicator:
        """Return the communicator of all equal layers; opened the first time. Collective then.

        Raises:
            ClosedError: after :meth:`close`.
        """
        if self._closed:
            raise ClosedError(f"ep_implementation={self.name!r}")
        key = (shape, mode, group, device)  # holds the group, so that no other one gets its place
        if key not in self._communicators:
            self._communicators[key] = self._settings.open(shape, mode=mode, group=group, device=device)
        return self._communicators[key]

    @property
    def communicators(self) -> tuple[moelink.Communicator, ...]:
        """The communicators opened so far, in order."""
        return tuple(self._communicators.values())

    def close(self) -> None:
        """Close all communicators. The name stays in transformers' registry; its use raises ClosedError."""
        self._closed = True
        for ep in self._communicators.values():
            ep.close()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def register(
    *,
    max_tokens_per_rank: int,
    name: str = "moelink",
    dispatch_format: str | None = None,
    combine_dtype: torch.dtype | None = None,
    capacity: int | None = None,
    batch_invariant: bool = False,
    transport: TransportName = "auto",
    num_sms: int | None = None,
    timeout: float = 60.0,
    topk: int | None = None,
) -> Registration:
    """Make ``DistributedConfig(ep_implementation=name)`` use moelink, with these settings (see :func:`parallelize`).

    Call it on every rank before ``from_pretrained``. Registering a name again replaces its settings for models loaded
    afterwards. The number of experts must be a multiple of ``ep_size``, as transformers demands. ``topk`` is the number
    of experts of a token, if the model's configuration does not have it.

    Raises:
        UnsupportedError: this transformers has no such registry (:func:`parallelize` needs none), or is not one of the
            releases that are supported.
    """
    require("transformers")
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError as error:
        import transformers

        raise UnsupportedError(
            "transformers: no registry of expert-parallel implementations: expected 5.23 or newer, got "
            f"{transformers.__version__}; use moelink.integrations.transformers.parallelize, which needs none"
        ) from error

    settings = Settings(
        max_tokens_per_rank=max_tokens_per_rank, dispatch_format=dispatch_format, combine_dtype=combine_dtype,
        capacity=capacity, batch_invariant=batch_invariant, transport=transport, num_sms=num_sms, timeout=timeout,
    )  # fmt: skip
    registration = Registration(name, settings)

    class MoelinkEP(EPImplementation):  # type: ignore[misc]
        """One layer's experts, as transformers asks for them."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            if tp_mesh.size() > 1 and not self.shares_batch:
                raise UnsupportedError(
                    f"ep_implementation={name!r}: expected ranks of the expert group with the same batch (ep_size == "
                    f"tp_size) or one each (tp_size == 1), got tp_size={tp_mesh.size()} and ep_size={ep_mesh.size()}; "
                    "change one of them"
                )
            self.experts, self.group, self.form = experts, ep_mesh.get_group(), form_of(experts)
            count = topk_of(None, experts, topk)
            num_experts = self.num_local_experts * ep_mesh.size()
            shape = Shape(num_experts, count, self.form.hidden_size, self.form.dtype)
            device = device_of(ep_mesh.device_type)
            mode: Mode = "allreduce" if self.shares_batch else "alltoall"
            self.ep = registration.communicator(shape, mode=mode, group=self.group, device=device)
            refuse_form(self.form, experts._parameters, self.ep)
            self.peers = peers_of(self.ep, self.group, "a sum of a layer") if ep_mesh.size() > 1 else None

        def __call__(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
            return run_experts(
                self.ep, hidden_states, top_k_index, top_k_weights, experts=self._experts, peers=self.peers
            )

        def _experts(self, recv: DispatchOutput) -> torch.Tensor:
            # During the call transformers shows this rank's part of a parameter in its place.
            tensors = {name: getattr(self.experts, name) for name in self.form.stacked}
            return compute(self.form, tensors, recv, self.ep, self.peers)

    EPImplementationInterface.register(name, MoelinkEP)
    return registration
