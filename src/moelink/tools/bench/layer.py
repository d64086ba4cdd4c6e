"""Measure a whole Mixture-of-Experts layer on one device: what decode pays for buffers that prefill needs.

One rank, a layer of ``moelink.nn``, graph replay on CUDA (plain calls on a CPU). All ways take turns in each round, so
that ratios are of one run:

* ``rows that exist``: activation ``silu``, of which a kernel computes the rows that exist; the communicator is sized
  for ``--most`` tokens.
* ``worst case``: the same layer with a function that moelink does not know, which torch applies to all rows of the
  buffers.
* ``sized for the call``: as the first, with a communicator sized for the tokens of the call.
* ``torch``: no moelink: sort the tokens by expert, two grouped products, sum the rows back, as transformers'
  ``grouped_mm`` experts do.

The four outputs are compared first. ``training`` is forward and backward of the first two.

    python -m moelink.tools.bench.layer --device cuda
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import moelink
from moelink.nn import MoE
from moelink.nn.experts import grouped_matmul
from moelink.tools.bench.document import head, results_folder, script_parser, write

Action = Callable[[], Any]
TOLERANCE = 2.0**-5
"""Largest difference between two outputs, relative to the largest element: bf16 sums of topk rows."""


@dataclass(frozen=True)
class LayerCase:
    """Sizes of the layer. The default is a block of Qwen3-30B-A3B."""

    num_experts: int = 128
    topk: int = 8
    hidden_size: int = 2048
    intermediate_size: int = 768
    dispatch_format: str = "bf16"


def torch_layer(layer: MoE, x: Tensor) -> Tensor:
    """The layer's function without moelink, from its weights: sort, grouped products, sum."""
    routing = layer.router(x)
    ids, weights = routing.topk_ids, routing.topk_weights
    num_experts, topk = layer.experts.num_experts, ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, ids.flatten().long(), torch.ones_like(ids.flatten(), dtype=torch.int32))
    offsets = functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    gate, up = grouped_matmul(x[order // topk], offsets, layer.experts.gate_up_proj).chunk(2, dim=1)
    rows = grouped_matmul(functional.silu(gate) * up, offsets, layer.experts.down_proj)
    rows = rows.float() * weights.flatten()[order][:, None].float()
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add_(0, order // topk, rows).to(x.dtype)


def unknown_silu(x: Tensor) -> Tensor:
    """A silu that moelink does not recognise."""
    return functional.silu(x)


def captured(action: Action, device: torch.device) -> Action:
    """``action`` as the replay of a graph, where there are graphs."""
    if device.type != "cuda":
        return action
    for _ in range(3):
        action()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay  # type: ignore[no-any-return]


def microseconds(action: Action, device: torch.device, repeat: int) -> float:
    """Time of one of ``repeat`` runs after one another."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeat):
            action()
        return 1e6 * (time.perf_counter() - start) / repeat
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        action()
    end.record()
    torch.cuda.synchronize(device)
    return 1e3 * float(begin.elapsed_time(end)) / repeat


def take_turns(ways: dict[str, Action], device: torch.device, *, rounds: int, repeat: int) -> dict[str, float]:
    """Median microseconds of each way; in each round every way runs once, after a round that does not count."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, action in ways.items():
            took = microseconds(action, device, repeat)
            if round_:
                samples[name].append(took)
    return {name: round(statistics.median(took), 1) for name, took in samples.items()}


def check_close(name: str, got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest element; raise when it is more than rounding explains."""
    worst = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    if not worst <= TOLERANCE:
        raise RuntimeError(f"{name}: expected the output of the torch layer within {TOLERANCE}, got {worst}")
    return worst


def measure_size(case: LayerCase, tokens: int, most: int, device: torch.device, *, rounds: int) -> dict[str, Any]:
    """The row of one number of tokens."""
    sizes = {name: value for name, value in asdict(case).items() if name != "intermediate_size"}
    sizes |= {"transport": "symmetric", "device": device}
    torch.manual_seed(tokens)
    x = torch.randn(tokens, case.hidden_size, dtype=torch.bfloat16, device=device)
    with ExitStack() as stack:

        def layer(max_tokens: int, activation: Callable[[Tensor], Tensor]) -> MoE:
            ep = stack.enter_context(moelink.init(**sizes, max_tokens_per_rank=max_tokens))
            return MoE(ep, intermediate_size=case.intermediate_size, activation=activation, load_steps=0)

        layers = {
            "rows that exist": layer(most, functional.silu),
            "worst case": layer(most, unknown_silu),
            "sized for the call": layer(tokens, functional.silu),
        }
        first = layers["rows that exist"]
        with torch.no_grad():
            want = torch_layer(first, x)
            differences = {name: check_close(name, each(x), want) for name, each in layers.items()}
            ways: dict[str, Action] = {name: _bound(each, x) for name, each in layers.items()}
            ways["torch"] = _bound(lambda x: torch_layer(first, x), x)
            replays = {name: captured(action, device) for name, action in ways.items()}
            repeat = max(1, min(50, 20000 // max(tokens, 1) // 4))
            forward = take_turns(replays, device, rounds=rounds, repeat=repeat)
        steps = {name: _step(layers[name], x) for name in ("rows that exist", "worst case")}
        training = take_turns(steps, device, rounds=max(3, rounds // 2), repeat=3)
    return {"tokens": tokens, "forward_us": forward, "training_us": training, "difference": differences}


def _bound(function: Callable[[Tensor], Tensor], x: Tensor) -> Action:
    return lambda: function(x)


def _step(layer: MoE, x: Tensor) -> Action:
    """A forward and a backward of the layer."""
    leaf = x.clone().requires_grad_()

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        layer(leaf).backward(leaf.detach())
        leaf.grad = None

    return step


def layer_document(
    case: LayerCase, sizes: Sequence[int], most: int, kind: str, *, rounds: int, commit: str | None
) -> dict[str, Any]:
    """Measure every size, print a table, return the document."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    rows = []
    for tokens in sizes:
        row = measure_size(case, tokens, most, device, rounds=rounds)
        rows.append(row)
        print(tokens, {**row["forward_us"], **{f"training, {name}": us for name, us in row["training_us"].items()}})
    return {
        **head("layer", script="layer", commit=commit),
        "device": kind,
        "devices": [torch.cuda.get_device_name(device) if kind == "cuda" else "CPU"],
        "case": {**asdict(case), "ranks": 1, "most_tokens": most, "rounds": rounds},
        "unit": "microseconds of one layer; forward by graph replay on CUDA, training by plain calls",
        "gate": "passed",
        "rows": rows,
    }


def main() -> None:
    """Measure and write the result."""
    parser = script_parser(__doc__, out="benchmarks/results/layer_DEVICE.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 128, 1024, 4096])
    parser.add_argument("--most", type=int, default=4096, help="tokens that the communicator is sized for")
    parser.add_argument("--rounds", type=int, default=20)
    for name, value in asdict(LayerCase()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    case = LayerCase(**{name: getattr(args, name) for name in asdict(LayerCase())})
    document = layer_document(case, args.tokens, args.most, args.device, rounds=args.rounds, commit=args.commit)
    write(document, args.out or results_folder() / f"layer_{args.device}.json")


if __name__ == "__main__":
    main()
