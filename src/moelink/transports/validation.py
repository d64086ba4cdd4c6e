"""Refuse bad arguments before any data moves: one check per argument, in argument order.

Every refusal is an ArgumentError that names the argument, the expected value and the actual one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moelink.arguments import check_tensor
from moelink.config import EPConfig
from moelink.errors import ArgumentError, ForeignHandleError, UnsupportedError
from moelink.hooks import Hook, evaluate_input_scale, evaluate_weights
from moelink.memory.layout import ALIGNMENT
from moelink.output import DispatchOutput, shape_of_outputs, version_of
from moelink.transports.base import CallRequest, CombineRequest, DispatchRequest

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTS = (torch.int32, torch.int64)


def check_recv(recv: object, *, identity: str, config: EPConfig, name: str = "recv") -> DispatchOutput:
    """Return ``recv``, an argument ``name``, as a DispatchOutput that this very rank's communicator returned."""
    if not isinstance(recv, DispatchOutput):
        raise ArgumentError(name, "a DispatchOutput", type(recv).__name__)
    if recv.handle.owner != identity:
        raise ForeignHandleError(
            f"{name}: expected an output of this communicator, got one of communicator {recv.handle.owner}; pass what "
            "its own dispatch returned"
        )
    if recv.handle.rank != config.rank:
        raise ForeignHandleError(
            f"{name}: expected an output of rank {config.rank}, got one of rank {recv.handle.rank}; pass what dispatch "
            "returned on this rank"
        )
    handle = recv.handle
    if handle.ids_version is not None and version_of(handle.topk_ids) not in (None, handle.ids_version):
        raise ArgumentError(
            name, "an output whose topk_ids are as they were dispatched", "one whose topk_ids were overwritten since"
        )
    return recv


def check_rows_are_there(recv: object) -> None:
    """Refuse to combine rows in the workspace (``zero_copy``) that a later dispatch may have overwritten."""
    rows = recv.rows_in_place if isinstance(recv, DispatchOutput) else None
    if rows is not None:
        rows.require_latest()


def kind_of(request: DispatchRequest) -> Hashable | None:
    """Return the key by which ``request`` passes :func:`check_dispatch`, without values of ids (:func:`check_ids`).

    None where more than that decides.
    """
    if request.routing is not None or request.out is not None or request.input_scale is not None:
        return None
    for bound in (request.max_tokens, request.num_sms):
        if bound is not None and type(bound) is not int:
            return None
    given = (request.x, request.topk_ids, request.topk_weights, request.scales)
    return tuple(
        [
            type(request.host_counts),
            request.max_tokens,
            request.num_sms,
            *[(t.shape, t.dtype, t.device, t.is_contiguous()) if isinstance(t, Tensor) else type(t) for t in given],
        ]
    )


def check_request(config: EPConfig, request: CallRequest, *, identity: str, device: torch.device) -> None:
    """Check one rank's arguments of a call."""
    if isinstance(request, DispatchRequest):
        check_dispatch(config, request, identity=identity, device=device)
    else:
        check_combine(config, request, identity=identity, device=device)


def check_dispatch(
    config: EPConfig, request: DispatchRequest, *, identity: str, device: torch.device
) -> DispatchRequest:
    """Check one rank's dispatch arguments. With ``routing`` the earlier call's ids are filled in."""
    fmt, routing = config.format, request.routing
    if not isinstance(request.host_counts, bool):
        raise ArgumentError("host_counts", "True or False", f"a {type(request.host_counts).__name__}")
    if routing is not None:
        check_recv(routing, identity=identity, config=config, name="routing")
    if request.scales is None:
        check_tensor("x", request.x, shape=(None, config.hidden_size), dtypes=fmt.input_dtypes, device=device)
    else:
        if fmt.scale_dtype is None:
            raise ArgumentError("scales", f"None (format {fmt.name!r} has no scales)", "a tensor")
        width = fmt.payload_width(config.hidden_size)
        check_tensor("x", request.x, shape=(None, width), dtypes=(fmt.payload_dtype,), device=device)
    num_tokens = request.x.shape[0]
    if num_tokens > config.max_tokens_per_rank:
        raise _too_many(num_tokens, config.max_tokens_per_rank)
    check_max_tokens(config, request)
    if routing is not None and routing.handle.num_tokens != num_tokens:
        raise ArgumentError("x", f"the {routing.handle.num_tokens} rows of the reused routing", f"{num_tokens} rows")
    _check_ids(config, request, num_tokens, device)
    _check_weights(config, request.topk_weights, num_tokens, device)
    if request.scales is not None and fmt.scale_dtype is not None:
        shape = (num_tokens, fmt.scale_width(config.hidden_size))
        check_tensor("scales", request.scales, shape=shape, dtypes=(fmt.scale_dtype,), device=device)
    _check_input_scale(config, request, device)
    if request.out is not None:
        _check_out(config, request, device)
    return request


