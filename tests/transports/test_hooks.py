"""Hooks: the ready epilogues in combine, their Triton functions against the twins, and what docs/pytorch.md shows."""

import importlib.util
import re

import pytest
import torch

import moelink
from moelink import ArgumentError, Hook, UnsupportedError, epilogues, get_format
from moelink.hooks import evaluate_weights
from moelink.testing import rank_data

pytest.importorskip("triton")
from tests.kernels.epilogue_kernels import run  # noqa: E402
from tests.support.paths import ROOT
from tests.support.processes import run_compiled

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FORMATS = ("fp8_block128", "mxfp8", "mxfp4", "nvfp4")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
needs_interpreter = pytest.mark.skipif(CUDA, reason="kernels on CPU tensors need the interpreter")


def raw(tensor):
    """Bytes of a tensor."""
    return tensor.cpu().contiguous().view(torch.uint8)


def ties(rows, hidden, dtype=torch.float32, seed=0):
    """Sums that meet the ties of narrow dtypes, and infs and a NaN."""
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)) * 3
    x[:, ::3] = x[:, ::3].bfloat16().float() * (1 + 2.0**-8)
    x[-1, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    return x.to(dtype)


def quantized_outputs(name, rows, hidden, device="cpu"):
    """Zeroed payload and scales of a format, row-major."""
    fmt = get_format(name)
    payload = torch.zeros(rows, fmt.payload_bytes(hidden), dtype=torch.uint8, device=device)
    scales = torch.zeros(rows, fmt.scale_bytes(hidden), dtype=torch.uint8, device=device)
    return payload.view(fmt.payload_dtype), scales.view(fmt.scale_dtype)


def check_twins(make, sums, block=None):
    """``make()``'s hook leaves the same bytes whether torch or Triton runs it."""
    first, second = make(), make()
    n, hidden = sums.shape
    token, columns = torch.arange(n, device=sums.device)[:, None], torch.arange(hidden, device=sums.device)[None, :]
    first.torch_fn(first.tensors, token, columns, sums, torch.ones_like(sums, dtype=torch.bool))
    run(sums, second, block)
    for i, (want, got) in enumerate(zip(first.tensors, second.tensors, strict=True)):
        assert torch.equal(raw(want), raw(got)), f"tensor {i}"
    return first


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden,block", [(37, None), (384, 128), (1001, None)])
@pytest.mark.parametrize("accumulate", [torch.float32, torch.float64])
def test_sums_with_terms(dtype, hidden, block, accumulate):
    sums = ties(4, hidden, accumulate).to(DEVICE)
    vector = torch.randn(hidden, device=DEVICE)
    rows = torch.randn(5, hidden, device=DEVICE)
    out = torch.zeros(5, hidden, dtype=dtype, device=DEVICE)
    check_twins(lambda: epilogues.cast(out.clone()), sums, block)
    check_twins(lambda: epilogues.bias(vector.to(dtype), out.clone()), sums, block)
    check_twins(lambda: epilogues.residual(rows.bfloat16(), out.clone()), sums, block)
    streams = iter([rows.to(dtype), rows.to(dtype)])

    def in_place():
        stream = next(streams).clone()
        return epilogues.residual(stream, out=stream)

    check_twins(in_place, sums, block)


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("name,hidden,block", [
    ("fp8_block128", 384, None), ("fp8_block128", 384, 128), ("mxfp8", 96, None), ("mxfp8", 2144, None),
    ("mxfp4", 96, 32), ("nvfp4", 48, None), ("nvfp4", 2080, None),
])  # fmt: skip
@pytest.mark.parametrize("accumulate", [torch.float32, torch.float64])
def test_block_quantize(name, hidden, block, accumulate):
    sums = ties(4, hidden, accumulate, seed=1).to(DEVICE)
    sums[1] = 0
    scale = torch.tensor([2.3], device=DEVICE) if name == "nvfp4" else None
    hook = check_twins(
        lambda: epilogues.block_quantize(name, *quantized_outputs(name, 5, hidden, DEVICE), input_scale=scale),
        sums,
        block,
    )
    want = get_format(name).quantize(sums.float(), scale)
    assert torch.equal(raw(hook.tensors[0][:4]), raw(want.payload))
    assert torch.equal(raw(hook.tensors[1][:4]), raw(want.scales))
    assert not raw(hook.tensors[0][4:]).any(), "rows past the tokens are not touched"


def test_the_worked_example_of_the_kernels():
    sums = torch.zeros(3, 4, device=DEVICE)
    sums[2] = torch.tensor([10.0, 20.0, 30.0, 40.0])
    out = torch.zeros(3, 4, device=DEVICE)
    run(sums, epilogues.bias(torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE), out))
    assert out.flatten()[8:12].tolist() == [11, 22, 33, 44]
    payload, scales = quantized_outputs("mxfp4", 3, 32, DEVICE)
    rows = torch.zeros(3, 32, device=DEVICE)
    rows[2] = 1.0
    run(rows, epilogues.block_quantize("mxfp4", payload, scales))
    assert raw(payload).flatten()[:32].tolist() == [0] * 32
    assert raw(payload).flatten()[32:].tolist() == [0x66] * 16, "1 is 4 (code 6) times 2**-2"
    assert raw(scales).flatten().tolist() == [0, 0, 125]


