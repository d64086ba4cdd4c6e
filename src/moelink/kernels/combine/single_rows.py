"""Send rows home one by one, and reduce them: combine without pre-reduction, or without reduction.

A row travels to (token, slot) of ``rows`` at home, and ``combine_kept`` says which rows there are. One flag announces
all rows of a message; between nodes each row has a flag of its own besides. In allreduce mode nothing travels: the home
rank reads its rows from ``y``.

Example: topk 3, a message with rows [4, -1, 9]: rows 4 and 9 are copied to slots 0 and 2 of its token, and kept are
[1, 0, 1]. Home adds w[0] y[4] + w[2] y[9], its router weights, or stores both rows unreduced.
"""

import triton
import triton.language as tl

from moelink.kernels.combine.arrivals import find_own_rows, inter_node_slots
from moelink.kernels.combine.row_format import load_columns, store_columns
from moelink.kernels.dispatch.route import experts_at, owner_of
from moelink.kernels.nodes.internode import between_nodes, between_nodes_or, direct_or_staged, intra_node_only
from moelink.kernels.nodes.put_rows import put_kept, put_row
from moelink.kernels.numeric import only, round_to
from moelink.kernels.sync.signals import U8, own_block
from moelink.memory.protocol import ROW_ABSENT

_ABSENT = tl.constexpr(ROW_ABSENT)


@triton.jit
def copy_columns(to, part, y, row, S: tl.constexpr):
    """Copy part ``part`` of row ``row``, in the combine format if there is one, to the row at ``to``."""
    for c0 in tl.static_range(0, S.HIDDEN_SIZE, S.PARTS_PER_ROW * S.BLOCK_SIZE):
        c = c0 + part * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
        column = tl.load(
            y + row.to(tl.int64) * S.HIDDEN_SIZE + c, mask=c < S.HIDDEN_SIZE, other=0.0, eviction_policy=S.EVICTION
        )
        if S.ENCODE_FN is not None:
            store_columns(to, c0 + part * S.BLOCK_SIZE, column.to(S.SUM_DTYPE), row >= 0, S)
        else:
            tl.store(to + c, column, mask=c < S.HIDDEN_SIZE)


@triton.jit
def send_rows_one_by_one(ctx, home, peer, message, share, inputs, y_rows, slot_begin, S: tl.constexpr):
    """Send a ``share`` of each row of ``message`` to rank ``peer``, whose block is at address ``home``. Returns how
    many rows there are, if the message is valid."""
    mine = own_block(ctx.control, S)
    slot = message.slot
    token = message.token
    q = tl.arange(0, S.TOPK_POW2)
    here = tl.where(message.valid, tl.load(message.rows + q, mask=q < S.TOPK, other=_ABSENT), _ABSENT)
    kept = (here >= 0) & (here < y_rows)
    kept_at = (home + S.OFFSET_COMBINE_KEPT).to(U8) + token * S.TOPK
    tl.store(kept_at + q, kept.to(tl.uint8), mask=intra_node_only(here != _ABSENT, peer, ctx.me, S))
    comes = kept & (q >= slot_begin) & (q < slot_begin + S.ROWS_PER_TOKEN)
    between_nodes(put_kept, (ctx, mine, comes, peer, slot, message.valid), S)
    count = tl.sum(comes.to(tl.int32), 0)
    for k in range(slot_begin, tl.minimum(slot_begin + S.ROWS_PER_TOKEN, S.TOPK)):
        row = tl.load(message.rows + k)
        if (row >= 0) & (row < y_rows):
            place = token * S.ROWS_PER_TOKEN + k - slot_begin
            address = home + S.OFFSET_ROWS + tl.cast(place, tl.int64) * S.ROW_BYTES
            if S.STAGED_BY_ROW:
                address = direct_or_staged(address, mine, peer, ctx.me, S.OFFSET_STAGED_ROWS, 0, row, S.ROW_BYTES, S)
            else:
                address = direct_or_staged(
                    address, mine, peer, ctx.me, S.OFFSET_STAGED_ROWS, S.MAX_TOKENS, slot, S.ROW_BYTES, S
                )
            to = tl.multiple_of(address.to(S.ROW_POINTER), 16)
            if S.PARTS_PER_ROW == 1:
                copy_columns(to, 0, inputs.y, row, S)
            else:
                for part in range(share.begin, share.begin + share.count):
                    copy_columns(to, part, inputs.y, row, S)
            word = mine + S.OFFSET_ROW_FLAG + tl.cast((ctx.me * S.MAX_TOKENS + slot) * S.TOPK + k, tl.int64) * 8
            between_nodes(put_row, (ctx, mine, address, place, word, peer, True), S)
    return count