def check_max_tokens(config: EPConfig, request: DispatchRequest) -> None:
    """Check the bound on the tokens of every rank, which is also one on this rank's."""
    bound, most = request.max_tokens, config.max_tokens_per_rank
    if bound is None:
        return
    if isinstance(bound, bool) or not isinstance(bound, (int, torch.SymInt)):
        raise ArgumentError("max_tokens", "an integer or None", f"a {type(bound).__name__}")
    if request.routing is not None:
        raise ArgumentError("max_tokens", "None with routing=, whose output's number of rows is used again", bound)
    if not request.x.shape[0] <= bound <= most:
        if request.x.shape[0] > most:  # a layer on one rank gives its own rows as the bound
            raise _too_many(request.x.shape[0], most)
        expected = f"an integer from the {request.x.shape[0]} rows of x to max_tokens_per_rank = {most}"
        raise ArgumentError("max_tokens", expected, bound)


def _too_many(num_tokens: int, most: int) -> ArgumentError:
    return ArgumentError("x", f"at most max_tokens_per_rank = {most} rows", f"{num_tokens} rows")


def check_num_sms(config: EPConfig, num_sms: object, *, transport: str, device: torch.device) -> None:
    """Check the SM limit of one call: no more than the communicator's, or than the device has."""
    if num_sms is None:
        return
    if transport != "symmetric":
        raise UnsupportedError(
            f"num_sms: expected None with transport={transport!r}, whose library chooses its SMs, got {num_sms!r}; "
            "leave it out, or use transport='symmetric'"
        )
    if isinstance(num_sms, bool) or not isinstance(num_sms, int):
        raise ArgumentError("num_sms", "an integer or None", f"a {type(num_sms).__name__}")
    most = config.num_sms
    if most is None and device.type == "cuda":
        most = torch.cuda.get_device_properties(device).multi_processor_count
    if num_sms < 1 or (most is not None and num_sms > most):
        upper = "" if most is None else f" and <= {most}, which the communicator may use"
        raise ArgumentError("num_sms", f"an integer >= 1{upper}", num_sms)


def _check_ids(config: EPConfig, request: DispatchRequest, num_tokens: int, device: torch.device) -> None:
    if request.routing is not None:
        if request.topk_ids is not request.routing.handle.topk_ids:
            raise ArgumentError("topk_ids", "None with routing=, which brings its own", "a tensor")
        return
    ids = check_tensor("topk_ids", request.topk_ids, shape=(num_tokens, config.topk), dtypes=_INTS, device=device)
    check_ids(config, ids)


def check_ids(config: EPConfig, ids: Tensor) -> None:
    """Check the values of ids, on a CPU only. On other devices the host would have to wait."""
    if ids.is_cpu and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < -1 or high >= config.num_experts:
            raise ArgumentError("topk_ids", f"ids in [-1, {config.num_experts})", f"{low if low < -1 else high}")


def _check_weights(config: EPConfig, weights: object, num_tokens: int, device: torch.device) -> None:
    if weights is not None and not isinstance(weights, Hook):
        check_tensor("topk_weights", weights, shape=(num_tokens, config.topk), dtypes=_FLOATS, device=device)


def _check_input_scale(config: EPConfig, request: DispatchRequest, device: torch.device) -> None:
    if request.input_scale is None:
        return
    if not config.format.uses_input_scale:
        given = type(request.input_scale).__name__
        raise ArgumentError("input_scale", f"None (format {config.format.name!r} has no global scale)", f"a {given}")
    if request.scales is not None:
        given = type(request.input_scale).__name__
        raise ArgumentError("input_scale", "None with scales= (the rows are already quantised)", f"a {given}")
    if not isinstance(request.input_scale, Hook):
        if not isinstance(request.input_scale, Tensor) or request.input_scale.numel() != 1:
            raise ArgumentError("input_scale", "a tensor of one element", request.input_scale)
        check_tensor("input_scale", request.input_scale.reshape(1), shape=(1,), dtypes=(torch.float32,), device=device)


