"""Choose the forms of every kernel that the host launches: switches whose values all meet in pairs.

A *form* is a kernel with all that it is compiled for. The product of the switches of dispatch alone has millions of
forms; :mod:`tests.kernels.covering` chooses some forty in which every pair of values meets. Each has its roles in one
launch, and many come once more with one role alone.

:mod:`tests.kernels.aot_facts` lowers them.

The GPU matrix (``matrix_configs``) keeps a list of its own. It runs on devices against an oracle, so it has every
format x layout x mode x reduction, and its sizes are dealt out with their cost in mind; what it lacks (traces, rows in
place, several nodes, other GPUs) only needs to compile here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import moelink
from moelink import epilogues
from moelink.config import COMBINE_DTYPES, COMBINE_FORMATS
from moelink.contract.launch import relative_to
from moelink.formats import get_format
from moelink.kernels.combine import kernel as combine
from moelink.kernels.combine import phases
from moelink.kernels.dispatch import kernel as dispatch
from moelink.kernels.dispatch.expired_rows import ep_overwrite_expired_rows_kernel
from moelink.kernels.dispatch.scales import ep_lay_out_scales_kernel
from moelink.kernels.launch.constants import TRITON_DTYPES, CombineSpec, DispatchSpec, combine_spec, dispatch_spec
from moelink.kernels.launch.own_rows import own_rows_stay, with_own_rows
from moelink.kernels.sync.credit import ep_grant_credits_kernel
from moelink.kernels.sync.signals import ep_give_up_kernel
from moelink.memory.workspace import Workspace
from moelink.tracing.device.clocks import ep_compare_clocks_kernel
from moelink.tuning import MANY_TOKENS
from tests.kernels.absent_gpu import SMS, on
from tests.kernels.aot import spec_of
from tests.kernels.covering import Row, covering_rows, needs
from tests.kernels.lowering import Spec
from tests.rows.row_forms import row_forms
from tests.support.cases import FORMATS

EXACT = {"enable_fp_fusion": False}
"""Options that kernels of calls are compiled with."""


@dataclass(frozen=True)
class Form:
    """A kernel and what it is compiled for.

    Attributes:
        launch: what is launched, in words.
        kernel: the ``triton.jit`` function.
        spec: what it is compiled for.
        row: the values of the switches.
    """

    launch: str
    kernel: Any
    spec: Spec
    row: Row

    @property
    def name(self) -> str:
        """The launch, and the switches that are not off."""
        words = {name: str(value).removeprefix("torch.") for name, value in self.row.items() if value not in OFF}
        return f"{self.launch}: " + " ".join(
            f"{name}={value}" for name, value in words.items() if name not in ("launch", "kernel")
        )

    @property
    def constants(self) -> Any:
        """The launch constants, whose fields the kernel reads."""
        return self.spec.constants["S"]


def forms() -> Iterator[Form]:
    """Yield every form, kernels of the transport first, those on rows last."""
    yield from dispatch_forms()
    yield from combine_forms()
    yield from service_forms()
    for launch, kernel, spec, row in row_forms():
        yield Form(launch, kernel, spec, row)


OFF = (False, None, "")
BOOLEAN = (False, True)
COMMON = {
    "layout": ("expert", "rank", "masked"),
    "mode": ("alltoall", "allreduce"),
    "shared_expert": BOOLEAN,
    "ranks": (1, 2, 4, 8, 64),
    "nodes": ("one", "several", "two levels"),
    "gpu": ("sm_90", "sm_89", "gfx942"),
    "num_sms": (None, 24),
    "trace": BOOLEAN,
    "tokens": (64, 260, 4096),
    "topk": (1, 3, 6, 8),
    "experts": (6, 30, 128),
    "ids": (torch.int32, torch.int64),
}
SCALES = {
    name: "none" if get_format(name).scale_layout is None else get_format(name).scale_layout.name for name in FORMATS
}
DISPATCH = {
    "format": FORMATS,
    "scales": tuple(dict.fromkeys(SCALES.values())),
    "launch": ("both", "async", "wait"),
    **COMMON,
    "input": (0, 1, 2),
    "quantized": BOOLEAN,
    "hidden": (7168, 2944, 2880, 3000),
    "weights": (None, torch.float32, torch.float64),
    "cached": BOOLEAN,
    "alignment": (1, 16, 24),
    "in_place": BOOLEAN,
    "global_ids": BOOLEAN,
    "row_table": (None, "expert", "masked"),
    "scales_later": BOOLEAN,
}
"""Switches of dispatch. ``input``: the dtype of rows that come, by number among those that the format takes.
``row_table``: the layout, if one receiver plans for all."""
SCALED = tuple(name for name in DISPATCH["scales"] if name != "none")
FORMAT_MEETS = ("quantized", "hidden", "gpu")
"""Formats whose scales have one layout differ in the functions that encode a row, which nothing else depends on."""
HOOKS = ("cast", "bias", "residual", "fp8_block128", "mxfp8", "mxfp4", "nvfp4")
"""Ready epilogues, which store the result themselves."""
SUMS, ROWS, UNREDUCED = (True, True), (False, True), (True, False)
"""Whether rows are summed before they travel, and whether the home rank sums."""
PHASES = ("wait phase", "reduce phase", "copy phase")
NARROW = (torch.bfloat16, torch.float16, torch.float32)
MANY = (260, 4096)
COMBINE = {
    "launch": ("both", "async", "wait", *PHASES),
    **COMMON,
    "dtype": COMBINE_DTYPES,
    "format": (None, *COMBINE_FORMATS),
    "hidden": (3584, 64, 3000),
    "sums": (SUMS, ROWS, UNREDUCED, (False, False)),
    "weights": ("none", "rows", "home"),
    "shared": BOOLEAN,
    "epilogue": ("", "bias", "residual", "hook", "torch hook"),
    "hook": (None, *HOOKS),
    "tells_weighed": BOOLEAN,
    "own_rows": (None, "sums", "copies"),
    "lamport": BOOLEAN,
}
"""Switches of combine. A *phase* is a launch of the contract. A hook in torch leaves the sums before rounding."""


ONE_NODE = {"nodes": ("one",), "mode": ("alltoall",)}
NVIDIA = ("sm_90", "sm_89")
RULES = (
    *needs("shared_expert", True, layout=("expert",)),
    *needs("nodes", "several", ranks=(2, 4, 8, 64), mode=("alltoall",), gpu=NVIDIA),
    *needs("nodes", "two levels", ranks=(4, 8, 64), mode=("alltoall",), gpu=NVIDIA),
    *needs("num_sms", 24, gpu=NVIDIA),  # elsewhere the limit is one of the grid, of which kernels know nothing
    *needs("trace", True, **ONE_NODE, gpu=NVIDIA),
)


@cache
def workspace_of(*, lamport: bool = True, **switches: Any) -> Workspace | None:
    """Return the workspace of a configuration with these switches; None where there is no such configuration."""
    try:
        return Workspace(config_of(switches), lamport)
    except moelink.MoelinkError:
        return None


def config_of(switches: Row) -> moelink.EPConfig:
    """Return the configuration of some switches; the others are off, or of a size that allows all."""
    ranks, nodes, layout = switches["ranks"], switches["nodes"], switches["layout"]
    fields: dict[str, Any] = {"rows_per_expert": 1024} if layout == "masked" else {}
    if nodes != "one":
        fields |= {"ranks_per_node": ranks // 2, "two_level": nodes == "two levels", "transport": "symmetric"}
    return moelink.EPConfig(
        num_experts=switches.get("experts", 30), topk=switches.get("topk", 6), hidden_size=switches.get("hidden", 1280),
        max_tokens_per_rank=switches["tokens"], dispatch_format=switches.get("format") or "bf16",
        combine_dtype=switches.get("dtype", torch.bfloat16), combine_format=switches.get("home"), layout=layout,
        expert_alignment=switches.get("alignment", 1), pre_reduce=switches.get("sums", SUMS)[0],
        fused_shared_expert=switches.get("shared_expert", False), global_ids=switches.get("global_ids", False),
        zero_copy=switches.get("in_place", False), mode=switches["mode"], num_sms=switches.get("num_sms"),
        world_size=ranks, **fields,
    )  # fmt: skip


def of_hidden(format: str, hidden: int) -> bool:
    return hidden % get_format(format).group == 0


def of_format(format: str, scales: str) -> bool:
    return SCALES[format] == scales


def of_dispatch_workspace(
    row_table: str | None, scales_later: bool, scales: str, tokens: int, ranks: int, nodes: str, mode: str, layout: str,
    cached: bool,
) -> bool:  # fmt: skip
    """Return whether these are as other switches make them: one receiver plans for all; scales are written later."""
    workspace = workspace_of(tokens=tokens, ranks=ranks, nodes=nodes, mode=mode, layout=layout)
    if workspace is None:
        return True  # another rule forbids it
    later = scales in ("transposed", "tiles_128x4") and tokens > MANY_TOKENS and layout == "expert"
    return (row_table, scales_later) == (layout if workspace.row_table and not cached else None, later)


PLANNED = {**ONE_NODE, "tokens": (64,), "cached": (False,)}
DISPATCH_RULES = (
    *RULES, of_hidden, of_format, of_dispatch_workspace,
    *needs("alignment", 16, layout=("expert",)), *needs("alignment", 24, layout=("expert",)),
    *needs("global_ids", True, layout=("rank",)), *needs("in_place", True, layout=("rank",), **ONE_NODE),
    *(
        rule for layout in ("expert", "masked")
        for rule in needs("row_table", layout, layout=(layout,), ranks=(4, 8, 64), **PLANNED)
    ),
    *needs("scales_later", True, layout=("expert",), tokens=(4096,), scales=("transposed", "tiles_128x4")),
    *needs("hidden", 3000, scales=("none",)), *needs("quantized", True, scales=SCALED, input=(0,)),
    *needs("hidden", 2880, scales=("none", "tiles_128x4", "row_major")),
)  # fmt: skip


def of_weights(weights: str, sums: tuple[bool, bool], mode: str) -> bool:
    """Where no sums travel, weights are multiplied at home, wherever they came."""
    return weights != "rows" or sums == SUMS or (sums == ROWS and mode == "allreduce")


def of_group(format: str | None, hidden: int) -> bool:
    return format is None or hidden % get_format(format).group == 0


@cache
def of_combine_workspace(
    *, own_rows: str | None, lamport: bool, launch: str, ranks: int, nodes: str, mode: str, format: str | None,
    tokens: int, layout: str, sums: tuple[bool, bool], dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Return whether these are as other switches make them: own rows stay; sums may travel without flags."""
    workspace = workspace_of(
        home=format, tokens=tokens, ranks=ranks, nodes=nodes, mode=mode, layout=layout, sums=sums, dtype=dtype,
        lamport=launch not in PHASES,
    )  # fmt: skip
    if workspace is None:
        return True  # another rule forbids it
    travel = sums == SUMS and launch not in PHASES
    kind = "copies" if layout == "rank" else "sums"
    stay = kind if own_rows_stay(workspace, torch.device("cuda"), sums=travel) else None
    return (own_rows, lamport) == (stay, workspace.lamport_tokens > 0)


