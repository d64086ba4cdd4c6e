"""Scale layouts against loops over the contract's formulas, and the registry."""

import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import moelink.formats
from moelink.errors import ArgumentError, ConfigError
from moelink.formats import Format, format_names, get_format, register_format
from moelink.formats.plain import FP32
from moelink.formats.registry import BUILTIN, FormatRegistry
from moelink.formats.scale_layouts import RowMajor, Tiles128x4, Transposed

LAYOUTS = {"row_major": RowMajor(), "transposed": Transposed(), "tiles_128x4": Tiles128x4()}
DTYPES = [torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.uint8]
INTEGERS = {1: torch.uint8, 4: torch.int32}
POISON = {1: 0xAB, 4: 0x2BABABAB}


def offsets(sizes):
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def make_groups(real, padding, capacity):
    """row_offsets, group_sizes, and the kept real rows with their groups, as a dispatch would hand them over."""
    row_offsets = offsets([r + p for r, p in zip(real, padding, strict=True)])
    starts = row_offsets.tolist()
    row_offsets = row_offsets.clamp(max=capacity)
    kept = [(starts[g] + i, g) for g, size in enumerate(real) for i in range(size) if starts[g] + i < capacity]
    rows, groups = torch.tensor(kept, dtype=torch.int64).view(-1, 2).unbind(1)
    return row_offsets, torch.tensor(real, dtype=torch.int32), rows, groups


def random_scales(n, width, dtype):
    return torch.randint(1, 127, (n, width * dtype.itemsize), dtype=torch.uint8).view(dtype)


def as_integers(x):
    return x.view(INTEGERS[x.dtype.itemsize])


