"""Send rows home that answer rows in place: the expert role of combine with ``zero_copy``.

There a message has one row, and which row of ``y`` answers it follows from its slot alone: ``y`` has as many rows for
each home rank. So a CTA looks nothing up before it reads ``y``. It begins to read its first columns before anything
else, with the token of that message, and the next ones before it stores those that it has read. In other layouts a
row's number is a note of dispatch, and what travels is a sum (``kernels.combine.send``).

Who writes and who waits is as there: a CTA stores nothing before every home rank has granted credit for the previous
call, and a row's flag, if it has one, is a release after all of the row. Reading earlier changes nothing of that: ``y``
is complete when the launch begins, and nobody writes it until the launch has ended. A CTA may read a row that answers
no message, or a message of a dispatch that brought nothing. It does not store what it has read then.

Example: ``y`` has 5 rows for each of two home ranks. The message of rank 1 in slot 2 is answered by row 7.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only
from moelink.kernels.records import FirstAnswer
from moelink.kernels.sync.lamport_slots import is_small, place_of_sum, store_sum
from moelink.kernels.sync.signals import I64, publish
from moelink.kernels.sync.trace import (
    FIRST_STORE,
    IDS_READ,
    LAST_PUBLISHED,
    PUBLISHED,
    stamp_after,
    stamp_both,
    stamp_first,
)
from moelink.memory.protocol import COMBINE_BYTES

_BYTES = tl.constexpr(COMBINE_BYTES)


@triton.jit
def share_of(item, numbers, S: tl.constexpr):
    """Return the slot of the message that ``item`` is a share of, the first block of this share, and its blocks.

    With few tokens ``spread`` CTAs share a message, else one sends all of it.

    Example: messages of 4 blocks and a spread of 2: item 5 is blocks 2 and 3 of message 2.
    """
    blocks: tl.constexpr = (S.HIDDEN_SIZE + S.BLOCK_SIZE - 1) // S.BLOCK_SIZE
    tl.static_assert(S.PARTS_PER_ROW == 1 or S.PARTS_PER_ROW == blocks)
    if S.PARTS_PER_ROW == 1:
        return item, item * 0, item * 0 + blocks
    else:
        each = blocks // numbers.spread
        return item // numbers.spread, item % numbers.spread * each, each


@triton.jit
def load_block(inputs, home, slot, block, exists, numbers, S: tl.constexpr):
    """Load block ``block`` of columns of the row that answers message ``slot`` of rank ``home``, if that ``exists`` and
    has a row; else, and past the end of the row, values are undefined."""
    room = numbers.y_rows // S.WORLD_SIZE
    c = block * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
    source = inputs.y + (home * room + slot).to(tl.int64) * S.HIDDEN_SIZE
    mask = only(exists & (slot < room), c < S.HIDDEN_SIZE)
    return tl.load(source + c, mask=mask, eviction_policy=S.EVICTION)


@triton.jit
def load_token(notes, home, slot, exists, S: tl.constexpr):
    """Load the token of message ``slot`` of rank ``home``, if that ``exists``, else -1."""
    return tl.load(notes.message_token + home * S.MAX_TOKENS + slot, mask=exists & (slot < S.MAX_TOKENS), other=-1)


@triton.jit
def begin_answers(inputs, notes, home, lane, exists, numbers, S: tl.constexpr):
    """Load what :func:`send_answers_home` begins with, if it is called at all (``exists``)."""
    slot, begin, _ = share_of(lane, numbers, S)
    block = load_block(inputs, home, slot, begin, exists, numbers, S)
    token = load_token(notes, home, slot, exists, S)
    return FirstAnswer(block, token, tl.load(notes.received + home * 2), tl.load(notes.received + home * 2 + 1))


@triton.jit
def store_block(to, loaded, block, fits, valid, flip, S: tl.constexpr):
    """Store ``loaded``, block ``block`` of a row, to the row at ``to``, if ``valid``; zeros unless the row ``fits``.

    Its bits are inverted if ``flip`` is -1.
    """
    c = block * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
    # A sum of one row, as in other layouts: every NaN becomes the one that arithmetic makes.
    total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE) + tl.where(only(fits, c < S.HIDDEN_SIZE), loaded.to(S.SUM_DTYPE), 0.0)
    store_sum(to, c, total, valid, flip, S)


@triton.jit
def send_answers_home(ctx, inputs, notes, home, lane, lanes, first, numbers, S: tl.constexpr):
    """Send every ``lanes``-th share of the answers to messages of rank ``home``, from the ``lane``-th, and publish
    their flags. ``first``: of :func:`begin_answers`."""
    tl.static_assert(S.SLOTS_PER_MESSAGE == 1 and S.SENDS_SUMS and S.ENCODE_FN is None)
    block_of_home = tl.load(ctx.table + home)
    small = is_small(ctx.control, first.tokens, ctx.call, S)
    p = tl.arange(0, S.PARTS_POW2)
    flags = (block_of_home + S.OFFSET_COMBINE_FLAG).to(I64) + ctx.me * S.MAX_TOKENS * S.PARTS_PER_ROW
    room = numbers.y_rows // S.WORLD_SIZE
    moved = tl.full([], 0, tl.int32)
    loaded = first.block
    token = first.token
    item = lane
    slot, begin, each = share_of(item, numbers, S)
    while slot < first.messages:
        stamp_after(ctx, IDS_READ, token + p * 0, S)
        valid = (token >= 0) & (token < S.MAX_TOKENS)
        moved += (valid & (begin == 0)).to(tl.int32)
        place = tl.where(valid, token, 0)
        address = block_of_home + S.OFFSET_ROWS + tl.cast(ctx.me * S.MAX_TOKENS + place, tl.int64) * S.ROW_BYTES
        address, flip, valid = place_of_sum(block_of_home, address, place, valid, small, ctx.me, S)
        to = tl.multiple_of(address.to(S.ROW_POINTER), 16)
        next_slot, next_begin, _ = share_of(item + lanes, numbers, S)
        token = load_token(notes, home, next_slot, next_slot < first.messages, S)
        for i in range(each):
            is_last = i + 1 == each
            following = tl.where(is_last, next_slot, slot)
            behind = load_block(
                inputs, home, following, tl.where(is_last, next_begin, begin + i + 1), following < first.messages,
                numbers, S,
            )  # fmt: skip
            store_block(to, loaded, begin + i, slot < room, valid, flip, S)
            loaded = behind
        stamp_first(ctx, FIRST_STORE, S)
        if small == 0:
            parts = tl.where(S.PARTS_PER_ROW == 1, 1, each)
            publish(
                flags + slot * S.PARTS_PER_ROW + begin + p, p < parts, tl.zeros([S.PARTS_POW2], tl.int64) + ctx.call
            )
        stamp_both(ctx, PUBLISHED, LAST_PUBLISHED, S)
        item += lanes
        slot = next_slot
        begin = next_begin
    if (home != ctx.me) & (moved > 0):
        tl.atomic_add(ctx.control + _BYTES, moved.to(tl.int64) * S.ROW_BYTES, sem="relaxed", scope="gpu")