def of_many_sums(lamport: bool, tokens: int, layout: str) -> bool:
    return not lamport or tokens <= MANY_TOKENS or layout == "rank"


def of_many_copies(lamport: bool, tokens: int, ranks: int) -> bool:
    return not lamport or tokens <= MANY_TOKENS or ranks == 2


def of_phase_rows(launch: str, sums: tuple[bool, bool], weights: str, mode: str) -> bool:
    """The contract returns rows only where they travel, and weights multiply where the rows are."""
    return launch not in PHASES or (sums != UNREDUCED and (weights != "rows" or mode == "allreduce"))


def of_hook(hook: str | None, epilogue: str) -> bool:
    return (hook is not None) == (epilogue == "hook")


def of_hook_columns(hook: str | None, hidden: int) -> bool:
    return hook not in FORMATS or hidden % get_format(hook).group == 0


TWO_RANKS = {**ONE_NODE, "ranks": (2,), "format": (None,), "sums": (SUMS,)}
PLAIN = {"weights": ("none",), "shared": (False,), "epilogue": ("",)}
COMBINE_RULES = (
    *RULES, of_weights, of_group, of_combine_workspace, of_many_sums, of_many_copies, of_phase_rows,
    of_hook, of_hook_columns,
    *needs("layout", "rank", sums=(SUMS,), weights=("none",)), *needs("nodes", "two levels", sums=(SUMS,)),
    *(
        rule for unreduced in (UNREDUCED, (False, False))
        for rule in needs("sums", unreduced, **PLAIN, shared_expert=(False,))
    ),
    *needs("weights", "home", sums=(ROWS,)),
    *needs("shared", True, shared_expert=(False,), mode=("alltoall",)),
    *(rule for kind in ("bias", "residual") for rule in needs("epilogue", kind, mode=("alltoall",))),
    *(rule for fmt in COMBINE_FORMATS for rule in needs("format", fmt, dtype=NARROW, mode=("alltoall",))),
    *(
        rule for phase in PHASES
        for rule in needs(
            "launch", phase, layout=("expert",), trace=(False,), format=(None,), tells_weighed=(False,),
            own_rows=(None,), lamport=(False,), nodes=("one", "several"),
        )
    ),
    *needs("launch", "async", mode=("alltoall",)), *needs("launch", "wait phase", mode=("alltoall",), **PLAIN),
    *needs("launch", "copy phase", shared_expert=(True,), **PLAIN),
    *needs("own_rows", "sums", **TWO_RANKS, layout=("expert", "masked"), tokens=(4096,), lamport=(False,)),
    *needs("own_rows", "copies", **TWO_RANKS, layout=("rank",), tokens=MANY),
    *needs("lamport", True, **ONE_NODE, format=(None,), sums=(SUMS, UNREDUCED), dtype=NARROW),
    *needs("ranks", 64, tokens=(64, 4096)),  # between them it would depend on the width of a row who has flags
)  # fmt: skip