def place(name, row_offsets, group, row, column, shape):
    """Flat index of one scale, from the contract's formulas and plain integers."""
    if name == "row_major":
        return row * shape[1] + column
    if name == "transposed":
        return column * shape[1] + row
    base = sum(-(-(row_offsets[g + 1] - row_offsets[g]) // 128) for g in range(group))
    i, columns = row - row_offsets[group], shape[1]
    block = base + i // 128
    return (((block * columns + column // 4) * 32 + i % 32) * 4 + (i % 128) // 32) * 4 + column % 4


@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    real=st.lists(st.sampled_from([0, 1, 3, 97, 127, 128, 129, 130, 255, 256, 300]), max_size=5),
    pad=st.integers(0, 7),
    width=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    cut=st.sampled_from([0, 0, 0, 1, 2, 50, 129, 400]),
    spare=st.integers(0, 140),
)
@example(name="tiles_128x4", real=[], pad=0, width=3, dtype=torch.uint8, cut=0, spare=0)
@example(name="tiles_128x4", real=[128, 0, 129, 1], pad=0, width=4, dtype=torch.uint8, cut=0, spare=0)
@settings(max_examples=200, deadline=None)
def test_every_scale_lies_where_the_formula_says(name, real, pad, width, dtype, cut, spare):
    layout = LAYOUTS[name]
    padding = [-size % (pad + 1) for size in real]
    total = sum(real) + sum(padding)
    capacity = max(total - cut, 0)
    num_rows = capacity + spare
    row_offsets, sizes, rows, groups = make_groups(real, padding, capacity)
    scales = random_scales(len(rows), width, dtype)
    shape = layout.shape(num_rows, width, len(real))
    out = torch.full(shape, POISON[dtype.itemsize], dtype=INTEGERS[dtype.itemsize]).view(dtype)

    where = {"rows": rows, "groups": groups, "row_offsets": row_offsets}
    layout.scatter(out, scales, **where)
    layout.clear_padding(out, row_offsets=row_offsets, group_sizes=sizes)
    back = layout.gather(out, scale_width=width, **where)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))

    want = [POISON[dtype.itemsize]] * out.numel()
    starts, tiles = row_offsets.tolist(), name == "tiles_128x4"
    columns = shape[1] * 4 if tiles else width
    for g, size in enumerate(real):
        held = starts[g + 1] - starts[g]
        for i in range(min(size, held), -(-held // 128) * 128 if tiles else held):
            for c in range(columns):
                want[place(name, starts, g, starts[g] + i, c, shape)] = 0
    for row, g, values in zip(rows.tolist(), groups.tolist(), as_integers(scales).tolist(), strict=True):
        for c in range(columns):
            want[place(name, starts, g, row, c, shape)] = values[c] if c < width else 0
    assert as_integers(out).flatten().tolist() == want


def test_scales_offsets():
    tiles, row_offsets = Tiles128x4(), torch.tensor([0, 100, 300, 400], dtype=torch.int32)
    scales_offsets = tiles.scales_offsets(row_offsets)
    assert scales_offsets.dtype == torch.int32
    assert scales_offsets.tolist() == [0, 1, 1]
    assert tiles.bases(row_offsets).tolist() == [0, 1, 3]
    assert (row_offsets[:-1] // 128 + scales_offsets).tolist() == [0, 1, 3]
    assert tiles.scales_offsets(torch.zeros(1, dtype=torch.int32)).tolist() == []
    assert RowMajor().scales_offsets(row_offsets) is None
    assert Transposed().scales_offsets(row_offsets) is None


@given(st.lists(st.integers(0, 1000), max_size=8))
def test_scales_offsets_are_never_negative_and_blocks_suffice(sizes):
    tiles, row_offsets = Tiles128x4(), offsets(sizes)
    scales_offsets = tiles.scales_offsets(row_offsets).tolist()
    assert min(scales_offsets, default=0) >= 0
    blocks = sum(-(-size // 128) for size in sizes)
    assert blocks <= tiles.shape(sum(sizes), 4, len(sizes))[0]


def test_shapes():
    assert RowMajor().shape(1000, 56, 8) == (1000, 56)
    assert Transposed().shape(1000, 56, 8) == (56, 1000)
    assert Tiles128x4().shape(1000, 224, 8) == (16, 56, 32, 4, 4)
    assert Tiles128x4().shape(0, 5, 0) == (0, 2, 32, 4, 4)


def test_layout_of_each_format():
    layouts = {name: get_format(name).scale_layout for name in BUILTIN}
    names = {name: layout and layout.name for name, layout in layouts.items()}
    assert names == {"bf16": None, "fp32": None, "fp64": None, "fp8_block128": "transposed", "mxfp8": "tiles_128x4",
                     "nvfp4": "tiles_128x4", "mxfp4": "row_major", "fp8_block128_e8m0": "transposed",
                     "fp8_token": "row_major"}  # fmt: skip
    multiples = {name: fmt.row_multiple for name, fmt in BUILTIN.items() if fmt.row_multiple > 1}
    assert multiples == {"fp8_block128": 4, "fp8_block128_e8m0": 4}


def test_row_multiple_example():
    multiple = get_format("fp8_block128").row_multiple
    assert offsets([-(-10 // multiple) * multiple] * 4).tolist() == [0, 12, 24, 36, 48]


# Registry


class Halves(FP32):
    """A user's format."""

    name = "halves_of_test_formats"


def test_unknown_formats_are_refused_with_the_known_names():
    with pytest.raises(ConfigError, match=r"dispatch_format: .*'bf16'.*'mxfp4'.*got 'fp9'") as error:
        get_format("fp9")
    assert error.value.field == "dispatch_format"


def test_registry():
    registry, halves = FormatRegistry(), Halves()
    registry.register(halves)
    assert registry.get("halves_of_test_formats") is halves
    assert registry.names() == (*BUILTIN, "halves_of_test_formats")
    for taken in (Halves(), FP32()):
        with pytest.raises(ArgumentError, match="fmt.name: expected a name not among"):
            registry.register(taken)
    with pytest.raises(ArgumentError, match="fmt: expected an instance of"):
        registry.register(Halves)
    nameless = Halves()
    nameless.name = ""
    with pytest.raises(ArgumentError, match="fmt.name: expected a non-empty string"):
        registry.register(nameless)
    assert "halves_of_test_formats" not in FormatRegistry().names()


def test_registered_formats_are_found_by_name(monkeypatch):
    monkeypatch.setattr(moelink.formats.registry, "REGISTRY", FormatRegistry())
    register_format(Halves())
    assert isinstance(get_format("halves_of_test_formats"), Format)
    assert format_names()[-1] == "halves_of_test_formats"
    assert get_format("fp8_block128") is BUILTIN["fp8_block128"]


def test_the_builtin_table_cannot_be_changed():
    with pytest.raises(TypeError):
        BUILTIN["bf16"] = Halves()
    assert tuple(BUILTIN) == format_names()[: len(BUILTIN)]


def test_import_does_not_load_triton():
    code = "import sys, torch; before = 'triton' in sys.modules; import moelink.formats\n"
    code += "assert before or 'triton' not in sys.modules, 'triton was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
