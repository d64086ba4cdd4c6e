"""Unpack messages that have arrived, on the receiver side of dispatch: copy rows and scales to the output.

The row of a pair follows from the counts and from the position that came with the message. The receiver notes it in
``rows_of_message`` for combine, and for calls over this routing (``kernels.dispatch.receive_cached``).

Example: 2 local experts, whose groups begin at rows 0 and 4, and rank 1's rows in them at 2 and 4. Its message in slot
0 names expert 0, position 0: row 2, which is noted.

Example of S.MASKED: 2 local experts with 4 rows each, of which expert 0 gets 3 from rank 0 and 2 from rank 1. Rank 1's
pair of position 0 goes to row 3, that of position 1 would go to row 4, which is expert 1's, and is dropped.
"""

import triton
import triton.language as tl

from moelink.kernels.nodes.past import own_ids
from moelink.kernels.numeric import only
from moelink.kernels.records import Arrived, Header, Placed
from moelink.kernels.scale_tiles import place_in_tiles, word_in_tiles
from moelink.kernels.sync.signals import I32, note_malformed, own_block
from moelink.memory.protocol import ROW_ABSENT, ROW_DROPPED

_ABSENT = tl.constexpr(ROW_ABSENT)
_DROPPED = tl.constexpr(ROW_DROPPED)