DISPATCH_WANTED = (
    # Tiles are padded as rows come, and the scales of a row do not fill its last word.
    {"format": "mxfp8", "hidden": 2880, "layout": "expert", "tokens": 260, "cached": False},
    # Rows and scales of several messages are unpacked in turn.
    {"format": "fp8_block128", "layout": "masked", "tokens": 4096, "cached": False, "mode": "alltoall"},
    {
        "cached": True,
        "tokens": 64,
        "ranks": 8,
        "nodes": "one",
        "mode": "alltoall",
        "layout": "masked",
    },  # renews a table
    {"format": "fp8_block128_e8m0", "hidden": 2944, "quantized": False},  # more scales than groups fill a word
    {"format": "fp64", "hidden": 7168, "input": 2, "tokens": 64, "cached": False},  # a row in more than two pieces
    {"format": "nvfp4", "quantized": False, "input": 0},  # with a global scale
    {"format": "mxfp8", "hidden": 2880, "scales_later": True},
    # bf16 elements by two parts of a reciprocal
    {"format": "fp8_block128", "num_sms": 24, "tokens": 4096, "quantized": False, "input": 0, "gpu": "sm_90"},
    {"launch": "async", "nodes": "two levels", "cached": True},
    {"launch": "async", "nodes": "two levels", "cached": False},
)
COMBINE_WANTED = (
    {"own_rows": "sums", "topk": 3, "num_sms": None},
    {"own_rows": "sums", "topk": 6, "num_sms": None},
    # On few SMs only the rows that are there are summed.
    {"own_rows": "sums", "num_sms": 24, "dtype": torch.bfloat16, "weights": "rows"},
    {"own_rows": "sums", "num_sms": 24, "dtype": torch.float32, "weights": "none"},
)
"""Three values and more that decide together: found by statements that were in no form."""


