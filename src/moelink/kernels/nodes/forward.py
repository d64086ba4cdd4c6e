"""Forward relays: the role between sender and receiver of a two-level dispatch (``kernels.nodes.levels``).

A forwarder waits for the marks of this rank's peers on other nodes, which say what tokens come. Then it takes tokens of
one peer, S.MESSAGES_PER_STEP at a time, and waits for their relays. It stores each message at every rank of this node
that the relay names, in the slot that the home rank chose, and publishes that slot's flag: what the home rank itself
would have put there with one level. So receivers unpack the same bytes in the same places, and need not know. Payload,
scales, token, positions and weights are copied as they are, whatever the format. Local ids are computed from the
token's expert ids, for each rank. Forwarding goes on while later relays arrive, and receivers unpack meanwhile.

What is noted for combine, where the rows of these tokens will meet (``kernels.nodes.collect``): behind the rows of
``message_token``, the slot of each (node, rank of this node, token), -1 for none; behind the words of ``received``, the
tokens of each node that came. Cached routing has the slots already, and does not note them again.

A forwarder also forwards in a refused call, even as the rank that refuses: its peers may not know of it yet, and what
is under way must arrive before this rank grants credit. Then receivers read nothing of it, and nothing is noted.

Why the next call cannot overtake: forwarders count the call when they have read their relays, and CTA 0 of the receiver
waits for that before this rank grants credit (``levels.after_relaying``). Why they may store at once: a relay of this
call was put after every rank had granted its home rank credit for the call before.

Nothing that came over the wire becomes an address unchecked: a number of tokens, a slot or an id out of range is left
out, and the home rank's bit in MALFORMED tells the host.

Example: 6 ranks, S.NODE_SIZE 2, rank 4. Marks of rank 2 are [0, 1, 1], and the relay of token 1 has experts of ranks 3,
4 and 5 and slots [.., 0, 0, 1] there. Rank 4 stores the message in slot 0 of rank 2 in its own block, with the ids of
its own experts, and in slot 1 of rank 2 at rank 5. It notes [-1, 0, ..] and [-1, 1, ..] for node 1, and that 2 came.
"""

import triton
import triton.language as tl

from moelink.kernels.dispatch.pieces import place_at
from moelink.kernels.dispatch.route import first_of, owner_of
from moelink.kernels.nodes.levels import lanes_of, peer_of, relaying_context
from moelink.kernels.numeric import only
from moelink.kernels.sync.signals import (
    I32,
    I64,
    U8,
    count_arrival,
    is_poisoned,
    note_malformed,
    own_block,
    publish,
    report_failure,
    wait_all,
)
from moelink.memory.protocol import DISPATCH_BYTES, DISPATCH_FORWARDED, MARKS_HEADER, PHASE_DISPATCH

_HEADER = tl.constexpr(MARKS_HEADER)
_PHASE = tl.constexpr(PHASE_DISPATCH)
_ROLE = tl.constexpr(DISPATCH_FORWARDED)
_BYTES = tl.constexpr(DISPATCH_BYTES)
_AT_ONCE = tl.constexpr(1024)


@triton.jit
def _note_how_many(received, marks, number, tokens, S: tl.constexpr):
    """Note how many of ``tokens`` tokens came from node ``number``, by their ``marks``."""
    i = tl.arange(0, _AT_ONCE)
    came = tl.zeros([_AT_ONCE], tl.int32)
    for t0 in range(0, tokens, _AT_ONCE):
        came += (tl.load(marks + t0 + i, mask=t0 + i < tokens, other=0) != 0).to(tl.int32)
    tl.store(received + 2 * (S.WORLD_SIZE + 1) + number, tl.sum(came, 0))


@triton.jit
def _slots_of(ctx, relays, source, came, S: tl.constexpr):
    """Return the message slots [N, node ranks] that relays at ``relays`` [N] name, -1 for none and unless ``came``."""
    j = tl.arange(0, S.NODE_SIZE_POW2)[None, :]
    first = ctx.me // S.NODE_SIZE * S.NODE_SIZE
    mask = came[:, None] & (j < S.NODE_SIZE)
    slot = tl.load((relays + S.RELAY_SLOTS).to(I32)[:, None] + (first + j), mask=mask, other=-1)
    bad = (slot < -1) | (slot >= S.MAX_TOKENS)
    note_malformed(ctx.control, source, bad)
    return tl.where(bad, -1, slot)


