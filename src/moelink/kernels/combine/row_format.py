"""Store and load rows that travel home in a combine format (``EPConfig.combine_format``).

Without a format a row is rounded to ``combine_dtype``. With one, the expert's rank encodes what it would round: the sum
of a message's rows, in fp32, or without pre-reduction a single row. A row is then HIDDEN_SIZE codes of one byte, and
from byte S.ROW_SCALES on one scale for each S.GROUP_SIZE columns. The home rank decodes to fp32, code times scale,
rounded once, and adds.

**Every** row goes through the format, also the home rank's own. So a result does not depend on where an expert lives,
nor on the transport. Code that takes a row's home rank's own contribution from ``y`` without storing it must encode and
decode it all the same.

Who writes and who waits is as for plain rows with flags: all codes and scales of a part are stored before its flag,
and a block of columns is a whole number of groups, so no two parts share a scale. There are no Lamport slots
(``kernels.sync.lamport_slots``).

Example: fp8_block128, 256 columns of sums: codes in bytes 0 to 255, scales in bytes 256 to 263. A column 3.0 in a group
whose largest magnitude is 448 has scale 1 and code 0x44.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only


@triton.jit
def scales_at(row, S: tl.constexpr):
    """Return the pointer to the scales of the row at ``row``."""
    return tl.multiple_of((row.to(tl.int64) + S.ROW_SCALES).to(S.ROW_SCALE_POINTER), 16)


@triton.jit
def store_columns(to, first, total, valid, S: tl.constexpr):
    """Encode columns [first, first + S.BLOCK_SIZE) of a row, ``total`` in fp32, and store them in the row at ``to``, if
    ``valid``. Columns past the end of the row are zero, and are not stored."""
    groups: tl.constexpr = S.BLOCK_SIZE // S.GROUP_SIZE
    c = first + tl.arange(0, S.BLOCK_SIZE)
    g = first // S.GROUP_SIZE + tl.arange(0, groups)
    codes, scale = S.ENCODE_FN(tl.reshape(total, (groups, S.GROUP_SIZE)), 1.0, S.NATIVE_CASTS)
    tl.store(to + c, tl.reshape(codes, (S.BLOCK_SIZE,)), mask=only(valid, c < S.HIDDEN_SIZE))
    tl.store(scales_at(to, S) + g, scale, mask=only(valid, g < S.HIDDEN_SIZE // S.GROUP_SIZE))


@triton.jit
def load_columns(source, first, there, S: tl.constexpr):
    """Return columns [first, first + S.BLOCK_SIZE) of the row at ``source`` in fp32; zeros past its end, and if it is
    not ``there``."""
    groups: tl.constexpr = S.BLOCK_SIZE // S.GROUP_SIZE
    c = first + tl.arange(0, S.BLOCK_SIZE)
    g = first // S.GROUP_SIZE + tl.arange(0, groups)
    codes = tl.load(source + c, mask=only(there, c < S.HIDDEN_SIZE), other=0, eviction_policy="evict_first")
    inside = only(there, g < S.HIDDEN_SIZE // S.GROUP_SIZE)
    scale = tl.load(scales_at(source, S) + g, mask=inside, other=0, eviction_policy="evict_first")
    columns = S.DECODE_FN(tl.reshape(codes, (groups, S.GROUP_SIZE)), scale, 1.0, S.NATIVE_CASTS)
    return tl.reshape(columns, (S.BLOCK_SIZE,))


@triton.jit
def row_columns(source, first, there, S: tl.constexpr):
    """Return columns [first, first + S.BLOCK_SIZE) of a row that has travelled, in S.SUM_DTYPE, as it is or decoded;
    zeros past its end, and if it is not ``there``."""
    if S.DECODE_FN is not None:
        return load_columns(source, first, there, S)
    else:
        c = first + tl.arange(0, S.BLOCK_SIZE)
        row = tl.load(source + c, mask=only(there, c < S.HIDDEN_SIZE), other=0.0, eviction_policy="evict_first")
        return row.to(S.SUM_DTYPE)