@cache
def dispatch_rows() -> list[Row]:
    """Return the rows of switches of dispatch."""
    return covering_rows(DISPATCH, DISPATCH_RULES, meets={"format": FORMAT_MEETS}, wanted=DISPATCH_WANTED)


@cache
def combine_rows() -> list[Row]:
    """Return the rows of switches of combine."""
    return covering_rows(COMBINE, COMBINE_RULES, meets={"hook": ()}, wanted=COMBINE_WANTED)


def dispatch_forms() -> Iterator[Form]:
    """Yield of each row both roles in one launch, and the role that the row names; beside them the launches that only
    some calls have: of the scales, and in debug mode over rows in place."""
    kernels = {
        "both": dispatch.ep_fused_dispatch_kernel, "async": dispatch.ep_dispatch_async_kernel,
        "wait": dispatch.ep_dispatch_wait_kernel, "scales": ep_lay_out_scales_kernel,
        "expired": ep_overwrite_expired_rows_kernel,
    }  # fmt: skip
    seen: set[Any] = set()
    for row in dispatch_rows():
        constants, pointers = dispatch_constants(row)
        launches = [*launches_of(row, seen), *["scales"] * row["scales_later"]]
        if row["in_place"] and is_new("expired", {"gpu": row["gpu"]}, seen):
            launches.append("expired")
        for launch in launches:
            kernel = kernels[launch]
            yield Form(f"dispatch {launch}", kernel, spec_of(kernel, constants, pointers, row["gpu"], EXACT), row)


