"""The product of few rows and weights in mxfp4 in Gluon without a GPU, as in ``test_grouped_gluon``. Its sums are exact
here, so its bits are those of the twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from moelink.kernels.launch.row_launch import Block, typed
from moelink.nn import Mxfp4Weight, mxfp4
from moelink.nn.block_quantized import multiply_by_group
from moelink.rows import common_kernel, grouped_gluon_mxfp4, grouped_mxfp4
from moelink.rows.grouped_gluon_mxfp4 import AS_COLUMNS, FORMS, LINE, launch
from tests.rows.grouped_fp8_cases import POISON, Problem, biased, exact_problem, problem
from tests.rows.grouped_gluon_cases import MXFP4, Recorder, assert_forms_are_compiled

SHAPES = {
    "groups end inside tiles": ((4, 0, 77, 33), 40, 640, 328),
    "one group has all": ((0, 0, 100, 0), 0, 256, 256),
    "no rows": ((0, 0), 40, 256, 256),
    "one block of K, one column block": ((66, 1), 3, 128, 128),
    "more blocks than stages": ((17,), 0, 3328, 136),
    "columns of one more line": ((5, 20), 0, 256, 132),
    "full tiles": ((64, 128), 0, 512, 256),
}
QUICK = {"full tiles": "the ring is full when a tile ends", "no rows": "a CTA without a tile"}


def twin(given: Problem) -> torch.Tensor:
    """The output in fp32."""
    out = torch.full((given.codes.shape[0], given.weight.shape[1]), POISON)
    multiply_by_group(given.codes, given.scales, given.offsets, given.weight, out)
    return out


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.quick(QUICK[name])] if name in QUICK else []) for name in SHAPES
])  # fmt: skip
@pytest.mark.parametrize("tile_rows", MXFP4)
def test_the_source_has_the_bits_of_the_twin_under_all_schedules(tile_rows: int, name: str) -> None:
    given = exact_problem(*SHAPES[name])
    given = biased(given) if tile_rows != 32 else given
    want = twin(given)
    assert all(torch.equal(out, want) for out in MXFP4[tile_rows].products(given))


def test_blocks_of_any_size_keep_the_bound() -> None:
    """Rows that do not exist are NaN."""
    MXFP4[16].assert_schedules_keep_the_bound(problem((20, 0, 3), 40, 384, 264, kind="mxfp4"))


def test_scales_of_zero_and_of_nan() -> None:
    """Code 0 leaves its block out, and code 255 makes its column's sums infinite or NaN."""
    given = exact_problem((5,), 0, 256, 128)
    assert isinstance(given.weight, Mxfp4Weight)
    codes = given.weight.scales.view(torch.uint8).view(2, 128, 4)
    codes[1, 3, 2], codes[0, 64, 1] = 0, 255
    given.codes.view(torch.uint8)[given.codes.float() == 0] = 0x38  # no zero that would make 0 * inf a NaN
    out = MXFP4[16].product(given)
    assert torch.equal(out.isfinite(), (torch.arange(128) != 64).expand(5, -1))
    without = given.weight.to_blocks()
    without[0][0, 3, 6] = 0
    left_out = replace(given, weight=Mxfp4Weight.from_blocks(*without))
    assert torch.equal(out[:, 3], twin(left_out)[:, 3])
    others = [column for column in range(128) if column != 64]
    assert torch.equal(out[:, others], twin(given)[:, others])


def test_the_example_of_the_module() -> None:
    """The tiles of CTA 0 of 4, and where the bytes of a column are."""
    language = Recorder(0, 4, 0, numbers=(0, 5, 3))
    out = MXFP4[16].product(problem((5, 0, 20), 0, 256, 512, kind="mxfp4"), language=language)
    written = torch.zeros(25, 512, dtype=torch.bool)
    written[:5, :256] = written[5:21, 256:] = True
    assert torch.equal(out != POISON, written)
    assert place_of(2 * LINE + 16) == (9, 16)


def place_of(at: int) -> tuple[int, int]:
    """Column and byte that are ``at`` bytes behind the first of a part."""
    column = byte = 0
    for power, basis in enumerate(AS_COLUMNS.offset_bases):
        if at >> power & 1:
            column, byte = column ^ basis[0], byte ^ basis[1]
    return column, byte