@pytest.mark.parametrize("transport", ["collective", pytest.param("symmetric", marks=needs_interpreter)])
class TestCombine:
    """Combine with each epilogue, on three ranks in one process."""

    RANKS, HIDDEN = 3, 256

    def rounds(self, transport, make_hooks, *, fields=None):
        """Sums in fp32 and what combine gives with ``make_hooks(rank, num_tokens)``."""
        options = dict(num_experts=5, topk=3, hidden_size=self.HIDDEN, max_tokens_per_rank=6, dispatch_format="fp32",
                       transport=transport, **(fields or {}))  # fmt: skip
        data = [
            rank_data(seed=7, rank=rank, num_tokens=4 + rank, hidden_size=self.HIDDEN, num_experts=5, topk=3,
                      dtype=torch.float32)
            for rank in range(self.RANKS)
        ]  # fmt: skip
        with moelink.init_devices(["cpu"] * self.RANKS, **options) as ep:
            recvs = ep.dispatch([d.x for d in data], [d.topk_ids for d in data], [d.topk_weights for d in data])
            ys = [recv.tokens.bfloat16() for recv in recvs]
            casts = [epilogues.cast(torch.empty(len(d.x), self.HIDDEN)) for d in data]
            sums = ep.combine(ys, recvs, epilogue=casts)
            hooks = [make_hooks(rank, len(d.x)) for rank, d in enumerate(data)]
            return sums, ep.combine(ys, recvs, epilogue=hooks), hooks

    @pytest.mark.parametrize("fields", [{}, {"pre_reduce": False}], ids=["sums", "rows"])
    def test_bias_and_residual(self, transport, fields):
        vector = torch.randn(self.HIDDEN)
        sums, outs, _ = self.rounds(
            transport, lambda rank, n: epilogues.bias(vector, torch.empty(n, self.HIDDEN)), fields=fields
        )
        for total, out in zip(sums, outs, strict=True):
            assert torch.equal(out, total + vector)
        rows = torch.randn(6, self.HIDDEN)
        sums, outs, hooks = self.rounds(
            transport,
            lambda rank, n: epilogues.residual(rows, torch.empty(n, self.HIDDEN, dtype=torch.float16)),
            fields=fields,
        )
        for total, out, hook in zip(sums, outs, hooks, strict=True):
            assert out is hook.tensors[0]
            assert torch.equal(out, (total + rows[: len(total)]).half())

    @pytest.mark.parametrize("name", FORMATS)
    def test_block_quantize(self, transport, name):
        scale = torch.tensor([0.7]) if name == "nvfp4" else None
        sums, outs, hooks = self.rounds(
            transport,
            lambda rank, n: epilogues.block_quantize(name, *quantized_outputs(name, n, self.HIDDEN), input_scale=scale),
        )
        for total, out, hook in zip(sums, outs, hooks, strict=True):
            want = get_format(name).quantize(total, scale)
            assert torch.equal(raw(out), raw(want.payload))
            assert torch.equal(raw(hook.tensors[1]), raw(want.scales))

    def test_cast_is_combines_own_rounding(self, transport):
        """fp32 sums cast to bf16 are what combine returns without an epilogue."""
        data = rank_data(seed=3, rank=0, num_tokens=5, hidden_size=64, num_experts=4, topk=2)
        with moelink.init(num_experts=4, topk=2, hidden_size=64, max_tokens_per_rank=5, transport=transport) as ep:
            recv = ep.dispatch(data.x, data.topk_ids, data.topk_weights)
            out = torch.empty(5, 64, dtype=torch.bfloat16)
            assert ep.combine(recv.tokens, recv, epilogue=epilogues.cast(out)) is out
            assert torch.equal(out, ep.combine(recv.tokens, recv))


def test_router_weights_and_input_scale_take_a_hook():
    data = rank_data(seed=3, rank=0, num_tokens=5, hidden_size=64, num_experts=4, topk=2)
    table = torch.tensor([[1.0, 0.5]])
    weights = Hook(None, lambda tensors, token, slot: tensors[0][0, slot] * (token + 1), (table,))
    scale = Hook(None, lambda tensors: tensors[0].amax() / 2, (torch.tensor([3.0, 1.0]),))
    options = dict(num_experts=4, topk=2, hidden_size=64, max_tokens_per_rank=5, dispatch_format="nvfp4")
    with moelink.init(**options) as ep:
        recv = ep.dispatch(data.x, data.topk_ids, weights, input_scale=scale)
        plain = ep.dispatch(
            data.x, data.topk_ids, table * torch.arange(1.0, 6)[:, None], input_scale=torch.tensor([1.5])
        )
    assert torch.equal(recv.weights, plain.weights)
    assert torch.equal(recv.tokens, plain.tokens)


