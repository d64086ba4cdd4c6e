"""What moves gradients: the communicator itself wherever it can, and two narrow relatives of it where it cannot.

Gradients travel in ``combine_dtype``, both ways:

* to the experts' ranks by a dispatch in the plain format that carries it exactly. A communicator whose own format is
  another one (a quantised one, above all) gets a relative with that format: the lane of rows;
* home by the communicator's own combine, without weights;
* router weights' gradients, one number per (token, slot), home by a combine of rows of topk numbers in fp32 (fp64),
  zero but for the row's own slot, so that sums are exact: the lane of weights.

A lane has the communicator's configuration but for format, dtype and hidden size, so the same routing gives the same
rows. It is made when it is first needed, in a backward, which all ranks must reach alike: making it is collective.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import torch

from moelink.config import EPConfig
from moelink.control.group import World, meet_again
from moelink.errors import CapacityError, RoutingError
from moelink.transports.base import Traffic
from moelink.transports.build import build_in_group
from moelink.transports.session import Session

GRADIENT_FORMATS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp32",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
"""By ``combine_dtype``: the format that carries it exactly."""


class Lanes:
    """The sessions that gradients of one communicator travel over. ``own`` is its own, ``world`` its ranks."""

    def __init__(self, own: Session, world: World) -> None:
        self._own, self._world = own, world
        self._rows: Session | None = None
        self._weights: Session | None = None

    @property
    def _config(self) -> EPConfig:
        return self._own.configs[0]

    @property
    def row_format(self) -> str:
        """The format in which gradients of combine's result travel."""
        return GRADIENT_FORMATS[self._config.combine_dtype]

    def rows(self) -> Session:
        """Dispatches gradients of combine's result. Collective the first time, if it is not the communicator's own."""
        if self._config.dispatch_format == self.row_format:
            return self._own
        if self._rows is None:
            self._rows = self._open(dispatch_format=self.row_format)
        return self._rows

    def weights(self) -> Session:
        """Combines gradients of router weights. Collective the first time."""
        if self._weights is None:
            config = self._config
            name = "fp64" if config.weight_dtype == torch.float64 else "fp32"
            self._weights = self._open(dispatch_format=name, combine_dtype=config.weight_dtype, hidden_size=config.topk)
        return self._weights

    def _open(self, **changes: object) -> Session:
        # A quantised format may align groups; the lane's rows must fall where the communicator's do. Lanes wait for the
        # communicator's own kernels, so they need no share of the device's multiprocessors besides.
        config = dataclasses.replace(
            self._config,
            expert_alignment=self._config.row_alignment,
            num_sms=None,
            **changes,  # type: ignore[arg-type]
        )
        device = self._own.devices[0]
        built = build_in_group(config, device, meet_again(self._world, config.timeout))
        return Session([config], [device], built.transport, built.identity, built.watch)

    @property
    def _opened(self) -> list[Session]:
        return [session for session in (self._rows, self._weights) if session is not None]

    def check(self) -> None:
        """Raise a peer's error met by a gradient. Rows dropped and ids out of range are the forward call's to name."""
        for session in self._opened:
            with suppress(CapacityError, RoutingError):
                session.check()

    def traffic(self) -> Traffic:
        """Bytes that the lanes sent, besides those of the communicator's own session."""
        sent = [session.traffic() for session in self._opened]
        return Traffic(sum(traffic.dispatch for traffic in sent), sum(traffic.combine for traffic in sent))

    def close(self) -> None:
        """Release the lanes."""
        for session in self._opened:
            session.close()
