"""Register dispatch and combine as PyTorch operators, with fakes and gradients: ``torch.ops.moelink``.

``ep.dispatch`` and ``ep.combine`` call the operators while they are traced (``torch.compile``, ``torch.export``), and
autograd functions with the operators' gradients when an argument requires grad; in all other cases the transport
directly. ``docs/pytorch.md`` documents the guarantees of the operators. Read the modules in this order:

===========================  ===========================================================================================
``calls``                    turns a request into an operator call, and the operator's tensors into its result
``library``                  schemas, implementations and fakes of the operators
``autograd``                 their gradients
``nodes``                    the same gradients of eager calls without options, which need no operator
``context``                  one communicator as its operators see it; outputs as flat tensors and back
``record``                   a transport's plan of a call as tensors of fixed sizes, and back
``gradient_communicators``   the communicators that gradients travel over
``lanes``                    the lanes of a communicator: opened, checked and closed together
===========================  ===========================================================================================

``dequantize`` is of :mod:`moelink.rows`. Importing this package registers the operators and touches no device.
"""

import moelink.ops.autograd  # noqa: F401 - registers the gradients
from moelink.ops.calls import call, needs_operator, start
from moelink.ops.context import OperatorContext
from moelink.rows.dequantize import dequantize

__all__ = ["OperatorContext", "call", "dequantize", "needs_operator", "start"]