@triton.jit
def _store_local_ids(relays, places, came, numbers, S: tl.constexpr):
    """Store the ids of the messages at ``places`` [N, node ranks], local to each rank, by their relays' experts."""
    j = tl.arange(0, S.NODE_SIZE_POW2)[None, :, None]
    k = tl.arange(0, S.TOPK_POW2)
    expert = tl.load(
        (relays + S.RELAY_EXPERTS).to(I32)[:, None] + k[None, :], mask=came[:, None] & (k < S.TOPK)[None, :], other=-1
    )
    expert = tl.where((expert >= 0) & (expert < S.NUM_EXPERTS), expert, -1)
    owner = owner_of(expert, numbers.first_expert, numbers.num_local_experts, S)
    rank = numbers.me // S.NODE_SIZE * S.NODE_SIZE + j
    local = tl.where(owner[:, None, :] == rank, expert[:, None, :] - first_of(rank, numbers.first_expert, S), -1)
    to = (places + S.MESSAGE_IDS).to(I32)[:, :, None] + k[None, None, :]
    tl.store(to, local, mask=(places != 0)[:, :, None] & (k < S.TOPK)[None, None, :])


@triton.jit
def _copy_words(relay, to, begin: tl.constexpr, end: tl.constexpr, block: tl.constexpr, S: tl.constexpr):
    """Copy words [begin, end) of the relay at ``relay`` to the messages at ``to`` [node ranks]; 0 for none."""
    for c0 in tl.static_range(begin, end, block):
        c = c0 + tl.arange(0, block)
        words = tl.load(tl.multiple_of(relay.to(I32), 16) + c, mask=c < end)
        for j in tl.static_range(S.NODE_SIZE):
            place = place_at(to, j)
            tl.store(tl.multiple_of(place.to(I32), 16) + c, words, mask=only(place != 0, c < end))


