# ruff: noqa: E501 - a row is three lines
"""Faults in counting messages alone, in layout "rank" on one node (``mutants_table``).

Three lines a row: fault and file, text and replacement, test.
"""

from __future__ import annotations

from tests.mutants.mutants import Mutant

_WORDS = "kernels/test_kernels_counting.py::test_messages_alone_are_a_word_for_each_rank[{}]"
_SUMS = "kernels/test_kernels_counting.py::test_a_cta_sums_the_messages_of_those_before_it[{}]"
_OTHER = "kernels/test_kernels_counting.py::test_messages_of_another_call_are_waited_for[{}]"
_HEADERS = "kernels/test_kernels_counting.py::test_headers_are_waited_for_without_the_words_of_experts"
_SIZES = "kernels/test_kernels_counting.py::test_messages_at_a_time_in_layout_rank[True-sizes1]"
_CALL = "kernels/test_protocol_rank.py::test_scenario_under_every_schedule[{}-few]"

# fmt: off
OF_COUNTING = (
    Mutant("messages of the call before are taken", "kernels/sync/ll_words.py",
           "((word >> SHIFT) != number)", "((word >> SHIFT) < number - 1)",
           _OTHER.format(2)),
    Mutant("messages of a call that was never made are taken", "kernels/sync/ll_words.py",
           "((word >> SHIFT) != number)", "((word >> SHIFT) < number)",
           _OTHER.format(4)),
    Mutant("a call number of 40 bits is compared with a whole one", "kernels/dispatch/route.py",
           "call = (ctx.call << 24) >> 24", "call = ctx.call",
           "kernels/test_protocol_rank.py::test_call_numbers_of_more_bits_than_words_hold"),
    Mutant("messages are told with 32 bits for the count", "kernels/dispatch/route.py",
           "(ctx.call << 24) | sent", "(ctx.call << 32) | sent",
           _WORDS.format(3)),
    Mutant("messages are told with 32 bits of the call", "kernels/dispatch/route.py",
           "(ctx.call << 24) | sent", "((ctx.call & 0xFFFFFFFF) << 24) | sent",
           _WORDS.format(2**38 + 1)),
    Mutant("a CTA also counts messages of tokens before its own", "kernels/dispatch/route.py",
           "count_tokens(ids, begin, end, ctx.me", "count_tokens(ids, 0, end, ctx.me",
           _WORDS.format(3)),
    Mutant("messages are counted from the second block of tokens on", "kernels/dispatch/route.py",
           "range(begin, end, BLOCK):\n        raw", "range(begin + BLOCK, end, BLOCK):\n        raw",
           "kernels/test_kernels_counting.py::test_messages_are_counted_without_pairs[2-2]"),
    Mutant("messages of the shared expert's tokens count from each block's first", "kernels/dispatch/route.py",
           "messages += ranks_of(owner, t0 + t, end,", "messages += ranks_of(owner, t, end,",
           "kernels/test_kernels_counting.py::test_own_tokens_of_the_shared_expert_are_messages[2]"),
    Mutant("a CTA waits for those after it, too", "kernels/dispatch/route.py",
           "mask = (p < programs)[:, None] & (r >= 0)", "mask = (p < S.MAX_SENDERS)[:, None] & (r >= 0)",
           _SUMS.format(512)),
    Mutant("of messages only the last step's are summed", "kernels/dispatch/route.py",
           "            messages += found\n", "            messages = found\n",
           _SUMS.format(2)),
    Mutant("the first messages of CTAs carry the call", "kernels/dispatch/route.py",
           "        count = (words & 0xFFFFFF).to(tl.int32)", "        count = words.to(tl.int32)",
           "kernels/test_kernels_counting.py::test_every_rank_is_told_where_messages_of_each_cta_begin"),
    Mutant("a CTA sums its own block counts, too", "kernels/dispatch/send.py",
           "return sum_block_counts(ctx, mine, program, S)", "return sum_block_counts(ctx, mine, program + 1, S)",
           _CALL.format("shared")),
    Mutant("a CTA with one token counts it twice", "kernels/dispatch/send.py",
           "count_tokens(inputs.topk_ids, 0, t, ctx.me", "count_tokens(inputs.topk_ids, 0, t + 1, ctx.me",
           _CALL.format("shared_after_alone")),
    Mutant("a CTA with several tokens counts its first one twice", "kernels/dispatch/send.py",
           "inputs.topk_ids, 0, begin, ctx.me", "inputs.topk_ids, 0, begin + 1, ctx.me",
           _CALL.format("shared_after_alone")),
    Mutant("the header tells no messages", "kernels/dispatch/counts.py",
           "ids, 0, numbers.num_tokens, ctx.me, numbers, S.COUNT_BLOCK_ALONE", "ids, 0, 0, ctx.me, numbers, S.COUNT_BLOCK_ALONE",
           _CALL.format("shared_after_alone")),
    Mutant("words of experts hold what was counted before the header", "kernels/dispatch/counts.py",
           "numbers.num_local_experts, every, S)", "numbers.num_local_experts, pairs, S)",
           _CALL.format("shared")),
    Mutant("words of experts count from the second token on", "kernels/dispatch/counts.py",
           "every, _ = count_every_token(ctx, ids, numbers, S)", "every, _ = count_every_token(ctx, ids + S.TOPK, numbers._replace(num_tokens=numbers.num_tokens - 1), S)",
           "kernels/test_protocol_rank.py::test_rows_of_each_expert_are_told_by_source[8]"),
    Mutant("ids that name no expert are noted by nobody", "kernels/dispatch/counts.py",
           "    note_invalid(ctx, invalid)\n", "",
           "kernels/test_protocol_rank.py::test_ids_that_name_no_expert_are_noted_once[rank-1]"),
    Mutant("offsets are written before the words of experts come", "kernels/dispatch/receive.py",
           "ok = wait_for_expert_counts(ctx, numbers, S)", "ok += 0",
           _CALL.format("late_words")),
    Mutant("nobody waits for words of experts", "kernels/dispatch/row_offsets.py",
           "tl.full([], 1, tl.int1), numbers.num_local_experts, S)", "tl.full([], 1, tl.int1), 0, S)",
           _HEADERS),
    Mutant("rows wait for words of experts", "kernels/dispatch/row_offsets.py",
           "numbers.num_local_experts if S.SENDERS_COUNT_PAIRS else 0", "numbers.num_local_experts",
           _HEADERS),
    Mutant("senders between nodes count no pairs", "memory/workspace.py",
           'self.config.layout != "rank" or self.inter_node_ranks > 0', 'self.config.layout != "rank"',
           "kernels/test_kernels_counting.py::test_which_senders_count_pairs[fields3-True]"),
    Mutant("messages to 64 ranks are counted as many at a time as to 32", "kernels/launch/constants.py",
           "(2048 if ranks <= 32 else 256)", "(2048 if ranks <= 64 else 256)",
           "kernels/test_kernels_counting.py::test_tokens_counted_at_a_time_where_messages_are_counted_alone"),
    Mutant("rows in place: messages are published four at a time at most", "kernels/launch/constants.py",
           "min(8 if cfg.zero_copy and not many else 4,", "min(4,",
           _SIZES),
    Mutant("rows in place: few messages are read at a time up to many tokens", "kernels/launch/constants.py",
           "power(max(1, most // 64))))", "power(max(1, most // 1024))))",
           _SIZES),
)
# fmt: on
