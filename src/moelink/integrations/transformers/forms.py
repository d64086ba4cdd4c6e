"""The form of an experts module of transformers, as the module declares it, and the communicator for its sizes.

No model is known by name. Modules that use transformers' experts interface declare a gate, biases, transposed weights
and a norm of the output. The function between the two matrix products is code, a method; :func:`form_of` compares its
values with those of moelink's activations, and calls the method if none agrees.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import activations

import moelink
from moelink.errors import ArgumentError, ConfigError, UnsupportedError
from moelink.integrations import settings as common
from moelink.names import Mode
from moelink.nn.experts import Activation
from moelink.ops.gradient_communicators import GRADIENT_FORMATS
from moelink.rows.activation import Clamp
from moelink.rows.gated import known_activation, twin

_DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "top_k")
"""Names of the number of experts of a token in configurations."""

_SAME_AS_TORCH: dict[type, Activation] = {
    activations.SiLUActivation: functional.silu,
    nn.SiLU: functional.silu,
    activations.GELUActivation: functional.gelu,
    activations.GELUTanh: functools.partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's layers with experts.

    Attributes:
        num_experts: of a layer, over all ranks.
        topk: experts of a token.
        hidden_size: elements of a row.
        dtype: of the experts' weights.
    """

    num_experts: int
    topk: int
    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """Arguments of :func:`moelink.init` that users of a model choose; see there. The rest follows from the model.

    Attributes:
        dispatch_format: None for the one that carries the model's dtype exactly.
        combine_dtype: None for the model's dtype.
    """

    max_tokens_per_rank: int
    dispatch_format: str | None = None
    combine_dtype: torch.dtype | None = None
    capacity: int | None = None

    def open(
        self, shape: Shape, *, mode: Mode, group: dist.ProcessGroup | None, device: torch.device | None
    ) -> moelink.Communicator:
        """Open the communicator of a model's layers, which run one after the other and so share one. Collective.

        Raises:
            ConfigError: a rank would own no expert, or as :func:`moelink.init`.
        """
        arguments = {
            **self.arguments(),
            "dispatch_format": self.dispatch_format or GRADIENT_FORMATS.get(shape.dtype, "bf16"),
            "combine_dtype": self.combine_dtype or shape.dtype,
        }
        ep = moelink.init(
            num_experts=shape.num_experts, topk=shape.topk, hidden_size=shape.hidden_size, mode=mode, group=group,
            device=device, **arguments,
        )  # fmt: skip
        if shape.num_experts < ep.config.world_size:
            ep.close()
            expected = f"at least one expert for each of {ep.config.world_size} ranks"
            raise ConfigError("num_experts", expected, shape.num_experts)
        return ep


@dataclass(frozen=True)
class Form:
    """How a layer's experts compute: ``norm(down (between (up x + up_bias)) + down_bias)``.

    Attributes:
        up: name of the first parameter; the second one is ``down_proj``. Names of biases end in ``_bias``.
        biased: whether there are biases. transposed: whether weights are [E, in, out] in place of [E, out, in].
        gated: whether the first product has a gate.
        interleaved: whether its columns are gate and up in turn, in place of all of gate and then all of up.
        activation: of the gate (or of the product, without a gate): moelink's own, if one is equal; None for
            ``method``.
        method: the module's own, from rows of the first product to rows of the second.
        norm: of an expert's output, or None. All experts share it.
        num_experts, hidden_size, intermediate_size: numbers of experts, and of elements before and between.
        dtype: of the weights.
    """

    up: str
    biased: bool
    transposed: bool
    gated: bool
    interleaved: bool
    activation: Activation | Clamp | None
    method: Callable[[Tensor], Tensor]
    norm: nn.Module | None
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype

    @property
    def stacked(self) -> tuple[str, ...]:
        """Names of the parameters whose first dimension is the experts."""
        weights = (self.up, "down_proj")
        return (*weights, *(f"{name}_bias" for name in weights)) if self.biased else weights

    @property
    def is_plain(self) -> bool:
        """Whether it is ``down (activation(gate) * up)`` of weights [E, out, in], with an activation of moelink's."""
        plain = self.gated and not (self.biased or self.transposed or self.interleaved or self.norm)
        return plain and self.activation is not None


