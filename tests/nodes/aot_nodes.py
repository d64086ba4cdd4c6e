"""Compile the kernels that go between nodes for a GPU that is not there, linked with NVSHMEM's device library.

Run in a process of its own without TRITON_INTERPRET: ``python aot_nodes.py NAME...`` prints one JSON object for each of
these kernels, or one line that begins with "no library" where NVSHMEM is not installed.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

import moelink
from moelink.errors import UnsupportedError
from moelink.kernels.combine import kernel as combine
from moelink.kernels.dispatch import kernel as dispatch
from moelink.kernels.launch.constants import combine_spec, dispatch_spec
from moelink.memory.nodes.network import NvshmemNetwork
from moelink.memory.workspace import Workspace
from moelink_testing.lowering import memory_instructions, unguarded_releases
from tests.kernels.aot import compile_kernel

WORLD, NODE = 8, 4
SHAPE = dict(num_experts=32, topk=8, hidden_size=2048, max_tokens_per_rank=64, world_size=WORLD, ranks_per_node=NODE)
PUT = re.compile(r"tt\.extern_elementwise.*nvshmemx_putmem_signal_nbi_block")
STORE = re.compile(r"tt\.store (%\w+)")
FENCE = re.compile(r"tt\.atomic_rmw add, acq_rel, sys, (%\w+)")
WRITE = re.compile(r"tt\.(store|atomic_rmw|atomic_cas)\b")
# The function that is called, or the one inside it that leaves a put to the network, whichever this Triton has not
# inlined yet; both have the operation on the signal as their sixth argument.
TRANSFER = re.compile(
    r"call .*@\w*(?:nvshmemi_transfer_put_signal|nvshmemx_putmem_signal_nbi)\w*\((?:[^,]*, ){5}i32 (?:noundef )?(\d+)"
)


def kernels() -> Iterator[tuple[str, Any, Any]]:
    """Name, kernel and spec. A fused kernel is the other two in one; that of dispatch takes so long that the two are
    compiled instead."""
    device = torch.device("cuda")
    workspace = Workspace(moelink.EPConfig(**SHAPE, dispatch_format="fp8_block128"))
    spec = dispatch_spec(workspace, device, input_dtype=torch.bfloat16, quantized=False, weights=True)
    yield "dispatch_async", dispatch.ep_dispatch_async_kernel, spec
    yield "dispatch_wait", dispatch.ep_dispatch_wait_kernel, spec
    cached = dispatch_spec(workspace, device, input_dtype=torch.bfloat16, quantized=False, weights=True, cached=True)
    yield "dispatch_async_cached", dispatch.ep_dispatch_async_kernel, cached
    for pre_reduce in (True, False):
        workspace = Workspace(moelink.EPConfig(**SHAPE, pre_reduce=pre_reduce))
        spec = combine_spec(workspace, device, row_weights=True, home_weights=True)
        yield f"fused_combine-{pre_reduce}", combine.ep_fused_combine_kernel, spec
    yield from kernels_of_two_levels(device)


def kernels_of_two_levels(device: torch.device) -> Iterator[tuple[str, Any, Any]]:
    """The same with relays: a forwarder and a collector besides the senders."""
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=132)  # an H100's
    fields = dict(**SHAPE, transport="symmetric", two_level=True)
    workspace = Workspace(moelink.EPConfig(**fields, dispatch_format="fp8_block128"))
    for cached in (False, True):
        spec = dispatch_spec(
            workspace, device, input_dtype=torch.bfloat16, quantized=False, weights=True, cached=cached
        )
        yield f"relays_async{'_cached' * cached}", dispatch.ep_dispatch_async_kernel, spec
    yield "relays_wait", dispatch.ep_dispatch_wait_kernel, spec
    for fmt in (None, "fp8_block128"):
        workspace = Workspace(moelink.EPConfig(**fields, combine_format=fmt))
        spec = combine_spec(workspace, device, row_weights=True, home_weights=True)
        yield f"collected_async-{fmt}", combine.ep_combine_async_kernel, spec
        yield f"collected_wait-{fmt}", combine.ep_combine_wait_kernel, spec


def unfenced(ttir: str) -> tuple[int, int]:
    """How many puts there are, and before how many the last write is not that of ``signals.fence``.

    The fence stores what its atomic has returned to where it was, so the last two writes tell.
    """
    puts = bad = 0
    writes: list[str] = []
    for line in ttir.splitlines():
        if PUT.search(line):
            puts += 1
            stored, fenced = STORE.search(writes[-1]), FENCE.search(writes[-2])
            bad += not (stored and fenced and stored[1] == fenced[1])
        elif WRITE.search(line):
            writes.append(line)
    return puts, bad


def bodies(ptx: str) -> list[str]:
    """The kernel, and the function that it calls when a wait has failed: what is not NVSHMEM's."""
    # A conversion in inline assembly also ends in a line with a brace.
    functions = [text for text in re.split(r"\n}\n(?!\s*// end inline)", ptx) if "\n{\n" in text]
    return [text for text in functions if re.search(r"\.(entry|func) [^{]*(_kernel|write_error)", text)]


def main(names: Sequence[str]) -> None:
    """Compile and describe those called ``names``."""
    near = SimpleNamespace(pointers=torch.arange(WORLD))
    try:
        network = NvshmemNetwork(near, Workspace(moelink.EPConfig(**SHAPE)), rank=0)
    except UnsupportedError as error:
        print(f"no library: {error}")
        return
    for name, kernel, spec in kernels():
        if name not in names:
            continue
        form = compile_kernel(kernel, spec, "sm_90", "*bf16", **network.options)
        ptx, llir = form.assembly, form.asm["llir"]
        ours = [op for body in bodies(ptx) for op in memory_instructions(body)]
        puts, bad = unfenced(form.ttir)
        print(json.dumps({
            "name": name, "net": str(spec.NETWORK), "puts": puts, "unfenced": bad, "ops": Counter(ours),
            "unguarded": unguarded_releases(ours), "local": sum("local" in op for op in ours),
            "local_of_nvshmem": form.local, "operations": sorted(set(map(int, TRANSFER.findall(llir)))),
            "transfers": len(TRANSFER.findall(llir)),
            "undefined": re.findall(r"\.extern \.func[^;]*?(\w*nvshmem\w*)", ptx),
            "state": bool(re.search(r"\.visible \.const [^;]*\bnvshmemi_device_state_d\b", ptx)),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
