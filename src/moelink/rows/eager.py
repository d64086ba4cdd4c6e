"""Make eager calls of operators without torch's dispatcher, which takes more host time than what an operator does.

An operator of ``torch.library`` serves tracers, modes of torch's dispatcher and subclasses of Tensor: these must see it
as one call, and know its fake and its gradient. Where none of them is at work, :func:`run` calls the operator's
implementation, or an autograd function of the same implementation and the same backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function as autograd_function
from torch.nn import Parameter

_PLAIN = frozenset({Tensor, Parameter, bool, int, float, str, list, torch.dtype, type(None)})
"""Types of arguments that are no tensors of a subclass. To ask so of another object takes torch longer."""


def takes_kernels(tensor: Tensor) -> bool:
    """Return whether kernels compute rows on the device of ``tensor``."""
    return tensor.is_cuda


def repeated(given: tuple[Tensor, ...], function: Callable[..., Any], *rest: Any) -> tuple[Tensor, ...]:
    """Return the results of ``function(*given, *rest)``, a function that does nothing but launch kernels on rows,
    without it where a call of the same kind was made before (:mod:`moelink.kernels.launch.replay`). ``given`` is
    contiguous. The function returns its results, and all other tensors that it makes."""
    launcher = _launcher()
    return launcher.replays.run(launcher, given, function, *rest)  # type: ignore[no-any-return]


@cache
def _launcher() -> Any:
    """Return the launcher of this process. Triton is imported here, which not every device has."""
    from moelink.kernels.launch import row_launch

    return row_launch.row_launcher()


def is_unseen(arguments: Sequence[Any]) -> bool:
    """Return whether no tracer, no mode of torch's dispatcher and no transform of functorch is at work, and no argument
    is a tensor of a subclass."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if not _PLAIN.issuperset(map(type, arguments)):
        for argument in arguments:
            if type(argument) not in _PLAIN and isinstance(argument, Tensor):
                return False
    return not torch._C._are_functorch_transforms_active()


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``backward`` as torch's ``once_differentiable`` does. A backward whose gradient nobody asks for runs
    without gradients already, and is not put into a context once more."""
    guarded = autograd_function.once_differentiable(backward)

    def run_once(ctx: Any, *grads: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run_once


def function_of(
    body: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """Return an autograd function of an operator's implementation and of the functions that ``register_autograd``
    takes. It is differentiable once."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        # A function with a setup_context of its own has its arguments bound to a signature at each call.
        output = body(*inputs)
        setup_context(ctx, inputs, output)
        return output

    parts = {"forward": forward, "backward": once_differentiable(backward)}
    return type(body.__name__, (torch.autograd.Function,), {name: staticmethod(part) for name, part in parts.items()})


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply an autograd function where :func:`is_unseen`. Torch's own method asks for transforms of functorch again."""
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def run(
    operator: Any, body: Callable[..., Any], function: type[torch.autograd.Function] | None, *arguments: Any,
    **numbers: int,
) -> Any:  # fmt: skip
    """Call ``operator`` with ``arguments``: itself where something must see it, else by the ``function`` where a
    tensor requires grad, else by its implementation ``body``. Without a ``function`` the operator has no gradient; only
    then it takes ``numbers``."""
    if not is_unseen(arguments):
        return operator(*arguments, **numbers)
    if torch.is_grad_enabled():
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.requires_grad:
                return operator(*arguments, **numbers) if function is None else apply(function, *arguments)
    return body(*arguments, **numbers)
