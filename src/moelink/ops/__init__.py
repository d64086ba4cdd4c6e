"""Dispatch and combine as PyTorch operators, with fakes and gradients: ``torch.ops.moelink``.

``ep.dispatch`` and ``ep.combine`` use them by themselves when an argument requires grad or when they are being traced
(``torch.compile``, ``torch.export``); otherwise they call the transport directly. ``docs/pytorch.md`` says what holds.

==============  ========================================================================================================
``endpoint``    what operators know of a communicator; outputs as flat tensors and back
``record``      a transport's routing notes as tensors
``lanes``       what moves gradients           ``library``   schemas, implementations, fakes
``autograd``    the gradients                  ``calls``     from a request to an operator and back
``rows``        dequantised rows, through which gradients flow
==============  ========================================================================================================

Importing registers the operators; no device is touched.
"""

import moelink.ops.autograd  # noqa: F401 - registers the gradients
from moelink.ops.calls import combine, dispatch, needs_operator, start_combine, start_dispatch
from moelink.ops.context import Endpoint
from moelink.ops.rows import dequantize

__all__ = [
    "Endpoint",
    "combine",
    "dequantize",
    "dispatch",
    "needs_operator",
    "start_combine",
    "start_dispatch",
]
