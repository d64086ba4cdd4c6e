"""Dispatch, receiver role: where scales go, and the zeros behind each group's real rows.

Example: ALIGN 4 and group sizes [3, 1]: rows 3, 5, 6, 7 are padding: zero tokens, scales and weights, src_info -1.
"""

import triton
import triton.language as tl


@triton.jit
def scale_places(row, inner, block, c, scale_rows, S: tl.constexpr):
    """Element offsets of the scales of rows (columns of a [n, 1] block) at scale columns c ([1, m])."""
    if S.SCALES == 1:
        return c.to(tl.int64) * scale_rows + row
    elif S.SCALES == 2:
        tile = (block + inner // 128).to(tl.int64) * ((S.SW + 3) // 4) + c // 4
        return (tile * 32 + inner % 32) * 16 + inner % 128 // 32 * 4 + c % 4
    else:
        return row.to(tl.int64) * S.SW + c


@triton.jit
def group_at(g, sizes, starts, aligned, bases, shared, shared_rows, capacity, S: tl.constexpr):
    """Start, real rows, rows and first scale block of routed group ``g`` (-1: the shared one), within capacity."""
    pick = tl.arange(0, S.LP) == g
    size = tl.sum(tl.where(pick, sizes, 0), 0)
    start = tl.sum(tl.where(pick, starts, 0), 0)
    rows = tl.sum(tl.where(pick, aligned, 0), 0)
    block = tl.sum(tl.where(pick, bases, 0), 0)
    if g < 0:
        size += shared
        rows += shared_rows
    rows = tl.minimum(start + rows, capacity) - tl.minimum(start, capacity)
    return start, tl.minimum(size, rows), rows, block


@triton.jit
def pad_rows(
    tokens_out, scales_out, src_info, weights_out, sizes, starts, aligned, shared, shared_rows, bases, num_local,
    program, num_programs, capacity, scale_rows, S: tl.constexpr,
):  # fmt: skip
    """Zero the padding rows of all groups: at most ALIGN - 1 behind each group's real rows."""
    q = tl.arange(0, S.RP)
    for i in range(program, (num_local + S.SHARED) * (S.ALIGN - 1), num_programs):
        g = i // (S.ALIGN - 1) - S.SHARED
        start, size, rows, _ = group_at(g, sizes, starts, aligned, bases, shared, shared_rows, capacity, S)
        inner = size + i % (S.ALIGN - 1)
        if inner < rows:
            row = start + inner + q
            first = q == 0
            to = tokens_out.to(S.WORD_P, bitcast=True) + row.to(tl.int64)[:, None] * S.NWORDS
            for c0 in tl.static_range(0, S.NWORDS, S.BLOCK):
                c = c0 + tl.arange(0, S.BLOCK)
                zero = tl.zeros([S.RP, S.BLOCK], tl.int32).to(S.WORD_P.element_ty)
                tl.store(to + c[None, :], zero, mask=first[:, None] & (c < S.NWORDS)[None, :])
            for j in tl.static_range(3):
                tl.store(src_info + row * 3 + j, q * 0 - 1, mask=first)
            if S.WEIGHTS:
                tl.store(weights_out + row, (q * 0).to(S.WEIGHT_P.element_ty), mask=first)
            if S.SCALES == 0 or S.SCALES == 1:
                c = tl.arange(0, S.SWP)
                place = scale_places(row[:, None], row[:, None], row[:, None], c[None, :], scale_rows, S)
                tl.store(
                    scales_out.to(S.SCALE_P, bitcast=True) + place, tl.zeros([S.RP, S.SWP], tl.int32).to(S.SCALE),
                    mask=first[:, None] & (c < S.SW)[None, :],
                )  # fmt: skip


@triton.jit
def pad_tiles(
    scales_out,
    sizes,
    starts,
    aligned,
    shared,
    shared_rows,
    bases,
    num_local,
    program,
    num_programs,
    capacity,
    S: tl.constexpr,
):
    """Zero the scales behind each group's real rows up to the end of its last 128-row tile.

    Example: ALIGN 24 and 121 real rows: 144 rows in 2 tiles, so 135 rows of scales are zeroed, in two rounds of 128.
    """
    columns = (S.SW + 3) // 4 * 4
    steps = (columns + 15) // 16
    j = tl.arange(0, 128)
    for i in range(program, (num_local + S.SHARED) * steps, num_programs):
        g = i // steps - S.SHARED
        _, size, rows, block = group_at(g, sizes, starts, aligned, bases, shared, shared_rows, capacity, S)
        c = i % steps * 16 + tl.arange(0, 16)
        for j0 in tl.static_range(0, 126 + S.ALIGN, 128):
            inner = size + j0 + j
            place = scale_places(inner[:, None], inner[:, None], block, c[None, :], 0, S)
            tl.store(
                scales_out.to(S.SCALE_P, bitcast=True) + place, tl.zeros([128, 16], tl.int32).to(S.SCALE),
                mask=(inner < tl.cdiv(rows, 128) * 128)[:, None] & (c < columns)[None, :],
            )  # fmt: skip