@triton.jit
def kept_of_all(here, mine, ids, slots, token, me, numbers, S: tl.constexpr):
    """Return ``here`` [slots], which of a token's rows have come from this node, with those of other nodes."""
    owner, _, comes = inter_node_slots(mine, ids, slots, token, me, numbers.first_expert, numbers.num_local_experts, S)
    return tl.where(owner >= 0, comes, here)


@triton.jit
def rows_here(ctx, inputs, slots, token, numbers, S: tl.constexpr):
    """Return which of a token's rows have come [slots], if rows travel one by one; in allreduce mode, which may be
    among this rank's."""
    if S.SENDS_SUMS:
        return 0
    else:
        return _rows_here(ctx, inputs, slots, token, numbers, S)


@triton.jit
def _rows_here(ctx, inputs, slots, token, numbers, S: tl.constexpr):
    mine = own_block(ctx.control, S)
    r = tl.arange(0, S.WORLD_SIZE_POW2)
    k = tl.arange(0, S.TOPK_POW2)
    expert = experts_at(inputs.topk_ids, token * S.TOPK + k, k < S.TOPK, S)
    owner = owner_of(expert, numbers.first_expert, numbers.num_local_experts, S)
    here = tl.sum(((owner[:, None] == r[None, :]) & (slots >= 0)[None, :]).to(tl.int32), 1) > 0
    if not S.ALLREDUCE:
        here = here & (tl.load((mine + S.OFFSET_COMBINE_KEPT).to(U8) + token * S.TOPK + k, mask=here, other=0) != 0)
    return between_nodes_or(here, kept_of_all, (here, mine, inputs.topk_ids, slots, token, ctx.me, numbers), S)


@triton.jit
def one_row(mine, inputs, rows, kept, token, j, c0, numbers, S: tl.constexpr):
    """Return columns [c0, c0 + S.BLOCK_SIZE) of the row of slot ``j`` of a token, zeros unless ``kept``. ``rows``: in
    allreduce mode, where the numbers of the token's rows are."""
    c = c0 + tl.arange(0, S.BLOCK_SIZE)
    if S.ALLREDUCE:
        row = tl.load(rows + j, mask=kept, other=-1)
        kept = (row >= 0) & (row < numbers.y_rows)
        return tl.load(inputs.y + row.to(tl.int64) * S.HIDDEN_SIZE + c, mask=only(kept, c < S.HIDDEN_SIZE), other=0.0)
    else:
        place = tl.cast(token * S.ROWS_PER_TOKEN + j - numbers.slot_begin, tl.int64)
        source = tl.multiple_of((mine + S.OFFSET_ROWS + place * S.ROW_BYTES).to(S.ROW_POINTER), 16)
        if S.DECODE_FN is not None:
            return load_columns(source, c0, kept, S)
        else:
            return tl.load(source + c, mask=only(kept, c < S.HIDDEN_SIZE), other=0.0, eviction_policy="evict_first")


@triton.jit
def sum_or_store_rows(ctx, inputs, notes, slots, here, outputs, token, c0, numbers, S: tl.constexpr):
    """Return the sum of a token's rows ``here`` [slots] times its router weights, in slot order; or if this combine
    does not reduce, store each of them."""
    mine = own_block(ctx.control, S)
    rows, _ = find_own_rows(notes, slots, ctx.me, S)
    total = tl.zeros([S.BLOCK_SIZE], S.SUM_DTYPE)
    k = tl.arange(0, S.TOPK_POW2)
    c = c0 + tl.arange(0, S.BLOCK_SIZE)
    for j in range(numbers.slot_begin, tl.minimum(numbers.slot_begin + S.ROWS_PER_TOKEN, S.TOPK)):
        kept = tl.sum(tl.where(k == j, here.to(tl.int32), 0), 0) > 0
        row = one_row(mine, inputs, rows, kept, token, j, c0, numbers, S)
        if S.REDUCES:
            product = row.to(S.SUM_DTYPE)
            if S.HAS_HOME_WEIGHTS:
                product = product * tl.load(inputs.home_weights + token * S.TOPK + j, mask=kept, other=0.0)
            total += product
        else:
            if S.DECODE_FN is not None:
                row = round_to(row, S.OUT_DTYPE, S.NATIVE_CASTS)
            to = outputs.out + (tl.cast(token, tl.int64) * S.TOPK + j) * S.HIDDEN_SIZE + c
            tl.store(to, row, mask=c < S.HIDDEN_SIZE)
    return total