def is_experts(module: nn.Module) -> bool:
    """Return whether ``module`` holds the routed experts of a layer and uses transformers' experts interface.

    An adapter around experts, which forwards their attributes, counts as experts, and is refused later.
    """
    return all(hasattr(module, name) for name in _DECLARED) and isinstance(getattr(module, "down_proj", None), Tensor)


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the experts of every layer that has them, in the order of layers."""
    return ((name, module) for name, module in model.named_modules() if is_experts(module))


def form_of(module: Any) -> Form:
    """Return the form that ``module`` declares, for which :func:`is_experts` holds.

    Raises:
        UnsupportedError: its parameters do not match the declaration.
    """
    refuse_attached(module)
    gated, transposed = bool(module.has_gate), bool(module.is_transposed)
    up = "gate_up_proj" if gated else "up_proj"
    shape = _shape_of(module, up, transposed)
    interleaved = gated and not module.is_concatenated
    method = _method_of(module, gated)
    form = Form(
        up=up,
        biased=bool(module.has_bias),
        transposed=transposed,
        gated=gated,
        interleaved=interleaved,
        activation=_activation_of(module, method, interleaved=interleaved) if gated else _plain(module.act_fn),
        method=method,
        norm=module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None,
        num_experts=shape[0],
        hidden_size=shape[1],
        intermediate_size=shape[2] // 2 if gated else shape[2],
        dtype=module.down_proj.dtype,
    )
    found = {name for name, parameter in module._parameters.items() if parameter is not None}
    if found != set(form.stacked):
        raise UnsupportedError(
            f"{type(module).__name__}: expected parameters {', '.join(form.stacked)}, as it declares, got "
            f"{', '.join(sorted(found))}; use transformers' own expert parallelism for this model"
        )
    return form


def refuse_attached(module: nn.Module) -> None:
    """Refuse experts with an adapter around them (as in PEFT) or parametrisations, which have the sizes of all experts.

    Raises:
        UnsupportedError: ``module`` has one of these.
    """
    attached = "an adapter" if hasattr(module, "base_layer") else "parametrisations"
    if attached == "an adapter" or hasattr(module, "parametrizations"):
        raise UnsupportedError(
            f"{type(module).__name__}: expected experts as the model's class has them, got {attached} of all experts; "
            "call parallelize first, and then attach adapters and parametrisations to the model"
        )


def topk_of(model: Any, module: Any, given: int | None = None) -> int:
    """Return how many experts a token takes, as the configuration of ``module`` or that of ``model`` has it, or else
    ``given``.

    Raises:
        ArgumentError: neither has it, and it is not given.
        ConfigError: another number is given.
    """
    known = _configured_topk(model, module)
    count = known if given is None else given
    if count is None:
        expected = f"the number of experts of a token, as the model's configuration has none of {', '.join(_TOPK)}"
        raise ArgumentError("topk", expected, None)
    if known not in (None, count):
        raise ConfigError("topk", f"None or {known}, as the model's configuration has it", count)
    return count


def _configured_topk(model: Any, module: Any) -> int | None:
    whole = getattr(model, "config", None)
    for config in (getattr(module, "config", None), whole and whole.get_text_config(), whole):
        for name in _TOPK:
            value = getattr(config, name, None)
            if isinstance(value, (list, tuple)) and len(set(value)) == 1:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _shape_of(module: Any, up: str, transposed: bool) -> tuple[int, int, int]:
    """Return (experts, hidden_size, columns of the first product), as the weights have them."""
    weights = [getattr(module, name, None) for name in (up, "down_proj")]
    shapes = [tuple(weight.shape) if isinstance(weight, Tensor) else () for weight in weights]
    if any(len(shape) != 3 for shape in shapes):
        raise UnsupportedError(
            f"{type(module).__name__}: expected {up} and down_proj of three dimensions, got shapes {shapes}; use "
            "transformers' own expert parallelism for this model"
        )
    experts, first, second = shapes[0]
    return (experts, first, second) if transposed else (experts, second, first)


def _method_of(module: Any, gated: bool) -> Callable[[Tensor], Tensor]:
    """Return the function between the products, bound to a copy of ``module`` without parameters, so that the weights
    of all experts can be freed."""
    if not gated:
        activation: Callable[[Tensor], Tensor] = module.act_fn
        return activation
    shell = copy.copy(module)
    object.__setattr__(shell, "_parameters", {})
    gate: Callable[[Tensor], Tensor] = shell._apply_gate
    return gate


def _plain(module: Any) -> Activation:
    """Return the function of torch that transformers' activation computes, or ``module`` if there is none."""
    activation: Activation = _SAME_AS_TORCH.get(type(module), module)
    return activation


def _activation_of(module: Any, method: Callable[[Tensor], Tensor], *, interleaved: bool) -> Activation | Clamp | None:
    """Return moelink's activation that has the values of ``method`` on a grid of gates and ups, or None."""
    grid = torch.cat([torch.tensor([0.0]), torch.logspace(-3, 6, 28)]).double()
    gate, up = torch.cartesian_prod(torch.cat([-grid, grid]), torch.cat([-grid, grid])).t()
    rows = torch.stack([gate, up], dim=1)  # [R, 2]: one gate, one up; with one column each, in turn is one after other
    with torch.no_grad():
        want = _two_columns(method, rows, interleaved)
        for activation in _candidates(module):
            known = known_activation(activation)
            got = twin(rows, known) if known else activation(gate)[:, None] * up[:, None]  # type: ignore[operator]
            if torch.allclose(got, want, rtol=2e-6, atol=1e-30):
                return activation
    return None


def _two_columns(method: Callable[[Tensor], Tensor], rows: Tensor, interleaved: bool) -> Tensor:
    """Return ``method`` of ``rows``; refuse a method whose order of columns is not the declared one."""
    gate, up = rows.t()
    doubled = torch.stack([gate, up, gate, up] if interleaved else [gate, gate, up, up], dim=1)
    want = method(rows)
    if not torch.equal(method(doubled), torch.cat([want, want], dim=1)):
        raise UnsupportedError(
            f"{getattr(method, '__qualname__', method)}: expected gate and up "
            f"{'in turn' if interleaved else 'one after the other'}, as is declared, got another order; use "
            "transformers' own expert parallelism for this model"
        )
    return want


def _candidates(module: Any) -> Iterator[Activation | Clamp]:
    """Yield the activations that ``module`` could have: its own, and clamps by any two of its numbers."""
    activation = _plain(getattr(module, "act_fn", None))
    if known_activation(activation) is not None:
        yield activation
    numbers = {float(v) for v in vars(module).values() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    for alpha, limit in itertools.product(sorted(n for n in numbers if n > 0), repeat=2):
        yield Clamp(alpha, limit)