def launches_of(row: Row, seen: set[Any]) -> list[str]:
    """Return the launches of a row: that of both roles, and that of one role if one of its values is new to it."""
    launch = row["launch"]
    if launch in PHASES:
        return [launch]
    return ["both", *[launch] * (launch != "both" and is_new(launch, row, seen))]


def is_new(launch: str, row: Row, seen: set[Any]) -> bool:
    """Return whether ``launch`` is new to a value of ``row``, and note them in ``seen``."""
    values = {(launch, name, value) for name, value in row.items()}
    new = not values <= seen
    seen |= values
    return new


def dispatch_constants(row: Row) -> tuple[DispatchSpec, dict[str, str]]:
    """Return the launch constants of a row, and the types of the caller's pointers."""
    config = config_of({**row, "dtype": row["weights"] or torch.bfloat16})
    fmt, quantized = config.format, row["quantized"]
    given = fmt.input_dtypes[-1 if row["input"] == 2 else row["input"]]
    with on(row["gpu"]):
        constants = inspect.unwrap(dispatch_spec)(  # what it remembers is of another GPU
            Workspace(config), torch.device("cuda"), input_dtype=fmt.payload_dtype if quantized else given,
            quantized=quantized, weights=row["weights"] is not None, cached=row["cached"],
            input_scale=fmt.uses_input_scale and not quantized and row["input"] == 0,
        )  # fmt: skip
    copied, weight = quantized or given == fmt.payload_dtype, type_of(config.weight_dtype)
    pointers = {
        "x": "*u8" if copied else type_of(given), "topk_weights": weight, "weights": weight,
        "topk_ids": type_of(row["ids"]),
    }  # fmt: skip
    return traced(constants, row), pointers


def combine_forms() -> Iterator[Form]:
    """Yield of each row both roles in one launch, and the role that the row names; or the phase."""
    kernels = {
        "both": combine.ep_fused_combine_kernel, "async": combine.ep_combine_async_kernel,
        "wait": combine.ep_combine_wait_kernel, "wait phase": phases.ep_wait_for_all_arrivals_kernel,
        "reduce phase": phases.ep_reduce_and_copy_to_output_kernel,
        "copy phase": phases.ep_copy_shared_expert_outputs_kernel,
    }  # fmt: skip
    seen: set[Any] = set()
    for row in combine_rows():
        constants, pointers = combine_constants(row)
        for launch in launches_of(row, seen):
            spec = spec_of(kernels[launch], constants, pointers, row["gpu"], EXACT)
            yield Form(f"combine {launch}", kernels[launch], spec, row)


