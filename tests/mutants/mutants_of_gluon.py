# ruff: noqa: E501 - a row is three lines
"""Faults in the warp-specialised products of ``rows/grouped_gluon.py`` and ``rows/grouped_gluon_few.py``
(``mutants_table``).

Three lines a row: fault and file, text and replacement, test.
"""

from __future__ import annotations

from tests.mutants.mutants import Mutant

# fmt: off
MANY = (
    Mutant("a stage is given back before its products are done", "rows/grouped_gluon.py",
           "by = right.index(stage * S.PARTS + 1).permute((1, 0))",
           "by = right.index(stage * S.PARTS + 1).permute((1, 0)); mbarrier.arrive(empty.index(stage), count=1)",
           "rows/test_grouped_gluon.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("one consumer alone empties a stage", "rows/grouped_gluon.py",
           "mbarrier.init(empty.index(stage), count=2)", "mbarrier.init(empty.index(stage), count=1)",
           "rows/test_grouped_gluon.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("the producer waits for the use before the last", "rows/grouped_gluon.py",
           "mbarrier.wait(empty.index(stage), (block // S.STAGES + 1) & 1)", "mbarrier.wait(empty.index(stage), block // S.STAGES & 1)",
           "rows/test_grouped_gluon.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("consumers read a stage that is being loaded", "rows/grouped_gluon.py",
           "mbarrier.expect(bar, _STAGE_BYTES)", "mbarrier.expect(bar, _PART_ROWS * _BLOCK)",
           "rows/test_grouped_gluon.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("a tile in Gluon stores rows of the next group", "rows/grouped_gluon.py",
           "mask = gl.expand_dims(row < end, 1)", "mask = gl.expand_dims(row < end + 1, 1)",
           "rows/test_grouped_gluon.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("the second part of a tile in Gluon takes the scales of the first", "rows/grouped_gluon.py",
           "gl.minimum(column + S.BLOCK_COLUMNS, S.N - 1) // _BLOCK", "column // _BLOCK",
           "rows/test_grouped_gluon.py::test_the_source_keeps_the_bound_under_all_schedules"),
)
FEW = (
    Mutant("the producer waits for the first of the blocks that it loads together", "rows/grouped_gluon_few.py",
           "gl.static_range(S.TOGETHER - 1)", "gl.static_range(0)",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("the producer waits once for any tile", "rows/grouped_gluon_few.py",
           "if k % S.TOGETHER == 0:", "if k == 0:",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("a stage of few rows is given back before its products are done", "rows/grouped_gluon_few.py",
           "products = warpgroup_mma_wait(0, deps=[products])\n            mbarrier.arrive(empty.index(stage), count=1)",
           "mbarrier.arrive(empty.index(stage), count=1)\n            products = warpgroup_mma_wait(0, deps=[products])",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("a stage is given back before its scales are read", "rows/grouped_gluon_few.py",
           "mbarrier.arrive(empty.index(stage), count=1)\n",
           "mbarrier.arrive(empty.index(stage), count=1); factor = row_scales.index(stage).load(along_rows) * _field(by_scales.index(stage).load(fields), 0, fields)\n",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("one consumer of few rows alone empties a stage", "rows/grouped_gluon_few.py",
           "mbarrier.init(empty.index(stage), count=2)", "mbarrier.init(empty.index(stage), count=1)",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("a stage is ready without the arrivals of threads", "rows/grouped_gluon_few.py",
           "mbarrier.init(ready.index(stage), count=33)", "mbarrier.init(ready.index(stage), count=1)",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("threads arrive before their copies of scales have ended", "rows/grouped_gluon_few.py",
           "async_copy.mbarrier_arrive(bar, increment_count=False)", "mbarrier.arrive(bar, count=32)",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("a stage is ready without the rows of its tile", "rows/grouped_gluon_few.py",
           "(_BLOCK + count * S.ROW_BOX) * _BLOCK", "_BLOCK * _BLOCK",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("the last box of a tile's rows is not loaded", "rows/grouped_gluon_few.py",
           "boxes = gl.cdiv(gl.minimum(end - row, S.BLOCK_ROWS), S.ROW_BOX)",
           "boxes = gl.maximum(gl.minimum(end - row, S.BLOCK_ROWS) // S.ROW_BOX, 1)",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("a tile's place is written before its stage is empty", "rows/grouped_gluon_few.py",
           "            if k % S.TOGETHER == 0:",
           "            places.index(stage).store(place)\n            if k % S.TOGETHER == 0:",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("the end is written before its stage is empty", "rows/grouped_gluon_few.py",
           "mbarrier.wait(empty.index(stage), phase)\n    places", "places",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("the place behind the last tile is none", "rows/grouped_gluon_few.py",
           "places.index(stage).store(field * 0)", "places.index(stage).store(field * 0 + 1)",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("a consumer reads a place that may not be written yet", "rows/grouped_gluon_few.py",
           "_store(out, sums, row, end, column, S)\n        mbarrier.wait(ready.index(stage), phase)",
           "_store(out, sums, row, end, column, S)",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("the parity of a stage's use does not change", "rows/grouped_gluon_few.py",
           "gl.where(last, phase ^ 1, phase)", "phase",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("a tile of few rows stores rows of the next group", "rows/grouped_gluon_few.py",
           "mask = gl.expand_dims(row < end, 1)", "mask = gl.expand_dims(row < end + 1, 1)",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("a tile of few rows takes the scales of the first columns", "rows/grouped_gluon_few.py",
           "(group * COLUMN_TILES + column_tile) * KB", "group * COLUMN_TILES * KB",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
    Mutant("few rows are loaded before the launch before this one has ended", "rows/grouped_gluon_few.py",
           "    follow_previous_launch(S)\n", "",
           "rows/test_grouped_gluon_few.py::test_the_source_keeps_the_bound_under_all_schedules"),
)
# fmt: on

OF_GLUON = (*MANY, *FEW)