@triton.jit
def _forward_tokens(ctx, source, number, token, came, numbers, S: tl.constexpr):
    """Forward the relays of tokens ``token`` [N], of which those that ``came`` have arrived.

    Returns how many messages went to other ranks, and the slots [N, node ranks] of all messages, -1 for none.
    """
    mine = own_block(ctx.control, S)
    j = tl.arange(0, S.NODE_SIZE_POW2)[None, :]
    first = ctx.me // S.NODE_SIZE * S.NODE_SIZE
    relays = mine + S.OFFSET_RELAYS + (number * S.MAX_TOKENS + token).to(tl.int64) * S.RELAY_BYTES
    slot = _slots_of(ctx, relays, source, came, S)
    base = tl.load(ctx.table + (first + j), mask=j < S.NODE_SIZE, other=0)
    index = source * S.MAX_TOKENS + tl.maximum(slot, 0)
    places = tl.where(slot >= 0, base + S.OFFSET_MESSAGES + index.to(tl.int64) * S.MESSAGE_BYTES, 0)
    if S.TELLS_IDS:
        _store_local_ids(relays, places, came, numbers, S)
    for i in range(token.shape[0]):
        here = tl.arange(0, token.shape[0]) == i
        relay = tl.sum(tl.where(here, relays, 0), 0)
        to = tl.sum(tl.where(here[:, None], places, 0), 0)
        _copy_words(relay, to, 0, S.MESSAGE_IDS // 4, S.FORWARD_BLOCK, S)
        _copy_words(relay, to, S.MESSAGE_POSITIONS // 4, S.RELAY_EXPERTS // 4, S.FORWARD_TAIL, S)
    flags = (base + S.OFFSET_MESSAGE_FLAG).to(I64) + index
    publish(flags, slot >= 0, tl.zeros(slot.shape, tl.int64) + ctx.call)
    return tl.sum(tl.sum(((slot >= 0) & (first + j != ctx.me)).to(tl.int32), 1), 0), slot


@triton.jit
def forward_from(ctx, number, lane, lanes, notes, numbers, S: tl.constexpr):
    """Forward every ``lanes``-th group of tokens of the peer on node ``number``, from the ``lane``-th.

    Returns OK, TIMED_OUT or POISONED.
    """
    mine = own_block(ctx.control, S)
    poison = (mine + S.OFFSET_POISON).to(I64)
    source = peer_of(number, ctx.me, S)
    i = tl.arange(0, S.MESSAGES_PER_STEP)
    one = tl.arange(0, 1)
    flag = (mine + S.OFFSET_MARKS_FLAG).to(I64) + number + one
    ok, _, got = wait_all(flag, one == 0, ctx.call, poison, ctx.limit, S.CLOCK)
    report_failure(ok, ctx, source, _PHASE, ctx.call, got, S)
    if ok > 0:
        marks = mine + S.OFFSET_MARKS + tl.cast(number, tl.int64) * S.MARKS_BYTES
        said = tl.load(marks.to(I32) + one)
        note_malformed(ctx.control, source, (said < 0) | (said > S.MAX_TOKENS))
        tokens = tl.sum(tl.minimum(tl.maximum(said, 0), S.MAX_TOKENS), 0)
        marks = (marks + _HEADER).to(U8)
        if (lane == 0) & (numbers.status == 0):
            _note_how_many(notes.received, marks, number, tokens, S)
        moved = tl.full([], 0, tl.int32)
        for t0 in range(lane * S.MESSAGES_PER_STEP, tokens, lanes * S.MESSAGES_PER_STEP):
            if ok > 0:
                token = t0 + i
                came = tl.load(marks + token, mask=token < tokens, other=0) != 0
                flags = (mine + S.OFFSET_RELAY_FLAG).to(I64) + (number * S.MAX_TOKENS + token)
                ok, _, got = wait_all(flags, came, ctx.call, poison, ctx.limit, S.CLOCK)
                report_failure(ok, ctx, source, _PHASE, ctx.call, got, S)
                if ok > 0:
                    sent, slot = _forward_tokens(ctx, source, number, token, came, numbers, S)
                    moved += sent
                    if not S.CACHED_ROUTING:
                        j = tl.arange(0, S.NODE_SIZE_POW2)[None, :]
                        row = S.WORLD_SIZE + number * S.NODE_SIZE + j
                        noted = (token < tokens)[:, None] & (j < S.NODE_SIZE)
                        at = notes.message_token + row * S.MAX_TOKENS + token[:, None]
                        tl.store(at, slot, mask=only(numbers.status == 0, noted))
        if moved > 0:
            tl.atomic_add(ctx.control + _BYTES, moved.to(tl.int64) * S.MESSAGE_BYTES, sem="relaxed", scope="gpu")
    return ok


@triton.jit
def forward(program, num_programs, peers, notes, cached, numbers, S: tl.constexpr):
    """Run CTA ``program`` of the forwarder role. ``cached.received`` says, over cached routing, whether the call that
    made the routing brought anything."""
    ctx = relaying_context(peers, _ROLE, numbers)
    ok = 1 - is_poisoned(peers.record, peers.control, S)
    if S.CACHED_ROUTING:
        if tl.load(cached.received + 2 * S.WORLD_SIZE) != 0:
            ok = ok * 0
    others: tl.constexpr = S.NODES - 1
    for number in range(program % others, others, num_programs):
        if ok > 0:
            lanes = lanes_of(number, num_programs, S)
            ok = forward_from(ctx, number, program // others, lanes, notes, numbers, S)
    if ok > 0:
        count_arrival(peers.control, _ROLE, program, num_programs, "release")


@triton.jit
def send_and_forward(program, num_programs, sends, sending, S: tl.constexpr):
    """Run CTA ``program`` of the sender role, ``sends(program, senders, *sending, S)``, or as one of the last
    S.FORWARDERS that of the forwarder."""
    senders = num_programs - S.FORWARDERS
    if program < senders:
        sends(program, senders, *sending, S)
    else:
        peers, _, notes, cached, numbers = sending
        forward(program - senders, S.FORWARDERS, peers, notes, cached, numbers, S)
