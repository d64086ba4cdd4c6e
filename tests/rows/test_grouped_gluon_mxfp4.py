"""The product of few rows and weights in mxfp4 in Gluon without a GPU, as in ``test_grouped_gluon``. Its sums are exact
here, so its bits are those of the twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from moelink.nn import Mxfp4Weight, mxfp4
from moelink.nn.block_quantized import multiply_by_group
from moelink.rows import grouped_gluon_mxfp4, grouped_mxfp4
from moelink.rows.grouped_gluon_mxfp4 import AS_COLUMNS, FORMS, LINE
from tests.rows.grouped_fp8_cases import POISON, Problem, biased, exact_problem, problem
from tests.rows.grouped_gluon_cases import Recorder, assert_forms_are_compiled, mxfp4_source

SHAPES = {
    "groups end inside tiles": ((4, 0, 77, 33), 40, 512, 328),
    "one group has all": ((0, 0, 100, 0), 0, 256, 256),
    "no rows": ((0, 0), 40, 256, 256),
    "one block of K, one column block": ((66, 1), 3, 128, 128),
    "more blocks than stages": ((17,), 0, 3328, 136),
    "full tiles": ((64, 128), 0, 512, 256),
}
QUICK = {"full tiles": "the ring is full when a tile ends", "no rows": "a CTA without a tile"}
OTHER_FORM = replace(FORMS[16], parts=2, blocks=2, together=1, row_box=8)
SOURCES = {"other": mxfp4_source(OTHER_FORM), **{str(rows): mxfp4_source(form) for rows, form in FORMS.items()}}


def twin(given: Problem) -> torch.Tensor:
    """The output in fp32."""
    out = torch.full((given.codes.shape[0], given.weight.shape[1]), POISON)
    multiply_by_group(given.codes, given.scales, given.offsets, given.weight, out)
    return out


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.quick(QUICK[name])] if name in QUICK else []) for name in SHAPES
])  # fmt: skip
@pytest.mark.parametrize("form", SOURCES)
def test_the_source_has_the_bits_of_the_twin_under_all_schedules(form: str, name: str) -> None:
    given = exact_problem(*SHAPES[name])
    given = biased(given) if form == "other" else given
    want = twin(given)
    assert all(torch.equal(out, want) for out in SOURCES[form].products(given))


def test_blocks_of_any_size_keep_the_bound() -> None:
    """Rows that do not exist are NaN."""
    SOURCES["16"].assert_schedules_keep_the_bound(problem((20, 0, 3), 40, 384, 264, kind="mxfp4"))


def test_scales_of_zero_and_of_nan() -> None:
    """Code 0 leaves its block out, and code 255 makes its column's sums infinite or NaN."""
    given = exact_problem((5,), 0, 256, 128)
    assert isinstance(given.weight, Mxfp4Weight)
    codes = given.weight.scales.view(torch.uint8).view(2, 128, 4)
    codes[1, 3, 2], codes[0, 64, 1] = 0, 255
    given.codes.view(torch.uint8)[given.codes.float() == 0] = 0x38  # no zero that would make 0 * inf a NaN
    out = SOURCES["16"].product(given)
    assert torch.equal(out.isfinite(), (torch.arange(128) != 64).expand(5, -1))
    without = given.weight.to_blocks()
    without[0][0, 3, 6] = 0
    left_out = replace(given, weight=Mxfp4Weight.from_blocks(*without))
    assert torch.equal(out[:, 3], twin(left_out)[:, 3])
    others = [column for column in range(128) if column != 64]
    assert torch.equal(out[:, others], twin(given)[:, others])


def test_the_example_of_the_module() -> None:
    """The tiles of CTA 0 of 4, and where the bytes of a column are."""
    out = SOURCES["16"].product(problem((5, 0, 20), 0, 256, 512, kind="mxfp4"), language=Recorder(0, 4, 0))
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
    (64, 8, True, 16), (65, 8, True, 32), (508, 8, True, 64), (509, 8, True, "triton"), (64, 6, True, "triton"),
    (64, 8, False, "triton"),
])  # fmt: skip
def test_the_buffer_chooses_the_kernel(
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
    assert found == [(FORMS.get(taken, taken), False), (FORMS.get(taken, taken), taken != "triton")]


def test_the_kernel_compiles_for_sm_90() -> None:
    """Each consumer has two boxes of bytes in registers, for four instructions that take them from there."""
    for each in assert_forms_are_compiled("mxfp4", 3, wgmma=4):
        assert each["from_registers"] == each["wgmma"], f"{each}: expected left operands in registers"
        assert each["ldmatrix"] == 2 * each["consumers"], each
