"""Prepared launches of kernels on rows on a GPU have the bits of Triton's own launches, also if arguments change."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

import moelink
from moelink.formats import get_format
from moelink.kernels.launch.direct import cuda_driver
from moelink.kernels.launch.row_launch import Block, TensorMap, row_launcher
from moelink.nn import MoE, experts
from moelink.rows import activation_kernel, dequantize_kernel, gated_kernel, grouped_fp8, scale_rows_kernel
from tests.rows.grouped_fp8_cases import problem
from tests.support.seen import Seen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(110),
]
FMT, G, H = "fp8_block128", 4, 512


@contextmanager
def hooked() -> Iterator[None]:
    """A profiler wants to hear of launches, so Triton launches."""
    hook = knobs.runtime.launch_enter_hook

    def heard(metadata: object) -> None:
        return None

    hook.add(heard)  # type: ignore[union-attr]
    try:
        yield
    finally:
        hook.remove(heard)  # type: ignore[union-attr]


def shifted(tensor: Tensor, by: int) -> Tensor:
    """The same tensor, ``by`` elements behind a multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device=tensor.device)
    return room[by : by + tensor.numel()].view(tensor.shape).copy_(tensor)


def offsets(rows: int) -> Tensor:
    each = torch.tensor([0, rows // 2, 0, rows // 4], device="cuda")
    return torch.cat([each.new_zeros(1), each.cumsum(0)]).int()


def activation(rows: int, by: int) -> Callable[[], list[Tensor]]:
    x, at = shifted(torch.randn(rows, 2 * H, device="cuda").bfloat16(), by), offsets(rows)

    def run() -> list[Tensor]:
        tokens = torch.zeros(rows, H, dtype=torch.float8_e4m3fn, device="cuda")
        scales = torch.zeros(H // 128, rows, device="cuda")
        activation_kernel.launch(x, at, tokens, scales, None, None, get_format(FMT), None)
        return [tokens.view(torch.uint8), scales]

    return run


def gated(rows: int, by: int) -> Callable[[], list[Tensor]]:
    x, at = shifted(torch.randn(rows, 2 * H, device="cuda").bfloat16(), by), offsets(rows)
    grad = torch.randn(rows, H, device="cuda").bfloat16()

    def run() -> list[Tensor]:
        out, back = torch.zeros_like(grad), torch.zeros_like(x)
        gated_kernel.launch(x, at, out, "silu", 1.0, 1.0)
        gated_kernel.launch(x, at, back, "silu", 1.0, 1.0, grad=grad)
        return [out, back]

    return run


def dequantize(rows: int, by: int) -> Callable[[], list[Tensor]]:
    codes = shifted(torch.randint(0, 100, (rows, H), device="cuda", dtype=torch.uint8), 16 * by)
    scales, at = torch.rand(H // 128, rows, device="cuda"), offsets(rows)

    def run() -> list[Tensor]:
        out = torch.zeros(rows, H, dtype=torch.bfloat16, device="cuda")
        dequantize_kernel.launch(codes.view(torch.float8_e4m3fn), scales, at, None, None, out, get_format(FMT))
        return [out]

    return run


def scale_rows(rows: int, by: int) -> Callable[[], list[Tensor]]:
    d, y = shifted(torch.randn(rows, H, device="cuda"), by), torch.randn(rows, H, device="cuda").bfloat16()
    weights, at = torch.rand(rows, device="cuda"), offsets(rows)

    def run() -> list[Tensor]:
        out, dots = torch.zeros_like(y), torch.zeros(rows, device="cuda")
        scale_rows_kernel.launch(d, at, weights=weights, other=y, out=out, dots=dots)
        return [out, dots]

    return run


def product(rows: int, by: int) -> Callable[[], list[Tensor]]:
    given = problem((rows // 2, 0, rows // 4, 0), rows, 512, 384, device="cuda")
    scales = shifted(given.scales, by)

    def run() -> list[Tensor]:
        out = torch.zeros(given.codes.shape[0], 384, dtype=torch.bfloat16, device="cuda")
        grouped_fp8.launch(given.codes, scales, given.offsets, given.weight.codes, given.weight.scales, out)
        return [out]

    return run


@pytest.mark.parametrize("make", [activation, gated, dequantize, scale_rows, product])
def test_the_bits_are_those_of_tritons_launcher(make: Callable[[int, int], Callable[[], list[Tensor]]]) -> None:
    """For rows, addresses and alignments that change from launch to launch, and come back."""
    torch.manual_seed(0)
    calls = [make(rows, by) for rows, by in ((32, 0), (32, 0), (400, 0), (32, 1), (36, 0))]
    with hooked():
        want = [call() for call in calls]
    before = dict(row_launcher()._prepared)
    for order in (range(5), (4, 3, 2, 1, 0), (0, 0, 3, 3)):
        for number in order:
            assert all(map(torch.equal, calls[number](), want[number])), number
    made = [prepared for key, prepared in row_launcher()._prepared.items() if key not in before]
    assert made
    assert None not in made, "this Triton makes the parameters that are known"


def test_a_map_has_the_bytes_of_tritons() -> None:
    tensor = torch.zeros(40, 512, dtype=torch.uint8, device="cuda")
    for swizzle, block in ((3, [64, 128]), (0, [16, 32])):
        metadata = {
            "swizzle": swizzle, "elem_size": 1, "elem_type": 0, "block_size": block, "fp4_padded": False,
        }  # fmt: skip
        made = TensorMap(Block(tensor, (block[0], block[1])), metadata, 0, cuda_driver())
        made.follow(tensor.data_ptr(), 40)
        described = TensorDescriptor.from_tensor(tensor, block)
        fill = driver.active.utils.fill_tma_descriptor
        wanted = fill(tensor.data_ptr(), swizzle, 1, 0, block, described.shape, described.strides, 0)
        # struct { PyObject_HEAD; _Alignas(128) CUtensorMap tensorMap; }
        assert ctypes.string_at(made.address, 128) == ctypes.string_at(id(wanted) + 128, 128)


@pytest.mark.parametrize("make", [activation, product])
def test_graphs_and_streams(make: Callable[[int, int], Callable[[], list[Tensor]]]) -> None:
    """A captured launch keeps its parameters while later launches have others; a launch goes to the current stream."""
    one, other = make(400, 0), make(32, 0)
    with hooked():
        want, want_other = one(), other()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = one()
    torch.cuda.current_stream().wait_stream(side)
    assert all(map(torch.equal, got, want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = one()
    assert all(map(torch.equal, other(), want_other))
    for out in captured:
        out.zero_()
    graph.replay()
    assert all(map(torch.equal, captured, want))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_launch_goes_to_the_device_of_its_tensors() -> None:
    x, at = torch.randn(32, 2 * H, device="cuda:1").bfloat16(), offsets(32).to("cuda:1")
    want, got = (torch.zeros(32, H, dtype=torch.bfloat16, device="cuda:1") for _ in range(2))
    with torch.cuda.device(1), hooked():
        gated_kernel.launch(x, at, want, "silu", 1.0, 1.0)
    with torch.cuda.device(0):
        gated_kernel.launch(x, at, got, "silu", 1.0, 1.0)
    torch.cuda.synchronize(1)
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["triton", "dequantize"])
def test_a_layer_gives_the_same_with_and_without_operators(backend: str) -> None:
    with moelink.init(
        num_experts=8, topk=2, hidden_size=256, max_tokens_per_rank=64, dispatch_format=FMT, transport="symmetric",
        device="cuda",
    ) as ep:  # fmt: skip
        layer = MoE(ep, intermediate_size=128, experts_backend=backend)  # type: ignore[arg-type]
        for tokens in (1, 33, 64, 1):
            x = torch.randn(tokens, 256, device="cuda").bfloat16()
            with torch.no_grad():
                got = layer(x)
                with Seen() as seen:
                    want = layer(x)
            assert torch.equal(got, want)
            assert any("quantized_experts" in name or "gated" in name for name in seen.names)
        ep.check()


@pytest.mark.parametrize("dispatch_format", ["bf16", FMT])
def test_a_layer_learns_the_same_with_and_without_operators(
    dispatch_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moelink.init(
        num_experts=8, topk=2, hidden_size=256, max_tokens_per_rank=64, dispatch_format=dispatch_format,
        transport="symmetric", device="cuda",
    ) as ep:  # fmt: skip
        layer = MoE(ep, intermediate_size=128)
        for tokens in (1, 33, 64, 33, 1):
            x, grad = (torch.randn(tokens, 256, device="cuda").bfloat16() for _ in range(2))
            results = []
            for nodes in (True, False):
                with monkeypatch.context() as patch:
                    if not nodes:
                        patch.setattr(ep._context, "has_nodes", False)
                        patch.setattr(experts, "_fits_node", lambda *_: False)
                    learning = x.clone().requires_grad_()
                    out = layer(learning)
                    out.backward(grad)
                results.append([out.detach(), learning.grad, *[weight.grad for weight in layer.parameters()]])
                layer.zero_grad()
            for mine, want in zip(*results, strict=True):
                assert torch.equal(mine, want)
        ep.check()


def test_replayed_experts_and_choices_have_the_bits_of_the_first_call() -> None:
    """Of other tokens, in another stream's graph, and beside calls with other sizes."""
    with (
        moelink.init(
            num_experts=8, topk=2, hidden_size=256, max_tokens_per_rank=64, dispatch_format=FMT, transport="symmetric",
            device="cuda",
        ) as ep,
        torch.no_grad(),
    ):  # fmt: skip
        layer, known = MoE(ep, intermediate_size=128, experts_backend="triton"), row_launcher().replays._known
        inputs = [torch.randn(tokens, 256, device="cuda").bfloat16() for tokens in (40, 3, 40, 3, 40)]
        with hooked():
            want = [layer(x) for x in inputs]
        before = set(known)
        assert all(map(torch.equal, [layer(x) for x in inputs], want))
        made = [replay for key, replay in known.items() if key not in before]
        assert len(made) == 4, "the choice and the experts, of two sizes"
        assert None not in made, "every launch was prepared"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(inputs[0])
        layer(inputs[2])
        graph.replay()
        assert torch.equal(captured, want[0])
        ep.check()