def combine_constants(row: Row) -> tuple[CombineSpec, dict[str, Any]]:
    """Return the launch constants of a row, and the types of the caller's pointers."""
    config = config_of({**row, "format": None, "home": row["format"]})
    workspace, device = Workspace(config, lamport="phase" not in row["launch"]), torch.device("cuda")
    hook = hook_of(row["hook"], row) if row["hook"] else None
    raw = row["epilogue"] == "torch hook"
    with on(row["gpu"]):
        constants = inspect.unwrap(combine_spec)(
            workspace, device, row_weights=row["weights"] == "rows", home_weights=row["weights"] == "home",
            reduce=row["sums"][1], shared=row["shared"], hook=None if hook is None else hook.triton_fn,
            epilogue=row["epilogue"] if row["epilogue"] in ("bias", "residual") else "", raw_sums=raw,
            tells_weighed=row["tells_weighed"],
        )  # fmt: skip
        if "phase" in row["launch"]:
            constants = relative_to(constants, 128)
        else:
            constants = inspect.unwrap(with_own_rows)(constants, workspace, device)
    if row["launch"] == "reduce phase":
        constants = dataclasses.replace(
            constants, FUSED_SHARED_EXPERT=0, HAS_SHARED=row["shared_expert"] or row["shared"]
        )
    pointers: dict[str, Any] = dict.fromkeys(("y", "out", "shared"), type_of(row["dtype"]))
    pointers |= dict.fromkeys(("row_weights", "home_weights"), type_of(config.weight_dtype))
    pointers |= {"topk_ids": type_of(row["ids"]), "epilogue": type_of(COMBINE_DTYPES[row["tokens"] % 4])}
    if raw:
        pointers["out"] = type_of(config.accumulate_dtype)
    if hook is not None:
        types = tuple(type_of(tensor.dtype) for tensor in hook.tensors)
        pointers |= {"out": types[0], "epilogue_tensors": types}
    return traced(constants, row), pointers


def hook_of(name: str, row: Row) -> moelink.Hook:
    """Return the ready epilogue ``name`` for the columns and the dtype of ``row``."""
    hidden = row["hidden"]
    if name not in FORMATS:
        term = {"cast": (), "bias": (torch.zeros(hidden),), "residual": (torch.zeros(1, hidden),)}[name]
        return getattr(epilogues, name)(*term, torch.empty(1, hidden, dtype=row["dtype"]))  # type: ignore[no-any-return]
    fmt = get_format(name)
    payload = torch.empty(1, fmt.payload_width(hidden), dtype=fmt.payload_dtype)
    return epilogues.block_quantize(name, payload, torch.empty(1, hidden // fmt.group, dtype=fmt.scale_dtype))


SERVICE = {"kernel": ("credits", "give up", "clocks"), **{name: COMMON[name] for name in ("ranks", "nodes", "gpu")}}


SERVICE_RULES = (
    *needs("nodes", "several", ranks=(2, 4, 8), gpu=NVIDIA), *needs("nodes", "two levels", ranks=(4, 8), gpu=NVIDIA),
    *needs("kernel", "clocks", nodes=("one",), gpu=NVIDIA),
)  # fmt: skip


def service_forms() -> Iterator[Form]:
    """Yield the launches that belong to no call: that grant credits, tell of a failure, and compare clocks."""
    kernels = {
        "credits": ep_grant_credits_kernel, "give up": ep_give_up_kernel, "clocks": ep_compare_clocks_kernel,
    }  # fmt: skip
    for row in covering_rows(SERVICE, SERVICE_RULES):
        config = config_of({"tokens": 300, "mode": "alltoall", "layout": "expert", **row})
        with on(row["gpu"]):
            constants = inspect.unwrap(combine_spec)(
                Workspace(config), torch.device("cuda"), row_weights=False, home_weights=False
            )
        kernel = kernels[row["kernel"]]
        yield Form(row["kernel"], kernel, spec_of(kernel, constants, {}, row["gpu"], EXACT), row)


def traced(constants: Any, row: Row) -> Any:
    """Return ``constants`` of a launch that stamps, if the row has a trace."""
    return dataclasses.replace(constants, TRACE=True, TRACE_CTAS=5 * SMS) if row["trace"] else constants


def type_of(dtype: torch.dtype) -> str:
    """Return the type of a pointer to elements of ``dtype``; codes and scales are bytes to kernels."""
    known = {torch.int32: "*i32", torch.int64: "*i64"} | {key: f"*{value}" for key, value in TRITON_DTYPES.items()}
    return known.get(dtype, "*u8")