def _check_out(config: EPConfig, request: DispatchRequest, device: torch.device) -> None:
    out = request.out
    if not isinstance(out, DispatchOutput):
        raise ArgumentError("out", "an earlier DispatchOutput", type(out).__name__)
    if config.zero_copy:
        raise ArgumentError("out", "None with zero_copy=True (rows stay in the workspace)", "a DispatchOutput")
    if request.host_counts:
        raise ArgumentError("out", "None with host_counts=True (its size is not known beforehand)", "a DispatchOutput")
    carried = out.topk_weights if config.layout == "rank" else out.weights
    weighted = request.topk_weights is not None
    if weighted != (carried is not None):
        held = "weights in out without topk_weights" if carried is not None else "topk_weights without weights in out"
        raise ArgumentError("out", "router weights in out exactly when topk_weights is given", held)
    wanted = shape_of_outputs(config, rows=request.output_rows(config), weighted=weighted)
    reads = (request.x, request.scales, request.topk_ids, request.topk_weights, request.input_scale)
    for name, blank in wanted.present:
        tensor = check_tensor(
            f"out.{name}", getattr(out, name), shape=blank.shape, dtypes=(blank.dtype,), device=device
        )
        if tensor.data_ptr() % ALIGNMENT:  # rows are stored in words of ALIGNMENT bytes
            raise ArgumentError(
                f"out.{name}", f"memory that begins at a multiple of {ALIGNMENT} bytes, as torch allocates it",
                f"an address {tensor.data_ptr() % ALIGNMENT} bytes past a multiple",
            )  # fmt: skip
        _refuse_overlap(f"out.{name}", tensor, reads)
    for name in wanted.absent:
        if getattr(out, name) is not None:
            raise ArgumentError(f"out.{name}", "None, which a call like this returns", "a tensor")


def check_combine(config: EPConfig, request: CombineRequest, *, identity: str, device: torch.device) -> CombineRequest:
    """Check one rank's combine arguments."""
    recv = check_recv(request.recv, identity=identity, config=config)
    check_rows_are_there(recv)
    rows = recv.src_info.shape[:-1]
    check_tensor("y", request.y, shape=(*rows, config.hidden_size), dtypes=(config.combine_dtype,), device=device)
    num_tokens = recv.handle.num_tokens
    if recv.weights is not None and recv.weights.shape != rows:
        raise ArgumentError("recv.weights", f"shape {list(rows)}, a weight for each row", list(recv.weights.shape))
    if not isinstance(request.reduce, bool):
        raise ArgumentError("reduce", "True or False", f"a {type(request.reduce).__name__}")
    check_weigh(request)
    if request.topk_weights is not None:
        if config.pre_reduce:
            raise ArgumentError(
                "topk_weights",
                "None with pre_reduce=True (pass the weights to dispatch, which carries them to the experts)",
                f"a {type(request.topk_weights).__name__}",
            )
        if recv.handle.topk_weights is not None:
            given = type(request.topk_weights).__name__
            raise ArgumentError("topk_weights", "None, as they went into dispatch already", f"a {given}")
        _check_weights(config, request.topk_weights, num_tokens, device)
    if not request.reduce:
        _check_unreduced(config, request)
    if request.epilogue is not None and not isinstance(request.epilogue, Hook):
        bias = isinstance(request.epilogue, Tensor) and request.epilogue.dim() == 1
        shape = (config.hidden_size,) if bias else (num_tokens, config.hidden_size)
        if config.mode == "allreduce":
            raise ArgumentError("epilogue", "None with mode='allreduce' (it would be added once per rank)", "a tensor")
        check_tensor("epilogue", request.epilogue, shape=shape, dtypes=_FLOATS, device=device)
    if isinstance(request.epilogue, Hook):
        _check_hook(config, request, request.epilogue, num_tokens, device)
    if request.shared is not None:
        if config.fused_shared_expert:
            raise ArgumentError("shared", "None with fused_shared_expert (its rows are in y)", "a tensor")
        if config.mode == "allreduce":
            raise ArgumentError("shared", "None with mode='allreduce' (it would be added once per rank)", "a tensor")
        check_tensor("shared", request.shared, shape=(num_tokens, config.hidden_size), dtypes=_FLOATS, device=device)
    if request.out is not None and not isinstance(request.epilogue, Hook):
        full = (num_tokens, config.hidden_size) if request.reduce else (num_tokens, config.topk, config.hidden_size)
        out = check_tensor("out", request.out, shape=full, dtypes=(config.combine_dtype,), device=device)
        weights = recv.handle.topk_weights if request.topk_weights is None else request.topk_weights
        _refuse_overlap("out", out, (request.y, recv.handle.topk_ids, recv.weights, weights))
        # ``out`` may be a tensor that is added: each element is read before it is stored.
        added = (request.shared, request.epilogue)
        _refuse_overlap("out", out, [t for t in added if not (isinstance(t, Tensor) and _in_place(t, out))])
    return request