@pytest.mark.parametrize("transport", ("collective", "symmetric"))
def test_a_triton_function_that_would_not_run_is_refused(transport):
    data = rank_data(seed=3, rank=0, num_tokens=5, hidden_size=64, num_experts=4, topk=2)
    weights = Hook(epilogues.cast, lambda tensors, token, slot: token + slot + 1.0)
    scale = Hook(epilogues.cast, lambda tensors: torch.ones(1))
    options = dict(num_experts=4, topk=2, hidden_size=64, max_tokens_per_rank=5, transport=transport)
    with moelink.init(**options, dispatch_format="nvfp4") as ep:
        with pytest.raises(ArgumentError, match="topk_weights: expected a hook with triton_fn=None.*=cast"):
            ep.dispatch(data.x, data.topk_ids, weights)
        with pytest.raises(ArgumentError, match="input_scale: expected a hook with triton_fn=None"):
            ep.dispatch(data.x, data.topk_ids, input_scale=scale)
        recv = ep.dispatch(data.x, data.topk_ids)
        assert int(recv.num_recv_tokens) == 10


def test_weights_have_the_dtype_that_is_asked_for():
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
    hook = Hook(None, lambda tensors, token, slot: tensors[0][token, slot], (weights,))
    for given in (weights, hook):
        for dtype in (torch.float32, torch.float64):
            got = evaluate_weights(given, num_tokens=2, topk=2, device=torch.device("cpu"), dtype=dtype)
            assert got.dtype == dtype
            assert torch.equal(got, weights.to(dtype))


class TestRefusals:
    def test_outputs(self):
        with pytest.raises(ArgumentError, match="out: expected a tensor, got NoneType"):
            epilogues.cast(None)
        with pytest.raises(ArgumentError, match=r"out: expected shape \[any, any\]"):
            epilogues.cast(torch.empty(3))
        with pytest.raises(ArgumentError, match="out: expected a contiguous tensor"):
            epilogues.cast(torch.empty(4, 3).t())
        with pytest.raises(ArgumentError, match="out: expected dtype"):
            epilogues.cast(torch.empty(4, 3, dtype=torch.int32))

    def test_terms(self):
        with pytest.raises(ArgumentError, match=r"vector: expected shape \[3\], got \[4\]"):
            epilogues.bias(torch.zeros(4), torch.empty(2, 3))
        with pytest.raises(ArgumentError, match=r"tensor: expected shape \[any, 3\]"):
            epilogues.residual(torch.zeros(2, 4), torch.empty(2, 3))

    def test_quantised(self):
        payload, scales = quantized_outputs("mxfp8", 3, 64)
        for name in ("fp8_token", "fp8_block128_e8m0"):
            with pytest.raises(UnsupportedError, match=f"format_name: .* got '{name}'; call get_format"):
                epilogues.block_quantize(name, torch.zeros(3, 512).to(torch.float8_e4m3fn), torch.zeros(3, 1))
        with pytest.raises(ArgumentError, match="format_name: expected a format with scales"):
            epilogues.block_quantize("bf16", payload, scales)
        with pytest.raises(ArgumentError, match=r"payload_out: expected shape \[3, 64\], got \[3, 32\]"):
            epilogues.block_quantize("mxfp8", payload[:, :32].contiguous(), scales)
        with pytest.raises(ArgumentError, match="scales_out: expected dtype torch.float8_e8m0fnu"):
            epilogues.block_quantize("mxfp8", payload, scales.view(torch.uint8))
        with pytest.raises(ArgumentError, match="input_scale: expected None"):
            epilogues.block_quantize("mxfp8", payload, scales, input_scale=torch.ones(1))
        with pytest.raises(moelink.ConfigError, match="expected one of"):
            epilogues.block_quantize("fp7", payload, scales)


DOCUMENT = ROOT / "docs" / "pytorch.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)


def load_block(code, path):
    """Run a block of the documentation as a module: Triton needs the source of its functions in a file."""
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documented_kernel_equals_its_twin(tmp_path):
    module = load_block(next(code for code in BLOCKS if "@triton.jit" in code), tmp_path / "layer_scale.py")
    stream, gamma = torch.randn(5, 256, device=DEVICE), torch.rand(256, device=DEVICE)
    check_twins(lambda: module.layer_scale(stream, gamma), torch.randn(5, 256, device=DEVICE), 128)


@pytest.mark.full("compiles for seconds; kernels/test_kernels_aot.py lowers combines with an epilogue")
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_compiles_without_a_gpu(target):
    result = run_compiled("tests.kernels.epilogue_kernels", target)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnGpu:
    """Many rows of a real width: the compiled functions against the twins on the same device."""

    def test_terms(self):
        sums, out = ties(1003, 7168).cuda(), torch.zeros(1003, 7168, dtype=torch.bfloat16, device="cuda")
        vector = torch.randn(7168, device="cuda")
        check_twins(lambda: epilogues.bias(vector, out.clone()), sums)
        check_twins(lambda: epilogues.residual(sums.bfloat16(), out.clone()), sums)

    @pytest.mark.parametrize("name", FORMATS)
    def test_block_quantize(self, name):
        sums = ties(1003, 7168).cuda()
        check_twins(lambda: epilogues.block_quantize(name, *quantized_outputs(name, 1003, 7168, "cuda")), sums)
