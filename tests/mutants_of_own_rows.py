# ruff: noqa: E501 - a row is three lines
"""Faults in combines whose own rows stay where they are (``mutants_table``).

Three lines a row: fault and file, text and replacement, test.
"""

from __future__ import annotations

from mutants import Mutant

_CALL = "test_own_rows.py::test_a_rank_stores_nothing_in_its_own_block[rank]"
_CHOICE = "test_own_rows.py::test_own_rows_stay_where_it_is_predicted_to_win"
_COPIES = "test_own_rows.py::test_a_rank_neither_reads_nor_clears_its_own_slots[fused]"
_STORED = "test_own_rows.py::test_a_rank_neither_reads_nor_clears_its_own_slots[split]"
_EXAMPLE = "test_own_rows.py::test_the_example_of_the_docstring"

# fmt: off
OF_OWN_ROWS = (
    Mutant("own rows are those of the other rank's messages", "kernels/combine/own_rows.py",
           "message = tl.where(goes, me * S.MAX_TOKENS", "message = tl.where(goes, (1 - me) * S.MAX_TOKENS",
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
           "message = tl.where(goes, me * S.MAX_TOKENS + slot, -1)", "message = me * S.MAX_TOKENS + tl.maximum(slot, 0)",
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
           "            if S.OWN_ROWS_APART:\n                total += beside", "            if S.OWN_ROWS_APART:\n                total += 0 * beside",
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
    Mutant("a token gets the own row of the token after it", "kernels/combine/reduce.py",
           "own = next_own\n            slots = tl.where(brought, near, -1)\n            next_own = find_own_rows(notes, far, (i + step) // parts, ctx.me, i + step < noted, S)",
           "slots = tl.where(brought, near, -1)\n            next_own = find_own_rows(notes, far, (i + step) // parts, ctx.me, i + step < noted, S)\n            own = next_own",
           _COPIES),
    Mutant("slots are read one part ahead instead of two", "kernels/combine/reduce.py",
           "far = load_slots(notes, (i + 2 * step) // parts, i + 2 * step < noted, S)", "far = load_slots(notes, (i + step) // parts, i + step < noted, S)",
           _COPIES),
    Mutant("of copies with flags one part is stored", "kernels/combine/reduce.py",
           "for c0 in range(piece.part * S.BLOCK_SIZE, S.HIDDEN_SIZE, piece.parts * S.BLOCK_SIZE):\n            c = c0 + tl.arange(0, S.BLOCK_SIZE)\n            beside",
           "for c0 in range(0, S.BLOCK_SIZE, S.HIDDEN_SIZE):\n            c = c0 + tl.arange(0, S.BLOCK_SIZE)\n            beside",
           "test_own_rows.py::test_scenario_of_copies_with_flags_under_every_schedule[fused_pair-few]"),
    Mutant("slots of two copies have no more room than others", "memory/workspace.py",
           "LAMPORT_BYTES_OF_COPIES if self.two_copies else LAMPORT_BYTES", "LAMPORT_BYTES",
           "test_launch_shapes.py::test_sums_of_two_copies_go_without_flags_where_there_is_more_room[4096-4096-{}]"),
    Mutant("own rows that are stored are sent without flags, too", "kernels/combine/send.py",
           "        small = small & (home != ctx.me)\n", "",
           _STORED),
    Mutant("own rows that are stored have flags", "kernels/combine/send.py",
           "        flagged = flagged & (home != ctx.me)\n", "",
           "test_own_rows.py::test_copies_that_are_stored_raise_no_flags"),
    Mutant("a split call keeps own rows where a caller may overwrite them", "kernels/launch/own_rows.py",
           "return dataclasses.replace(spec, OWN_ROWS_APART=1) if stored else spec", "return dataclasses.replace(spec, OWN_ROWS_APART=1, OWN_ROWS_STAY=1) if stored else spec",
           _STORED),
    Mutant("an own row is looked for at another token's place", "kernels/combine/own_rows.py",
           "return tl.where(goes, me * S.MAX_TOKENS + token, -1)", "return tl.where(goes, me * S.MAX_TOKENS + token // 2, -1)",
           _STORED),
    Mutant("copies are summed in parts however many tokens there are", "kernels/combine/reduce.py",
           "divided | (num_tokens <= _MANY_TOKENS)", "divided | (num_tokens > 0)",
           "test_own_rows.py::test_parts_of_copies[1-495-parts0]"),
    Mutant("own rows stay in a combine format", "memory/workspace.py",
           "return near and cfg.combine_format is None", "return near",
           _CHOICE),
)