def check_weigh(request: CombineRequest) -> None:
    """Check ``weigh``, which an operator does not get."""
    if not isinstance(request.weigh, bool):
        raise ArgumentError("weigh", "True or False", f"a {type(request.weigh).__name__}")
    if not request.weigh and request.topk_weights is not None:
        raise ArgumentError("weigh", "True with topk_weights= (combine is given them to multiply by)", "False")


def _in_place(tensor: Tensor, out: Tensor) -> bool:
    return tensor.data_ptr() == out.data_ptr() and tensor.dtype == out.dtype and tensor.shape == out.shape


def _refuse_overlap(name: str, out: Tensor, reads: Iterable[object]) -> None:
    """Refuse an ``out`` that overlaps a tensor the call reads, because the order of reads and stores is not defined."""
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for tensor in reads:
        if isinstance(tensor, Tensor) and tensor.data_ptr() < end and begin < tensor.data_ptr() + tensor.nbytes:
            raise ArgumentError(name, "memory of its own", "memory that the call reads, too")


def _check_hook(config: EPConfig, request: CombineRequest, hook: Hook, num_tokens: int, device: torch.device) -> None:
    """Check that combine's result for ``hook`` has a row per token, as a device does not stop a store past its end, and
    that the hook can store there."""
    if request.out is None and not hook.tensors:
        raise ArgumentError("out", "a tensor, because the epilogue's hook has no tensors to return", None)
    name, out = ("epilogue.tensors[0]", hook.tensors[0]) if request.out is None else ("out", request.out)
    if not isinstance(out, Tensor) or out.dim() == 0 or len(out) < num_tokens:
        got = f"shape {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ArgumentError(name, f"a tensor with a row for each of {num_tokens} tokens", got)
    if hook.check is not None:
        hook.check(num_tokens, config.hidden_size, device)
    if request.out is None or hook.triton_fn is None or not num_tokens:  # a function in torch may have other tensors
        return
    held = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in hook.tensors]
    if not any(out.data_ptr() in each for each in held):
        raise ArgumentError("out", "None or a tensor of the epilogue's hook, which stores into these", "another tensor")


def _check_unreduced(config: EPConfig, request: CombineRequest) -> None:
    """Check that a combine with reduce=False weights and adds nothing: it returns the experts' rows as they are."""
    if config.two_level:
        raise ArgumentError(
            "reduce", "True with two_level=True (rows are summed on the way home; use two_level=False)", False
        )
    if config.layout == "rank":
        raise ArgumentError("reduce", "True with layout='rank' (its rows are sums over slots already)", "False")
    if config.fused_shared_expert:
        raise ArgumentError("reduce", "True with fused_shared_expert (its rows have no slot)", "False")
    for name in ("topk_weights", "epilogue", "shared"):
        if getattr(request, name) is not None:
            given = type(getattr(request, name)).__name__
            raise ArgumentError(name, "None with reduce=False (rows are returned as they are)", f"a {given}")


def without_hooks(config: EPConfig, device: torch.device, request: CallRequest) -> CallRequest:
    """Return ``request`` with the values of its hooks, which may be refused as any argument may."""
    weights = request.topk_weights
    if isinstance(weights, Hook):
        tokens = request.x.shape[0] if isinstance(request, DispatchRequest) else request.recv.handle.num_tokens
        request = dataclasses.replace(request, topk_weights=_evaluated(config, device, weights, tokens))
    if isinstance(request, DispatchRequest) and isinstance(request.input_scale, Hook):
        request = dataclasses.replace(request, input_scale=evaluate_input_scale(request.input_scale, device=device))
    return request


def _evaluated(config: EPConfig, device: torch.device, weights: Hook, num_tokens: int) -> Tensor | None:
    with torch.no_grad():
        return evaluate_weights(
            weights, num_tokens=num_tokens, topk=config.topk, device=device, dtype=config.weight_dtype
        )


def refuse_gradients(*values: object) -> None:
    """Refuse tensors that require grad: they belong to :mod:`moelink.ops`. A graph that ended here silently would train
    wrongly."""
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        raise UnsupportedError(
            "init_devices: expected tensors without gradients, got one that requires grad; use moelink.init in one "
            "process per rank, or pass detached tensors"
        )


def refuse_tangents(request: CallRequest) -> None:
    """Refuse dual tensors, which forward-mode AD knows by their tangents: rows would have none."""
    given = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    if isinstance(request.over, DispatchOutput):
        given["recv.weights"] = request.over.weights
    for name, value in given.items():
        for tensor in value.tensors if isinstance(value, Hook) else (value,):
            if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                raise UnsupportedError(
                    f"{name}: expected no tangent, as there is no forward-mode gradient, got a dual tensor; use "
                    "backward, or pass forward_ad.unpack_dual(...).primal"
                )
