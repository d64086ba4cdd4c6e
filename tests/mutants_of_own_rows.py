# ruff: noqa: E501 - a row is three lines
"""Faults in combines whose own rows stay where they are (``mutants_table``).

Three lines a row: fault and file, text and replacement, test.
"""

from __future__ import annotations

from mutants import Mutant

_CALL = "test_own_rows.py::test_a_rank_stores_nothing_in_its_own_block[rank]"
_CHOICE = "test_own_rows.py::test_own_rows_stay_where_it_is_predicted_to_win"
_COPIES = "test_own_rows.py::test_a_rank_neither_reads_nor_clears_its_own_slots"
_EXAMPLE = "test_own_rows.py::test_the_example_of_the_docstring"

# fmt: off
OF_OWN_ROWS = (
    Mutant("own rows are those of the other rank's messages", "kernels/combine/own_rows.py",
           "at = (me * S.MAX_TOKENS", "at = ((1 - me) * S.MAX_TOKENS",
           _CALL),
    Mutant("an own row is not rounded", "kernels/combine/own_rows.py",
           "return round_to(total, S.ROW_DTYPE, S.NATIVE_CASTS)", "return total",
           _EXAMPLE),
    Mutant("of an own row only the first rows are summed", "kernels/combine/own_rows.py",
           "for first in range(0, S.SLOTS_PER_MESSAGE, step):", "for first in range(0, 1, step):",
           "test_own_rows.py::test_rows_of_every_kind_equal_oracle[expert-few]"),
    Mutant("home waits for its own row", "kernels/combine/own_rows.py",
           "return tl.where(tl.arange(0, S.WORLD_SIZE_POW2) == me, -1, slots)", "return slots",
           _CALL),
    Mutant("a token without an own row gets that of message 0", "kernels/combine/own_rows.py",
           "tl.where(slot >= 0, y_rows, 0)", "y_rows",
           "test_own_rows.py::test_a_token_may_have_no_own_row"),
    Mutant("the other rank's row is read where own rows would be", "kernels/combine/reduce.py",
           "place = tl.cast((1 - ctx.me) * S.MAX_TOKENS", "place = tl.cast(ctx.me * S.MAX_TOKENS",
           _CALL),
    Mutant("own rows are sent, those of the other rank are not", "kernels/combine/send.py",
           "(i + S.OWN_ROWS_STAY + numbers.me) % S.WORLD_SIZE", "(i + numbers.me) % S.WORLD_SIZE",
           _CALL),
    Mutant("own rows stay with any number of ranks", "memory/workspace.py",
           "near = self.world_size == 2 and", "near = self.world_size >= 2 and",
           _CHOICE),
    Mutant("own rows stay between nodes", "memory/workspace.py",
           "near = self.world_size == 2 and not self.inter_node_ranks and", "near = self.world_size == 2 and",
           _CHOICE),
    Mutant("own rows stay where sums may come without flags", "kernels/launch/own_rows.py",
           " and not workspace.lamport_tokens\n", "\n",
           _CHOICE),
    Mutant("without flags the own row is left out", "kernels/combine/reduce.py",
           "            if S.OWN_ROWS_STAY:\n                total += own", "            if S.OWN_ROWS_STAY:\n                total += 0 * own",
           _COPIES),
    Mutant("without flags home waits for its own slot", "kernels/sync/lamport_slots.py",
           "return (me + 1 + i) % S.WORLD_SIZE", "return (me + i) % S.WORLD_SIZE",
           _COPIES),
    Mutant("copies of a hundred tokens stay", "memory/workspace.py",
           "cfg.max_tokens_per_rank > MANY_COPIES", "cfg.max_tokens_per_rank >= MANY_COPIES",
           _CHOICE),
    Mutant("rows of experts stay as copies do", "memory/workspace.py",
           'copies = self.two_near_ranks and cfg.layout == "rank" and', "copies = self.two_near_ranks and",
           _CHOICE),
    Mutant("a CTA handles twice as many columns of fp32", "memory/workspace.py",
           "self.two_copies and self.config.combine_dtype.itemsize == 2", "self.two_copies",
           "test_own_rows.py::test_columns_that_a_cta_handles_at_a_time"),
    Mutant("own rows stay in a combine format", "memory/workspace.py",
           "return near and cfg.combine_format is None", "return near",
           _CHOICE),
)
