"""Find scales in tiles of 128 rows and 4 scale columns, as block-scaled matmuls read them.

A tile has 512 bytes. The four scales of a row, a word, stand together; behind those of row i come those of row i + 32,
and behind row i + 96 row i + 1. ``formats.scale_layouts`` has the same layout in plain torch.

Example: row 33 of tile 0: its word is word 5, and its scale of column 2 is byte 22. Words 0 to 5 are of rows 0, 32, 64,
96, 1 and 33.
"""

import triton
import triton.language as tl  # noqa: F401 - Triton's interpreter refuses functions of a module that lacks it


@triton.jit
def place_in_tiles(tile, inner, column):
    """Return the offset, in scales, of scale ``column`` (of which 4 make a tile) of row ``inner`` of its group, whose
    tile is ``tile``."""
    return word_in_tiles(tile, inner) * 4 + column % 4


@triton.jit
def word_in_tiles(tile, inner):
    """Return the offset, in words of four scales, of those of row ``inner`` of its group, whose tile is ``tile``."""
    return (tile * 32 + inner % 32) * 4 + inner % 128 // 32


@triton.jit
def row_of_word(word):
    """Return which row of a tile its word ``word``, 0 to 127, is of."""
    return word % 4 * 32 + word // 4