@pytest.mark.quick("the CPU's model of shared memory has no swizzle")
def test_columns_are_read_where_their_lines_were_stored() -> None:
    """Piece p of line l is stored as piece p ^ (l % 8), by the layout in which the TMA unit writes."""
    for line in range(16):
        for piece in range(8):
            at = line * LINE + (piece ^ line % 8) * 16
            assert [place_of(at + byte) for byte in range(16)] == [
                (4 * line + piece // 2, piece % 2 * 16 + byte) for byte in range(16)
            ]


@pytest.mark.quick("each condition decides alone")
@pytest.mark.parametrize(("rows", "columns", "gluon", "taken"), [
    (60, 8, True, 16), (61, 8, True, 32), (132, 8, True, 32), (133, 8, True, 64), (4096, 8, True, 64),
    (60, 6, True, "triton"), (60, 8, False, "triton"),
])  # fmt: skip
def test_the_mean_rows_of_a_group_choose_the_tiles(
    rows: int, columns: int, gluon: bool, taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(mxfp4, "takes_gluon", lambda codes: gluon)
    monkeypatch.setattr(grouped_gluon_mxfp4, "launch", lambda *given, early: found.append((given[-1], early)))
    monkeypatch.setattr(grouped_mxfp4, "launch", lambda *given: found.append(("triton", False)))
    codes = mock.MagicMock()
    codes.__len__.return_value = rows
    weight = Mxfp4Weight(torch.zeros(4, 2, columns, 32), torch.zeros(1))
    for follows in (False, True):
        weight.launch(codes, *[None] * 3, follows_product=follows)  # type: ignore[arg-type]
    weight.launch(codes, *[None] * 3, likely_rows=1)  # type: ignore[arg-type]
    assert found == [(taken, False), (taken, taken != "triton"), (16 if taken != "triton" else taken, False)]


@pytest.mark.quick("each has other boxes")
@pytest.mark.parametrize("tile_rows", FORMS)
def test_the_launch_gives_the_kernel_what_it_is_compiled_for(tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The boxes of tensor descriptors, which Triton checks, and their layouts."""
    given, made = biased(problem((5, 3), 0, 256, 136, kind="mxfp4")), []
    monkeypatch.setattr(common_kernel, "launch", lambda *launched, **how: made.append((launched, how)))
    out = torch.empty(8, 136, dtype=torch.bfloat16)
    launch(
        given.codes, given.scales, given.offsets, given.weight.codes, given.weight.scales, out, tile_rows, early=True
    )
    [((_, arguments, constants, tiles), how)] = made
    rows, lines, words = (typed(each) for each in arguments if isinstance(each, Block))
    form, columns = FORMS[tile_rows], 64 * FORMS[tile_rows].parts
    assert [each.block_shape for each in (rows, lines, words)] == [[16, 128], [columns // 4, 128], [1, columns]]
    assert [list(each.shape) for each in (rows, lines, words)] == [[8, 256], [2 * 4 * 136 // 4, 128], [2 * 3, 136]]
    assert rows.layout == lines.layout == grouped_gluon_mxfp4.IN_SHARED
    assert words.layout == grouped_gluon_mxfp4.WORDS_IN_SHARED
    assert constants == grouped_gluon_mxfp4.constants_of(torch.Size((2, 136, 256)), tile_rows, biased=True, early=True)
    assert tiles == 3 * -(-136 // columns)
    assert how["maxnreg"] == form.registers
    assert how["counted"], "the kernel takes a counter"


def test_the_kernel_compiles_for_sm_90() -> None:
    """Each consumer has two boxes of bytes in registers, for four instructions that take them from there. Warps may
    keep 8 bytes in local memory where they begin and end, not where they multiply."""
    for each in assert_forms_are_compiled("mxfp4", ((1, 8),) * 3, wgmma=4, waits=1):
        assert each["from_registers"] == each["wgmma"], f"{each}: expected left operands in registers"
        assert each["ldmatrix"] == 2 * each["consumers"], each
