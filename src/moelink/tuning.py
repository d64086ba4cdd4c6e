"""Hold the thresholds of speed in one table: sizes up to which, or from which, a call has another form.

They change how a call is made, never the result. Each was measured; the pages docs/lab/dispatch.md and
docs/lab/combine.md have the figures, under the heading that is named. Sizes that the protocol needs are in
:mod:`moelink.memory.protocol`.
"""

FEW_TOKENS, MANY_TOKENS = 256, 1024
"""Communicators of up to FEW_TOKENS tokens per rank are built for latency, of more than MANY_TOKENS for throughput.
Calls that state no more tokens than one of these take a dispatch that is built for so many (Dispatch, *Senders*).
Dispatch, *Senders*: code for few tokens in the kernel of many costs 162.3 -> 170.3 us at 4096 tokens."""

COUNTED_ALONE = 512
"""Up to this many tokens each sending CTA counts the tokens before its own by itself instead of reading block counts,
unless the kernel is built for more than MANY_TOKENS. Dispatch, *Counting*: 42.0 -> 37.8 us at 512 tokens, slower from
1024 on."""

ROW_TABLE_RANKS = 4
"""Fewest ranks for which one receiver of dispatch plans for all (``memory.workspace.Workspace.row_table``). Dispatch,
*Receivers*."""

ROW_TABLE_TOKENS = 128
"""Most tokens per rank of a communicator for which one receiver of dispatch plans for all. Dispatch, *Receivers*, four
ranks: 24.2 -> 16.8 us at 1 token, 48.8 -> 44.7 us at 128; with more tokens it is slower."""

FEW_MESSAGES_IN_PLACE, MESSAGES_IN_PLACE = 8, 16
"""Messages whose headers a receiver reads at a time where rows stay in the messages (``zero_copy``): the least, in a
kernel for up to FEW_TOKENS tokens per rank, and the most, from MANY_TOKENS on. Between them it is a 64th of the
tokens. Dispatch, *Rows in place*."""

MANY_COPIES = 128
"""Layout "rank" with two ranks: a combine of a communicator of more tokens per rank than this is built for many
(``memory.workspace.Workspace.two_copies``). Combine, *Senders and reducers*."""

LAMPORT_BYTES = 1 << 25
"""Most bytes of ``lamport_slots``, a region for sums that return without flags. Communicators of up to FEW_TOKENS
tokens per rank have it, and of up to MANY_TOKENS where it has room for all sums of a call. Combine, *Signals of few
tokens*: 9.3 -> 8.0 us at 32 tokens, 15.9 -> 12.7 us at 128."""

LAMPORT_BYTES_OF_COPIES = 1 << 26
"""The same where a sum is two copies (``memory.workspace.Workspace.two_copies``). Then half of the sums travel, and
flags take longer than reading and clearing the slots, however many tokens a communicator is for."""

COMBINE_BLOCK = 2048
"""Most columns of a row that a CTA of combine handles at a time; twice as many where rows are few and copied
(``memory.workspace.Workspace.combine_block``). Combine, *Senders and reducers*: with layout "rank" 52.7 -> 51.8 us at
512 tokens with 4096 columns."""

FEW_SMS = 48
"""SM limits up to which calls of many tokens take the forms of few SMs. Dispatch, *Few SMs*."""

MESSAGES_PER_RELEASE = 8
"""Messages whose flags a sender raises by one release within an SM limit. Dispatch, *Few SMs*."""

PRESENT_BYTES = 1 << 14
"""Most bytes of a row that a CTA of combine handles at a time within an SM limit (``kernels.combine.present_rows``).
Combine, *Few SMs*."""

ROWS_AHEAD = 3
"""Rows that are on their way at a time there, the one that is added included."""

FEW_ROWS = (10, 16), (26, 32), (52, 64)
"""On compute capability 9.0, the rows of a group in the mean up to which ``rows.grouped_gluon_few`` multiplies them,
and the rows of its tiles (:func:`moelink.rows.grouped_choice.tile_rows`). Lab, *The layer*, *Tiles by the mean of a
group*."""

ROWS_OF_MXFP4 = (15, 16), (33, 32)
"""The same for ``rows.grouped_gluon_mxfp4``, which multiplies more rows in its largest tiles, of 64."""

FEW_LOGITS, FEW_PRODUCTS = 256, 1 << 26
"""Most tokens whose logits ``rows.wide_product_kernel`` computes, and most products of numbers (tokens x experts x
columns), in place of torch's product. Lab, *The layer*, *Router*."""