@triton.jit
def scale_places(row, inner, block, c, scale_rows, S: tl.constexpr):
    """Return the offsets of a row's scales, in elements, at scale columns c [m]; or of rows [n, 1] at columns c [1,
    m].

    Example of S.MASKED and columns of 4 rows, 3 scales a row: row 5 is row 1 of group 1, which begins at element 12;
    its scale 2 is element 12 + 2 * 4 + 1.
    """
    if S.SCALE_LAYOUT == 1 and S.MASKED:
        return (row - inner).to(tl.int64) * S.SCALE_WIDTH + c.to(tl.int64) * scale_rows + inner
    elif S.SCALE_LAYOUT == 1:
        return c.to(tl.int64) * scale_rows + row
    elif S.SCALE_LAYOUT == 2:
        tile = (block + inner // 128).to(tl.int64) * ((S.SCALE_WIDTH + 3) // 4) + c // 4
        return place_in_tiles(tile, inner, c)
    else:
        return row.to(tl.int64) * S.SCALE_WIDTH + c


@triton.jit
def tile_words(inner, block, w, S: tl.constexpr):
    """Return the offsets of words of four scales in 128x4 tiles, for rows (a column) at words w ([1, m])."""
    tile = (block + inner // 128).to(tl.int64) * ((S.SCALE_WIDTH + 3) // 4) + w
    return word_in_tiles(tile, inner)


@triton.jit
def load_scales(mine, at, S: tl.constexpr):
    """Load the scales of the message numbered ``at``.

    For ``at`` -1, and past the last scale, values are undefined. For tiles they are words of four scales, with zeros
    after the last scale in its word.
    """
    message = mine + S.OFFSET_MESSAGES + at.to(tl.int64) * S.MESSAGE_BYTES + S.MESSAGE_SCALES
    if S.SCALE_LAYOUT == 2:
        w = tl.arange(0, S.SCALE_WIDTH_POW2 // 4)
        word = tl.load(message.to(I32) + w, mask=only(at >= 0, w < (S.SCALE_WIDTH + 3) // 4))
        if S.SCALE_WIDTH % 4:
            word = tl.where(w == S.SCALE_WIDTH // 4, word & ((1 << (S.SCALE_WIDTH % 4 * 8)) - 1), word)
        return word
    else:
        c = tl.arange(0, S.SCALE_WIDTH_POW2)
        return tl.load(message.to(S.SCALE_POINTER) + c, mask=only(at >= 0, c < S.SCALE_WIDTH))


@triton.jit
def store_scales(scales, row, inner, block, scales_out, scale_rows, S: tl.constexpr):
    """Store a message's ``scales``, from :func:`load_scales`, at the rows ``row`` [rows], -1 for none."""
    c = tl.arange(0, scales.shape[0])
    if S.SCALE_LAYOUT == 2:
        to = scales_out.to(I32, bitcast=True) + tile_words(inner[:, None], block[:, None], c[None, :], S)
        width = (S.SCALE_WIDTH + 3) // 4
    else:
        to = scales_out.to(S.SCALE_POINTER, bitcast=True)
        to += scale_places(row[:, None], inner[:, None], block[:, None], c[None, :], scale_rows, S)
        width = S.SCALE_WIDTH
    tl.store(
        to,
        tl.broadcast_to(scales[None, :], (S.ROWS_PER_MESSAGE_POW2, scales.shape[0])),
        mask=(row >= 0)[:, None] & (c < width)[None, :],
    )


@triton.jit
def note_messages(message_of_row, row, at, S: tl.constexpr):
    """Note that rows ``row`` [N, rows], -1 for none, came with messages ``at`` [N], for ``kernels.dispatch.scales``
    (S.SCALES_LATER)."""
    number = tl.broadcast_to(at[:, None], row.shape)
    tl.store(message_of_row.to(I32, bitcast=True) + row, number, mask=row >= 0)


@triton.jit
def row_of_slot(source, slot, numbers, S: tl.constexpr):
    """Return the row, among those of all groups, of the message in ``slot`` of ``source`` where rows stay in the
    messages (S.IN_PLACE).

    Example: outputs have 4 rows of each source: slot 1 of rank 2 is row 9.
    """
    return source * numbers.capacity + slot


@triton.jit
def _row(values, g):
    """Return row ``g`` of ``values`` [messages, N], none of them below -1."""
    return tl.max(tl.where((tl.arange(0, values.shape[0]) == g)[:, None], values, -1), 0)


@triton.jit
def _element(values, q):
    """Return element ``q`` of ``values`` [N], none of them below -1, as a scalar."""
    return tl.max(tl.where(tl.arange(0, values.shape[0]) == q, values, -1), 0)


@triton.jit
def _load_words(mine, at, block, S: tl.constexpr):
    """Load the words of block ``block`` of the message numbered ``at``.

    For ``at`` -1, and past the end of the row, they are undefined.
    """
    c = block * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
    message = mine + S.OFFSET_MESSAGES + at.to(tl.int64) * S.MESSAGE_BYTES
    return tl.load(tl.multiple_of(message.to(S.WORD_POINTER), 16) + c, mask=only(at >= 0, c < S.ROW_WORDS))


@triton.jit
def load_headers(message, valid, numbers, S: tl.constexpr):
    """Load the headers of the messages at addresses ``message`` [n] that are ``valid``.

    Values that do not travel are undefined.
    """
    token = tl.load((message + S.MESSAGE_TOKEN).to(I32), mask=valid)
    q = tl.arange(0, S.TOPK_POW2 if S.RANK_LAYOUT else S.ROWS_PER_MESSAGE_POW2)
    mask = valid[:, None] & (q < S.TOPK)[None, :]
    local = tl.zeros(mask.shape, tl.int32)
    position = local
    w = local
    if S.TELLS_IDS:
        local = own_ids(tl.load((message + S.MESSAGE_IDS).to(I32)[:, None] + q[None, :], mask=mask), numbers, S)
    if S.TELLS_POSITIONS:
        position = tl.load((message + S.MESSAGE_POSITIONS).to(I32)[:, None] + q[None, :], mask=mask)
    if S.HAS_WEIGHTS:  # the weight of the fused shared expert's row is 1
        w = tl.where(
            mask, tl.load((message + S.MESSAGE_WEIGHTS).to(S.WEIGHT_POINTER)[:, None] + q[None, :], mask=mask), 1.0
        )
    return Header(token, local, position, w)


@triton.jit
def store_choices(ctx, source, valid, header, strange, start, fits, outputs, numbers, S: tl.constexpr):
    """Store the ids and weights of messages that are ``valid`` at rows ``start`` [n] that are within capacity
    (``fits``), in layout "rank".

    Note that ``source`` sent malformed data where an id is out of range or the token ``strange``.
    """
    k = tl.arange(0, S.TOPK_POW2)
    named = valid[:, None] & (k < S.TOPK)[None, :]
    known = (header.local_ids >= -1) & (header.local_ids < numbers.num_local_experts)
    note_malformed(ctx.control, source, named & (strange[:, None] | (known == 0)))
    local = tl.where(known, header.local_ids, -1)
    here = named & fits[:, None]
    cell = start.to(tl.int64)[:, None] * S.TOPK + k[None, :]
    ids = local
    if S.GLOBAL_IDS:
        ids = tl.where(local >= 0, local + numbers.first_expert, -1)
    tl.store(outputs.topk_ids + cell, ids, mask=here)
    if S.HAS_WEIGHTS:
        tl.store(outputs.weights + cell, tl.where(local >= 0, header.weights, 0.0), mask=here)


@triton.jit
def store_slots(ctx, source, valid, header, placed, outputs, numbers, S: tl.constexpr):
    """Store top-k slots and weights of the rows ``placed``, in layout "expert".

    Returns them with the rows of the fused shared expert, of own tokens whose messages are ``valid``.
    """
    row, keep, inner, block = placed.row, placed.keep, placed.inner, placed.block
    q = tl.arange(0, S.ROWS_PER_MESSAGE_POW2)
    if S.FUSED_SHARED_EXPERT:
        own = valid & (header.token >= numbers.shared_begin) & (header.token < numbers.shared_end)
        own = own[:, None] & (q == S.TOPK)[None, :] & (tl.zeros(row.shape, tl.int32) + source == ctx.me)
        number_own = tl.broadcast_to((header.token - numbers.shared_begin)[:, None], row.shape)
        row = tl.where(own, number_own, row)
        keep = keep | (own & (row < numbers.capacity))
        inner = tl.where(own, row, inner)
        block = tl.where(own, 0, block)
    slot = tl.broadcast_to(tl.where(q < S.TOPK, q, -1)[None, :], row.shape)
    tl.store(outputs.src_info + row * 3 + 2, slot, mask=keep)
    if S.HAS_WEIGHTS:
        tl.store(outputs.weights + row, header.weights, mask=keep)
    return Placed(row, keep, inner, block)


@triton.jit
def store_sources(source, token, placed, outputs, numbers, S: tl.constexpr):
    """Store source rank and ``token`` [n] of the rows ``placed``. Returns the rows, -1 for none."""
    shape: tl.constexpr = placed.row.shape
    info = outputs.src_info + placed.row * 3
    label = numbers.rank if S.ALLREDUCE else source
    tl.store(info, tl.zeros(shape, tl.int32) + label, mask=placed.keep)
    tl.store(info + 1, tl.broadcast_to(token[:, None], shape), mask=placed.keep)
    return tl.where(placed.keep, placed.row, -1)


@triton.jit
def group_by_counts(ctx, source, local, named, place, numbers, S: tl.constexpr):
    """Return of the groups of experts ``local`` [n, slots], where ``named``, what the counts say: the first row of
    ``source`` and its rows there, the group's first row and its first 128-row block of scales."""
    e = tl.reshape(tl.where(named, local, 0), (local.shape[0] * local.shape[1],))
    first = tl.reshape(tl.gather(place.base, e, 0), local.shape)
    rows = tl.reshape(tl.gather(place.sizes, e, 0), local.shape)
    begin = tl.reshape(tl.gather(place.starts, e, 0), local.shape)
    return first, rows, begin, tl.reshape(tl.gather(place.bases, e, 0), local.shape)


@triton.jit
def place_by_position(group_of, ctx, came, header, place, notes, numbers, S: tl.constexpr):
    """Return where the rows of messages go by their positions, and note it, in layout "expert". ``group_of`` looks up
    the groups: :func:`group_by_counts`, or what does the same by a table."""
    q = tl.arange(0, S.ROWS_PER_MESSAGE_POW2)
    mask = came.valid[:, None] & (q < S.TOPK)[None, :]
    strange = (header.token < 0) | (header.token >= S.MAX_TOKENS)
    local = tl.where(mask, header.local_ids, -1)
    named = (local >= 0) & (local < numbers.num_local_experts)
    first, rows, begin, block = group_of(ctx, came.source, local, named, place, numbers, S)
    row = first + header.positions
    fits = named & (header.positions >= 0) & (header.positions < rows)
    known = fits | (local == -1)
    note_malformed(ctx.control, came.source, mask & (strange[:, None] | (known == 0)))
    inner = row - begin
    keep = fits & ((inner if S.MASKED else row) < numbers.capacity)
    tl.store(
        notes.rows_of_message + came.at.to(tl.int64)[:, None] * S.TOPK + q[None, :],
        tl.where(keep, row, tl.where(named, _DROPPED, _ABSENT)),
        mask=mask,
    )
    return Placed(row, keep, inner, block), came.valid


@triton.jit
def place_by_slot(ctx, came, header, place, notes, numbers, S: tl.constexpr):
    """Return the row of each message by its slot, whether it fits, and whether its header is strange, in layout
    "rank"."""
    slot = came.at - came.source * S.MAX_TOKENS
    start = row_of_slot(came.source, slot, numbers, S) if S.IN_PLACE else place.base + slot
    fits = (slot if S.IN_PLACE else start) < numbers.capacity
    return start, fits, (header.token < 0) | (header.token >= S.MAX_TOKENS)


@triton.jit
def place_by_counts(ctx, came, header, place, notes, numbers, S: tl.constexpr):
    """Return where the rows of messages go, by the counts of all sources, and note it for combine."""
    if S.RANK_LAYOUT:
        return place_by_slot(ctx, came, header, place, notes, numbers, S)
    else:
        return place_by_position(group_by_counts, ctx, came, header, place, notes, numbers, S)


@triton.jit
def unpack_headers(place_of, ctx, came, header, place, outputs, notes, numbers, S: tl.constexpr):
    """Store what the ``header`` of messages that ``came`` says of their rows, which ``place_of`` finds: by counts, by a
    table, or by the routing record of an earlier call.

    Returns the rows [n, rows], -1 for none, and for scales in tiles or by group how far each is into its group and the
    group's first block.
    """
    if S.RANK_LAYOUT:
        q = tl.arange(0, S.ROWS_PER_MESSAGE_POW2)
        valid = came.valid
        start, fits, strange = place_of(ctx, came, header, place, notes, numbers, S)
        row = start[:, None] + q[None, :]
        every = valid[:, None] & (q >= 0)[None, :]
        keep = every & fits[:, None]
        if not S.CACHED_ROUTING:
            tl.store(notes.rows_of_message + came.at[:, None] + q[None, :], tl.where(keep, row, _DROPPED), mask=every)
        tl.store(outputs.src_info + row * 3 + 2, tl.zeros(row.shape, tl.int32) - 1, mask=keep)
        store_choices(ctx, came.source, valid, header, strange, start, fits, outputs, numbers, S)
        placed = Placed(row, keep, row, row)
    else:
        placed, valid = place_of(ctx, came, header, place, notes, numbers, S)
        placed = store_slots(ctx, came.source, valid, header, placed, outputs, numbers, S)
    rows = store_sources(came.source, header.token, placed, outputs, numbers, S)
    if not S.CACHED_ROUTING:
        tl.store(notes.message_token + came.at, header.token, mask=came.valid)
    return Placed(rows, placed.keep, placed.inner, placed.block)


@triton.jit
def store_rows(words, c, places, tokens_out, S: tl.constexpr):
    """Store ``words``, the words ``c`` of a row, to the rows ``places`` [rows], -1 for none.

    They are stored as the first to leave the L2 cache. The experts' weights drive most of them out before they are
    read, and the cache is needed for the messages, which are read from there.
    """
    present = (places >= 0).to(tl.int32)
    nth = tl.cumsum(present, 0) - present
    for n in range(0, tl.sum(present, 0)):  # few: most experts of a token are on other ranks
        place = tl.max(tl.where((present > 0) & (nth == n), places, 0), 0)
        to = tokens_out.to(S.WORD_POINTER, bitcast=True) + place.to(tl.int64) * S.ROW_WORDS
        tl.store(to + c, words, mask=c < S.ROW_WORDS, cache_modifier=".cs")


@triton.jit
def load_first(number, mine, S: tl.constexpr):
    """Load the first words of the first of the messages numbered ``number`` [messages], -1 for none, and its scales
    where they are stored with the rows; else the scales are undefined."""
    words = _load_words(mine, _element(number, 0), 0, S)
    scales = number
    if S.SCALE_WIDTH > 0 and not S.SCALES_LATER:
        scales = load_scales(mine, _element(number, 0), S)
    return words, scales


@triton.jit
def store_group(ctx, at, number, words, scales, placed, outputs, numbers, S: tl.constexpr):
    """Store the messages numbered ``at`` [messages] at the rows ``placed``, -1 for none. ``number``: as ``at``, -1 for
    none. ``words``, ``scales``: of :func:`load_first`.

    Payload and scales of each message are read while those of the one before are stored. Loads leave masked values
    undefined, because moving in an ``other`` value would wait for the load.
    """
    mine = own_block(ctx.control, S)
    stores_scales: tl.constexpr = S.SCALE_WIDTH > 0 and not S.SCALES_LATER
    if S.SCALES_LATER:
        note_messages(outputs.scales, placed.row, at, S)
    blocks: tl.constexpr = (S.ROW_WORDS + S.BLOCK_SIZE - 1) // S.BLOCK_SIZE
    steps: tl.constexpr = S.MESSAGES_PER_STEP * blocks
    for j in tl.static_range(steps):
        following = words
        following_scales = scales
        if j + 1 < steps:
            behind = _element(number, (j + 1) // blocks)
            following = _load_words(mine, behind, (j + 1) % blocks, S)
            if stores_scales and (j + 1) % blocks == 0:
                following_scales = load_scales(mine, behind, S)
        c = j % blocks * S.BLOCK_SIZE + tl.arange(0, S.BLOCK_SIZE)
        places = _row(placed.row, j // blocks)
        store_rows(words, c, places, outputs.tokens, S)
        if stores_scales and j % blocks == 0:
            store_scales(
                scales,
                places,
                _row(placed.inner, j // blocks),
                _row(placed.block, j // blocks),
                outputs.scales,
                numbers.scale_rows,
                S,
            )
        words = following
        scales = following_scales


@triton.jit
def unpack_group(by, ok, ctx, came, place, outputs, notes, numbers, S: tl.constexpr):
    """Copy the messages that ``came`` to their rows, which ``by`` finds.

    There are S.MESSAGES_PER_STEP of them. Headers are read for all messages at once. Where rows and scales stay in the
    messages (S.IN_PLACE) only headers are read: the waits for the flags are acquires, and whatever reads the rows is
    launched after this kernel, so it sees them. Returns ``ok``, or how a wait of ``by`` ended, and ``place``.
    """
    mine = own_block(ctx.control, S)
    message = mine + S.OFFSET_MESSAGES + came.at.to(tl.int64) * S.MESSAGE_BYTES
    if S.IN_PLACE:
        header = load_headers(message, came.valid, numbers, S)
        unpack_headers(by.place_of, ctx, came, header, place, outputs, notes, numbers, S)
    else:
        number = tl.where(came.valid, came.at, -1)
        words, scales = load_first(number, mine, S)
        header = load_headers(message, came.valid, numbers, S)
        ok, place, valid = by.await_place(ok, ctx, place, came.valid, S)
        came = Arrived(came.source, came.at, valid)
        placed = unpack_headers(by.place_of, ctx, came, header, place, outputs, notes, numbers, S)
        store_group(ctx, came.at, number, words, scales, placed, outputs, numbers, S)
    return ok, place


@triton.jit
def place_is_known(ok, ctx, place, valid, S: tl.constexpr):
    """Return the arguments: the place of rows is known before messages are awaited."""
    return ok, place, valid
