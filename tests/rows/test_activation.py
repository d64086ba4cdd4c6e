"""The gated activation: its arithmetic, the torch twin against the format, the kernel against the twin bit for bit."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import moelink
from moelink import ArgumentError, ConfigError, UnsupportedError, get_format
from moelink.activation import ActivationOutput, Clamp, exp, gated_silu, silu_and_quantize
from moelink.memory.layout import as_bytes
from tests.support.processes import run_compiled

pytest.importorskip("triton")
from moelink.kernels.launch.device import is_interpreted  # noqa: E402
from moelink.rows import activation_kernel as kernels  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FORMATS = ("bf16", "fp32", "fp8_block128", "mxfp8", "nvfp4", "mxfp4", "fp8_block128_e8m0", "fp8_token")
# Multiples of each format's group that are not powers of two; 80 leaves 3 columns of the last scale tile empty.
HIDDEN = {
    "bf16": 41, "fp32": 24, "fp8_block128": 384, "mxfp8": 96, "nvfp4": 80, "mxfp4": 96, "fp8_block128_e8m0": 640,
    "fp8_token": 48,
}  # fmt: skip
SIZES = (3, 0, 130, 1, 0, 12)
CLAMPS = [None, Clamp(), Clamp(alpha=1.0, limit=math.exp(1))]
POISON = 0xAA


def raw(tensor):
    """Bytes of a tensor."""
    return as_bytes(tensor.cpu())


def offsets(sizes, device=DEVICE):
    return torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32, device=device)


def inputs(rows, hidden, dtype, seed=0, device=DEVICE):
    """[rows, 2 hidden]: ordinary data with zeros, large gates on both sides, infs and a NaN."""
    x = torch.randn(rows, 2 * hidden, generator=torch.Generator().manual_seed(seed)) * 4
    x[:, ::7] *= 20
    x[0] = 0
    special = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 88.0, -88.0, -88.5, -1e4, 1e4])
    x[2, : len(special)] = special
    x[1, hidden : hidden + len(special)] = special
    return x.to(dtype).to(device)


def poisoned(fmt, rows, hidden, groups, device=DEVICE):
    """An output to write into, all bytes POISON."""
    scales = None
    if fmt.scale_layout is not None:
        shape = fmt.scale_layout.shape(rows, fmt.scale_width(hidden), groups)
        count = math.prod(shape) * fmt.scale_dtype.itemsize
        scales = torch.full((count,), POISON, dtype=torch.uint8, device=device).view(fmt.scale_dtype).view(shape)
    tokens = torch.full((rows, fmt.payload_bytes(hidden)), POISON, dtype=torch.uint8, device=device)
    return ActivationOutput(tokens.view(fmt.payload_dtype), scales, None)


def both(name, x, row_offsets, **options):
    """Outputs of twin and kernel, each into a poisoned output."""
    fmt, outs = get_format(name), []
    for implementation in ("torch", "triton"):
        out = poisoned(fmt, x.shape[0], x.shape[1] // 2, len(row_offsets) - 1, x.device)
        outs.append(silu_and_quantize(x, row_offsets, format=name, out=out, implementation=implementation, **options))
    return outs


def assert_same(want, got, *, nan_has_bits=True):
    for field in ("tokens", "scales", "scales_offsets"):
        a, b = getattr(want, field), getattr(got, field)
        assert (a is None) == (b is None), field
        if a is None:
            continue
        if field == "tokens" and not nan_has_bits:
            assert torch.equal(a.isnan(), b.isnan())
            a, b = a.nan_to_num(0.0, math.inf, -math.inf), b.nan_to_num(0.0, math.inf, -math.inf)
        assert torch.equal(raw(a), raw(b)), field


def input_scales(name, groups, device=DEVICE):
    if name != "nvfp4":
        return None
    return torch.linspace(0.25, 3.0, groups, device=device)


class TestArithmetic:
    """The functions in torch, against float64."""

    @staticmethod
    def ulps(value, exact):
        """Distance in units of the last place of ``exact`` rounded to fp32."""
        return (value.double() - exact).abs() / torch.from_numpy(np.spacing(exact.abs().float().numpy()))

    @staticmethod
    def numbers(low, high, count=1 << 18, seed=0):
        return torch.from_numpy(np.random.default_rng(seed).uniform(low, high, count).astype(np.float32))

    def test_exp(self):
        x = torch.cat([self.numbers(-80, 88.3), self.numbers(-1, 1), torch.arange(-80.0, 89)])
        assert self.ulps(exp(x), x.double().exp()).max() <= 1.25
        assert exp(torch.tensor([0.0, -0.0])).tolist() == [1, 1]
        assert exp(torch.tensor([88.5, 1e30, math.inf])).tolist() == [math.inf] * 3
        assert 0 < exp(torch.tensor([-math.inf]))[0] < 2e-35

    @pytest.mark.parametrize("span", [0.1, 2, 20, 88])
    def test_silu_is_within_4_ulp(self, span):
        gate, up = self.numbers(-span, span, seed=1), self.numbers(-5, 5, seed=2)
        z = gated_silu(torch.stack([gate, up], dim=1))[:, 0]
        exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
        normal = exact.abs() > 2e-38
        assert self.ulps(z, exact)[normal].max() <= 4

    @pytest.mark.parametrize("clamp", [Clamp(), Clamp(alpha=0.5, limit=100.0)])
    def test_clamped_is_within_4_ulp_and_what_alpha_costs(self, clamp):
        gate, up = self.numbers(-40, 40, seed=3), self.numbers(-12, 12, seed=4)
        z = gated_silu(torch.stack([gate, up], dim=1), clamp)[:, 0]
        g = gate.double().clamp(max=clamp.limit)
        power = float(np.float32(clamp.alpha)) * g
        exact = (up.double().clamp(-clamp.limit, clamp.limit) + 1) * g / (1 + (-power).exp())
        normal = (exact.abs() > 2e-38) & (power > -88)
        assert (self.ulps(z, exact) - power.abs())[normal].max() <= 4

    def test_far_gates(self):
        z = gated_silu(torch.tensor([[-89.0, 1.0], [-1e30, 1.0], [1e30, 2.0], [math.inf, 1.0]]))
        assert z.flatten().tolist() == [0, 0, torch.tensor(2e30).item(), math.inf]
        assert gated_silu(torch.tensor([[-math.inf, 1.0], [math.nan, 1.0], [1.0, math.nan]])).isnan().all()
        assert gated_silu(torch.tensor([[math.nan, 1.0], [1.0, math.nan]]), Clamp()).isnan().all()
        assert gated_silu(torch.tensor([[math.inf, math.inf]]), Clamp(alpha=32.0, limit=7.0))[0, 0] == 56

    def test_clamp_is_checked(self):
        for bad in (0.0, -1.0, math.inf, math.nan, 1e-40, True, "7"):
            with pytest.raises(ArgumentError, match="clamp.limit: expected a positive number"):
                Clamp(limit=bad)


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("name", FORMATS)
def test_twin_is_the_format_of_z(name):
    """Payload and scales of every group are those that the format gives for z, scattered by its layout."""
    fmt, hidden = get_format(name), HIDDEN[name]
    row_offsets, factors = offsets(SIZES, "cpu"), input_scales(name, len(SIZES), "cpu")
    x = inputs(150, hidden, torch.bfloat16, device="cpu")
    got = silu_and_quantize(x, row_offsets, format=name, input_scales=factors, implementation="torch")
    z = silu_and_quantize(x, row_offsets, format="fp32", implementation="torch").tokens
    ends = row_offsets.tolist()
    assert torch.equal(raw(z[: ends[-1]]), raw(gated_silu(x[: ends[-1]])))
    for group, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        want = fmt.quantize(z[start:end], None if factors is None else factors[group])
        assert torch.equal(raw(got.tokens[start:end]), raw(want.payload))
        if fmt.scale_layout is not None:
            rows = torch.arange(start, end)
            scales = fmt.scale_layout.gather(
                got.scales, rows=rows, groups=torch.full_like(rows, group), row_offsets=row_offsets,
                scale_width=fmt.scale_width(hidden),
            )  # fmt: skip
            assert torch.equal(raw(scales), raw(want.scales))
    if fmt.scale_layout is not None and fmt.scale_layout.scales_offsets(row_offsets) is not None:
        assert torch.equal(got.scales_offsets, fmt.scale_layout.scales_offsets(row_offsets))


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("clamp", CLAMPS, ids=["silu", "oai", "e"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_equals_the_twin(name, dtype, clamp):
    row_offsets = offsets(SIZES)
    want, got = both(
        name, inputs(150, HIDDEN[name], dtype), row_offsets, input_scales=input_scales(name, len(SIZES)), clamp=clamp
    )
    assert_same(want, got, nan_has_bits=name != "fp32")
    assert (raw(got.tokens[int(row_offsets[-1]) :]) == POISON).all(), "rows past the last offset are not touched"


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 0), (1,), (128, 256), (127, 129, 0), (5,) * 33])
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4"])
def test_group_shapes(name, sizes):
    row_offsets, rows = offsets(sizes), sum(sizes) + 3
    want, got = both(name, inputs(rows, 64, torch.bfloat16), row_offsets, input_scales=input_scales(name, len(sizes)))
    assert_same(want, got)
    assert (raw(got.tokens[sum(sizes) :]) == POISON).all()


def test_no_rows_at_all():
    for implementation in ("torch", "triton"):
        x = torch.empty(0, 128, device=DEVICE)
        out = silu_and_quantize(x, offsets((0, 0)), format="nvfp4", implementation=implementation)
        assert out.tokens.shape == (0, 32)
        assert out.scales_offsets.tolist() == [0, 0]


@pytest.mark.parametrize("block,programs", [(32, 1), (64, 7), (256, 3), (1 << 14, 64)])
@pytest.mark.parametrize("name", ["fp32", "mxfp8", "nvfp4"])
def test_any_number_of_programs(name, block, programs):
    fmt, row_offsets = get_format(name), offsets((9, 0, 4))
    x, factors = inputs(15, 96, torch.bfloat16), input_scales(name, 3)
    want = poisoned(fmt, 15, 96, 3)
    want = silu_and_quantize(x, row_offsets, format=name, input_scales=factors, out=want, implementation="torch")
    got = poisoned(fmt, 15, 96, 3)
    kernels.launch(
        x,
        row_offsets,
        got.tokens,
        got.scales,
        want.scales_offsets,
        factors,
        fmt,
        None,
        block=block,
        num_programs=programs,
    )
    assert_same(want, ActivationOutput(got.tokens, got.scales, want.scales_offsets), nan_has_bits=name != "fp32")


def test_few_rows_have_short_steps(monkeypatch):
    """264 steps of 2048 elements, two for each SM, have no more elements than 704 rows of 768 columns."""
    monkeypatch.setattr(kernels.common, "sms_of", lambda device: 132)
    assert kernels.rows_of_short_steps(torch.device("cuda", 0), 768) == 704
    assert kernels.rows_of_short_steps(torch.device("cpu"), 768) == 0
    taken, device = [], torch.device("cuda", 0)
    monkeypatch.setattr(kernels.common, "launch", lambda kernel, given, S, steps, **options: taken.append((S, steps)))
    monkeypatch.setattr(kernels, "has_native_casts", lambda device: True)
    fmt, row_offsets = get_format("fp8_block128"), torch.zeros(3, dtype=torch.int32)
    for rows, likely in ((704, None), (705, None), (1409, 704)):
        x = SimpleNamespace(shape=(rows, 1536), device=device, is_cuda=True)
        codes, scales = torch.empty(rows, 768, dtype=torch.float8_e4m3fn), torch.empty(6, rows)
        kernels.launch(x, row_offsets, codes, scales, None, None, fmt, None, likely_rows=likely)
    assert [(S.GROUPS_PER_STEP, steps) for S, steps in taken] == [(4, 1056), (16, 265), (4, 2114)]


def test_a_group_longer_than_its_row_is_a_step_too(monkeypatch):
    """Rows of fp8_token are rounded up to a power of two; the launch counts them all, not none."""
    fmt, steps = get_format("fp8_token"), []
    monkeypatch.setattr(kernels.common, "launch", lambda kernel, given, S, number, **_: steps.append(number))
    out = poisoned(fmt, 15, 48, 3)
    x = inputs(15, 48, torch.bfloat16)
    kernels.launch(x, offsets((9, 0, 4)), out.tokens, out.scales, None, None, fmt, None, block=64)
    assert steps == [15]


def test_the_worked_example_of_the_kernel():
    x = torch.tensor(
        [[32, 0, 64, 32, 1, 5, 2, -1], [0, 64, 32, 32, 3, 1, 1, 7], [64, 64, 0, 32, 2, -2, 9, 3], [1] * 8],
        dtype=torch.float32, device=DEVICE,
    )  # fmt: skip
    row_offsets = torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE)
    want = [[32, 0, 128, -32], [0, 64, 32, 224], [128, -128, 0, 96]]
    for programs in (2, 1, 5):
        tokens = torch.full((4, 4), 7.0, device=DEVICE)
        kernels.launch(
            x, row_offsets, tokens, None, None, None, get_format("fp32"), None, block=4, num_programs=programs
        )
        assert tokens.tolist() == [*want, [7.0] * 4]


def test_offsets_beyond_the_rows_stay_inside():
    """row_offsets of another call cannot make the kernel write outside its tensors."""
    x = inputs(10, 64, torch.bfloat16)
    for implementation in ("torch", "triton"):
        out = silu_and_quantize(x, offsets((6, 30)), format="mxfp4", implementation=implementation)
        want = silu_and_quantize(x, offsets((6, 4)), format="mxfp4", implementation="torch")
        assert torch.equal(raw(out.tokens), raw(want.tokens))
        assert torch.equal(raw(out.scales), raw(want.scales))


@pytest.mark.parametrize("name", ["fp8_block128", "nvfp4"])
def test_between_dispatch_and_combine(name):
    """On dispatch's own offsets: padding rows inside groups give zero codes, and the layout is dispatch's."""
    fmt, hidden = get_format(name), 128
    with moelink.init(
        num_experts=5, topk=2, hidden_size=hidden, max_tokens_per_rank=9, dispatch_format=name, expert_alignment=8
    ) as ep:
        x, ids = torch.randn(9, hidden), torch.randint(5, (9, 2), generator=torch.Generator().manual_seed(1))
        recv = ep.dispatch(x.bfloat16(), ids)
    real = recv.src_info[:, 1] >= 0
    real[int(recv.row_offsets[-1]) :] = False
    rows = torch.where(real[:, None], torch.randn(len(real), 2 * hidden), 0.0).to(DEVICE)
    out = silu_and_quantize(
        rows, recv.row_offsets.to(DEVICE), format=name,
        scales_offsets=None if recv.scales_offsets is None else recv.scales_offsets.to(DEVICE), implementation="triton",
    )  # fmt: skip
    assert out.scales.shape == recv.scales.shape
    assert out.tokens.shape == recv.tokens.shape
    padding = ~real
    padding[int(recv.row_offsets[-1]) :] = False
    assert padding.any()
    assert not raw(out.tokens)[padding].any()
    assert fmt.payload_dtype == out.tokens.dtype


class TestRefusals:
    x, row_offsets = torch.zeros(4, 256), torch.tensor([0, 2, 4], dtype=torch.int32)

    @pytest.mark.parametrize("change,message", [
        ({"format": "fp64"}, "format: expected a format of at most 32 bits"),
        ({"x": torch.zeros(4, 256, dtype=torch.float64)}, "x: expected dtype"),
        ({"x": torch.zeros(4, 255)}, "x: expected an even number of columns"),
        ({"x": torch.zeros(256)}, "x: expected shape"),
        ({"x": torch.zeros(256, 4).t()}, "x: expected a contiguous tensor"),
        ({"row_offsets": torch.tensor([0, 2, 4])}, "row_offsets: expected dtype torch.int32"),
        ({"row_offsets": torch.zeros(0, dtype=torch.int32)}, "row_offsets: expected num_groups"),
        ({"input_scales": torch.ones(2)}, "input_scales: expected None"),
        ({"format": "nvfp4", "input_scales": torch.ones(3)}, r"input_scales: expected shape \[2\]"),
        ({"scales_offsets": torch.zeros(2, dtype=torch.int32)}, "scales_offsets: expected None"),
        ({"format": "mxfp8", "scales_offsets": torch.zeros(3, dtype=torch.int32)}, "scales_offsets: expected shape"),
        ({"clamp": 7.0}, "clamp: expected a Clamp or None"),
        ({"implementation": "cuda"}, "implementation: expected one of auto, torch, triton"),
        ({"out": 1}, "out: expected an ActivationOutput"),
        ({"out": ActivationOutput(torch.zeros(4, 64), None, None)}, r"out.tokens: expected shape \[4, 128\]"),
    ])  # fmt: skip
    def test_arguments(self, change, message):
        arguments = {"x": self.x, "row_offsets": self.row_offsets, "format": "fp8_block128"} | change
        with pytest.raises(ArgumentError, match=message):
            silu_and_quantize(arguments.pop("x"), arguments.pop("row_offsets"), **arguments)

    def test_hidden_size(self):
        with pytest.raises(ConfigError, match="hidden_size: expected a multiple of 128"):
            silu_and_quantize(torch.zeros(4, 192), self.row_offsets, format="fp8_block128")

    def test_compiled_kernel_on_a_cpu(self, monkeypatch):
        monkeypatch.setattr("moelink.kernels.launch.device.is_interpreted", lambda: False)
        with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
            silu_and_quantize(self.x, self.row_offsets, format="bf16", implementation="triton")

    def test_auto_on_a_cpu_is_torch(self, monkeypatch):
        monkeypatch.setattr(kernels, "launch", None)
        silu_and_quantize(self.x, self.row_offsets, format="bf16")


@pytest.mark.full("compiles for seconds; kernels/test_kernels_aot.py lowers this kernel")
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_compiles_without_a_gpu(target):
    result = run_compiled("tests.rows.activation_kernels", target)
    assert result.returncode == 0, result.stderr[-3000:]


def on_the_cpu(output):
    parts = (output.tokens, output.scales, output.scales_offsets)
    return ActivationOutput(*(None if part is None else part.cpu() for part in parts))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnGpu:
    """The compiled kernel at a real size against the twin on CUDA and on a CPU."""

    SIZES = (700, 0, 1, 1299, 128, 640, 777, 1500)
    HIDDEN = 2048

    @pytest.mark.parametrize("native", [None, False])
    @pytest.mark.parametrize("clamp", [None, Clamp()], ids=["silu", "oai"])
    @pytest.mark.parametrize("name", FORMATS)
    def test_equals_both_twins(self, name, clamp, native):
        fmt, row_offsets = get_format(name), offsets(self.SIZES)
        x, factors = inputs(5050, self.HIDDEN, torch.bfloat16), input_scales(name, len(self.SIZES))
        options = {"format": name, "clamp": clamp, "implementation": "torch"}
        on_gpu = poisoned(fmt, 5050, self.HIDDEN, len(self.SIZES))
        on_gpu = silu_and_quantize(x, row_offsets, input_scales=factors, out=on_gpu, **options)
        on_cpu = poisoned(fmt, 5050, self.HIDDEN, len(self.SIZES), "cpu")
        on_cpu = silu_and_quantize(
            x.cpu(), row_offsets.cpu(), input_scales=None if factors is None else factors.cpu(), out=on_cpu, **options
        )
        got = poisoned(fmt, 5050, self.HIDDEN, len(self.SIZES))
        pair = None if clamp is None else (clamp.alpha, clamp.limit)
        kernels.launch(x, row_offsets, got.tokens, got.scales, on_gpu.scales_offsets, factors, fmt, pair, native=native)
        got = ActivationOutput(got.tokens, got.scales, on_gpu.scales_offsets)
        assert_same(on_gpu, got, nan_has_bits=name != "fp32")
        assert_same(on_cpu, on_the_cpu(got), nan_has_bits=name != "fp32")

    @pytest.mark.parametrize("name", FORMATS)
    def test_graph_replay_follows_the_offsets(self, name):
        """One captured launch serves any number of rows: nothing of it was read on the host."""
        row_offsets, x = offsets((100, 28, 300)), inputs(500, 256, torch.bfloat16)
        out = poisoned(get_format(name), 500, 256, 3)  # not of the graph's pool, where temporaries would share memory
        silu_and_quantize(x, row_offsets, format=name, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = silu_and_quantize(x, row_offsets, format=name, out=out)
        for sizes in ((7, 0, 200), (0, 0, 0), (128, 128, 244)):
            row_offsets.copy_(offsets(sizes))
            for tensor in (got.tokens, got.scales):
                if tensor is not None:
                    tensor.view(torch.uint8).fill_(POISON)
            graph.replay()
            want = poisoned(get_format(name), 500, 256, 3)
            want = silu_and_quantize(x, row_offsets, format=name, out=want, implementation="torch")
            assert_same(want, got, nan_has_bits=name != "fp32")


def test_the_interpreter_is_used_without_a_gpu():
    assert is_interpreted() == (not CUDA)
