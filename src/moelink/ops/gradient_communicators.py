"""Send gradients: over the communicator itself where its format allows it, else over communicators made for gradients.

Gradients travel in ``combine_dtype``:

* from tokens to rows (the backward of combine) by a dispatch in the plain format that holds ``combine_dtype`` exactly.
  A communicator with another format, a quantised one for example, gets a *row communicator* with that plain format;
* from rows to tokens (the backward of dispatch) by the communicator's own combine, without weights. A communicator with
  a combine format does this over the row communicator, whose rows return in ``combine_dtype``;
* gradients of router weights, one number per (token, slot), from rows to tokens by a *weight communicator*: it combines
  rows of topk numbers in fp32 (or fp64) that are zero except in the row's own slot, so the sums are exact.

A gradient communicator has the communicator's configuration except for formats, dtype and hidden size, so the same
routing gives the same rows. It is made in the first backward that needs it. That is collective: all ranks must run the
same backwards in the same order.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import torch

from moelink.config import EPConfig
from moelink.control.group import World, meet_again
from moelink.errors import CapacityError, RoutingError
from moelink.transports.base import FastPath, Rehearsal, Traffic
from moelink.transports.build import open_session
from moelink.transports.session import Session

GRADIENT_FORMATS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp32",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
"""By ``combine_dtype``: the plain format that holds it exactly."""


class GradientCommunicators:
    """The sessions over which gradients of one communicator travel.

    ``own`` is the communicator's own session, ``world`` its ranks.
    """

    def __init__(self, own: Session, world: World) -> None:
        self._own, self._world = own, world
        self._rows: Session | None = None
        self._weights: Session | None = None
        self._paths: dict[Session, FastPath | None] = {}

    def path(self, session: Session) -> Any:
        """Return the fast path of one of these sessions, if the transport has one."""
        if session not in self._paths:
            self._paths[session] = session.fast_path()
        return self._paths[session]

    @property
    def _config(self) -> EPConfig:
        return self._own.configs[0]

    @property
    def row_format(self) -> str:
        """Format in which gradients of combine's result travel."""
        return GRADIENT_FORMATS[self._config.combine_dtype]

    def rows(self) -> Session:
        """Session that dispatches gradients of combine's result. Collective the first time, unless it is ``own``."""
        return self._own if self._config.dispatch_format == self.row_format else self._plain()

    def sums(self) -> Session:
        """Session that combines gradients of dispatched rows. Collective the first time, unless it is ``own``."""
        return self._own if self._config.combine_format is None else self._plain()

    def _plain(self) -> Session:
        """Session whose rows travel both ways in the plain format that holds ``combine_dtype``."""
        if self._rows is None:
            self._rows = self._open(dispatch_format=self.row_format)
        return self._rows

    def weights(self) -> Session:
        """Session that combines gradients of router weights. Collective the first time."""
        if self._weights is None:
            config = self._config
            name = "fp64" if config.weight_dtype == torch.float64 else "fp32"
            self._weights = self._open(dispatch_format=name, combine_dtype=config.weight_dtype, hidden_size=config.topk)
        return self._weights

    def _open(self, **changes: object) -> Session:
        self._own.require_open("backward")  # nothing would close a session that is made after that
        # A quantised format may align groups, and rows must fall where the communicator's do. These sessions' kernels
        # wait for the communicator's, so they need no share of the device's SMs of their own.
        config = dataclasses.replace(
            self._config,
            expert_alignment=self._config.row_alignment,
            num_sms=None,
            lanes=1,
            combine_format=None,
            **changes,  # type: ignore[arg-type]
        )
        world = meet_again(self._world, config.timeout)
        return open_session(config, self._own.devices[0], world, self._own.fate)

    @property
    def _opened(self) -> list[Session]:
        return [session for session in (self._rows, self._weights) if session is not None]

    def warmup(self, *, load: bool) -> None:
        """Compile and allocate for the first backward. Collective the first time.

        A dispatch takes an earlier call's routing, which a session in a plain format prepares beside any other; a
        combine has no weights.
        """
        calls = Rehearsal(dispatch=("fused",), combine=("fused",), weighted=(False,), bounds=(None,))
        for session in dict.fromkeys((self.rows(), self.sums(), self.weights())):
            session.warmup((), calls, load=load)

    def check(self) -> None:
        """Raise the first error that a peer caused in a backward. The forward calls' own check reports lost rows."""
        for session in self._opened:
            with suppress(CapacityError, RoutingError):
                session.check()

    def traffic(self) -> Traffic:
        """Bytes that these sessions sent, without those of the communicator's own."""
        sent = [session.traffic() for session in self._opened]
        return Traffic(sum(traffic.dispatch for traffic in sent), sum(traffic.combine for traffic in sent))

    def close(self) -> None:
        """Release these sessions, but not the communicator's own."""
        for session in self._opened:
            session.close()
