"""Define the records that kernels receive: peers, inputs, outputs, notes, and the numbers of a call.

A launch passes each record as one argument; inside a kernel its fields are what they would be as arguments of their
own. A field of a record that a role does not use is an address that the role never touches.

Legend: ``W`` ranks that exchange (1 in allreduce mode), ``T`` max_tokens_per_rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Peers(NamedTuple):
    """Where the blocks of the ranks are.

    Attributes:
        table: [W] int64, addresses of the ranks' blocks; 0 for ranks of other nodes.
        record: [RECORD_WORDS] int64 on the host: the error record of this communicator (``memory.protocol``).
        control: [CONTROL_WORDS] int64, this rank's counters, inside its block.
    """

    table: Any
    record: Any
    control: Any


class CallContext(NamedTuple):
    """The context of a wait and of a report of its failure: where ranks are, this rank, and this call.

    Attributes:
        table, record, control: as in :class:`Peers`.
        me: this rank's place in ``table``.
        limit: ticks of the clock until a wait has expired.
        call: number of this call, int64, from 1.
        trace: the :class:`Stamps` of this CTA's record; 0 where nothing is traced.
    """

    table: Any
    record: Any
    control: Any
    me: Any
    limit: Any
    call: Any
    trace: Any = 0


class Stamps(NamedTuple):
    """Where stamps of a trace go (``tracing.device.stamps``).

    Attributes:
        at: address of a CTA's record, or addresses of words in it; 0 while no trace is open.
        steps: address of the counter that interpreted kernels stamp.
    """

    at: Any
    steps: Any


class RoutingNotes(NamedTuple):
    """Routing notes: what a dispatch records for combine, and for dispatches over the same routing.

    Attributes:
        rows_of_message: [W, T, topk] int32 (layout "rank": [W, T, 1]), output row of each (source, slot, top-k slot):
            -1 where it is not for this rank, -2 where it did not fit. Undefined past a source's messages.
        message_token: [W, T] int32, source token of each (source, slot).
        received: [W + 1, 2] int32: messages and tokens of each source; then 1 if the call was refused or failed, and
            the number of the dispatch.
        sent: [W + 1] int32: messages that went to each rank; then the number of the call that computed the routing, of
            which 31 bits are kept. By it ranks notice that they use cached routing of different calls.
        slot_of: [num_tokens, W] int32, the own token's message slot at each rank, -1 where it did not go.
    """

    rows_of_message: Any
    message_token: Any
    received: Any
    sent: Any
    slot_of: Any


class CachedRouting(NamedTuple):
    """What the call that computed the routing received; read only by a dispatch over cached routing.

    Attributes:
        received: as in its :class:`RoutingNotes`.
        counts: [num_local_experts, world_size] int32, its rows per (local expert, source rank).
    """

    received: Any
    counts: Any


class DispatchInputs(NamedTuple):
    """The inputs of the sender role.

    Attributes:
        x: [num_tokens, hidden_size] rows.
        scales: [num_tokens, scale_width] row-major scales of rows that are already quantised.
        input_scale: fp32, one element.
        topk_ids: [num_tokens, topk] int32 or int64.
        topk_weights: [num_tokens, topk] router weights.
    """

    x: Any
    scales: Any
    input_scale: Any
    topk_ids: Any
    topk_weights: Any


class DispatchOutputs(NamedTuple):
    """The outputs of the receiver role: fields of :class:`moelink.DispatchOutput`.

    Where a later launch writes the scales (``S.SCALES_LATER``), ``scales`` is [rows] int32: the number of the message
    that each row came with. ``weights`` are the rows' router weights, in layout "rank" those of all slots.
    """

    tokens: Any
    scales: Any
    row_offsets: Any
    expert_ids: Any
    src_info: Any
    scales_offsets: Any
    weights: Any
    topk_ids: Any
    num_recv_tokens: Any
    overflow: Any
    counts: Any


class DispatchNumbers(NamedTuple):
    """Numbers of a dispatch. No kernel is compiled for their values, because these change from call to call.

    Attributes:
        me: this rank's place in the table of peers.
        rank: its number in the group.
        first_expert, num_local_experts: the experts that this rank owns.
        num_groups: groups of its output.
        num_tokens: own tokens.
        tokens_per_program, split: how senders share them (``kernels.launch.grid``).
        shared_begin, shared_end: own tokens of the fused shared expert's group, [begin, end).
        capacity: rows of the output; layout "masked", and where rows stay in the messages: of each group.
        scale_rows: rows of a column of scales, where they are in columns.
        counts_stride: columns of ``counts``.
        status: STATUS_OK, or STATUS_ABORT of a rank that refused its arguments.
        senders: CTAs of the sender role in a fused launch.
        limit: ticks of the clock until a wait has expired, int64.
        programs: CTAs that work.
    """

    me: Any
    rank: Any
    first_expert: Any
    num_local_experts: Any
    num_groups: Any
    num_tokens: Any
    tokens_per_program: Any
    split: Any
    shared_begin: Any
    shared_end: Any
    capacity: Any
    scale_rows: Any
    counts_stride: Any
    status: Any
    senders: Any
    limit: Any
    programs: Any


class Batch(NamedTuple):
    """Tokens whose messages a CTA sends together.

    Attributes:
        token: [N].
        expert, owner, position: [N, slots] int32; anything if they do not travel.
        own: [N, ranks], whether the CTA sends the token there. slot: [N, ranks], the message's slot.
    """

    token: Any
    expert: Any
    owner: Any
    position: Any
    own: Any
    slot: Any


class Run(NamedTuple):
    """Which tokens a CTA sends: of this batch [begin, end); next ``behind``, and none from ``last`` on."""

    begin: Any
    end: Any
    behind: Any
    last: Any


class Groups(NamedTuple):
    """Where the groups of a dispatch's output are, within a kernel.

    Attributes:
        sizes: [N] int32, routed rows of each local expert.
        starts: its first row.
        aligned: its rows with padding.
        bases: its first 128-row block of scales, where these are in tiles.
        shared, shared_rows: rows of the fused shared expert's group, without and with padding.
    """

    sizes: Any
    starts: Any
    aligned: Any
    bases: Any
    shared: Any
    shared_rows: Any


class ReceiverSteps(NamedTuple):
    """What the receiver role does in one way where it counts, and in another over cached routing: Triton functions.

    Attributes:
        wait: waits for what all sources say, and computes the rows of each local expert.
        columns: says how many messages of a source come, and how they are ordered.
        compare: says which ranks refused this call or are mismatched.
        blame: notes one mismatched rank.
        prepare: writes the offsets, and waits for all else that unpacking needs.
        destination: says where the rows of a source go.
        by: the :class:`RowSource`.
    """

    wait: Any
    columns: Any
    compare: Any
    blame: Any
    prepare: Any
    destination: Any
    by: Any


class RowSource(NamedTuple):
    """How a receiver knows the place of a row: by counts, by a table, or by the routing record of an earlier call.

    Attributes:
        await_place: waits until it is known.
        place_of: finds the rows of messages.
    """

    await_place: Any
    place_of: Any


class Lane(NamedTuple):
    """The ``lane``-th of ``lanes`` shares."""

    lane: Any
    lanes: Any


class Source(NamedTuple):
    """What a receiver knows of the messages of one source, from its counts.

    Attributes:
        rank: the source.
        count: its messages.
        programs: its sending CTAs, 0 where messages come in any order.
        most: the most messages of one of these CTAs.
        before, rows: [N] int32, rows for each local expert of the sources before this one, and of this one; over cached
            routing ``rows`` are those of all sources. With a row table they are not used.
        is_last: the CTA waits for no other rank once it has seen its last message of this one.
    """

    rank: Any
    count: Any
    programs: Any
    most: Any
    before: Any
    rows: Any
    is_last: Any


class Destination(NamedTuple):
    """Where the rows of one source go.

    Attributes:
        base: [N] int32, first row of this source in each expert's group; in layout "rank" its first row.
        sizes: [N] int32, its rows there.
        starts, bases: as in :class:`Groups`.
    """

    base: Any
    sizes: Any
    starts: Any
    bases: Any


class Arrived(NamedTuple):
    """Messages that have arrived: their ``source``, their numbers ``at`` [n] among those of all ranks, and which of
    them are ``valid`` [n]."""

    source: Any
    at: Any
    valid: Any


class Header(NamedTuple):
    """The headers of messages, as they came.

    Attributes:
        token: [n] source tokens.
        local_ids, weights: [n, slots].
        positions: [n, slots] among the earlier pairs of the same (source, expert).
    """

    token: Any
    local_ids: Any
    positions: Any
    weights: Any


class Placed(NamedTuple):
    """Where the rows of messages go, [n, rows] each.

    Attributes:
        row: the row.
        keep: whether there is one, within the output's capacity.
        inner, block: for scales in tiles or by group, how far it is into its group, and the group's first block.
    """

    row: Any
    keep: Any
    inner: Any
    block: Any


class CreditNumbers(NamedTuple):
    """Numbers of a launch that only grants credits: this rank's place in the table of peers, and the CTAs that work."""

    me: Any
    programs: Any


class GiveUpNumbers(NamedTuple):
    """Numbers of a launch that only tells peers that this rank has ended its part.

    Attributes:
        me: this rank's place in the table of peers.
        peer, phase, call, expected, got: the failure (:class:`moelink.control.probe.Failure`).
        programs: CTAs that work.
    """

    me: Any
    peer: Any
    phase: Any
    call: Any
    expected: Any
    got: Any
    programs: Any


class CombineInputs(NamedTuple):
    """The inputs of combine.

    Attributes:
        y: [y_rows, hidden_size] the experts' outputs.
        row_weights: [y_rows] router weights that came with the rows.
        home_weights, topk_ids: [num_tokens, topk] of the own tokens.
        shared: [num_tokens, hidden_size] to add before rounding.
        epilogue: a bias [hidden_size], or a residual [num_tokens, hidden_size], to add before rounding.
    """

    y: Any
    row_weights: Any
    home_weights: Any
    topk_ids: Any
    shared: Any
    epilogue: Any


class CombineOutputs(NamedTuple):
    """Where combine's result goes.

    Attributes:
        out: [num_tokens, hidden_size], or unreduced [num_tokens, topk, hidden_size].
        epilogue_tensors: tuple of tensors of the user's hook, which stores the result instead.
    """

    out: Any
    epilogue_tensors: Any


class CombineNumbers(NamedTuple):
    """Numbers of a combine. No kernel is compiled for their values.

    Attributes:
        me, first_expert, num_local_experts, num_tokens, shared_begin, shared_end, status, limit, programs: as in
            :class:`DispatchNumbers`.
        y_rows: rows of ``y``.
        slot_begin: first top-k slot of this pass.
        spread: CTAs that share a message.
        senders: CTAs of the expert role in a fused launch.
    """

    me: Any
    first_expert: Any
    num_local_experts: Any
    num_tokens: Any
    y_rows: Any
    shared_begin: Any
    shared_end: Any
    slot_begin: Any
    spread: Any
    status: Any
    senders: Any
    limit: Any
    programs: Any


class Message(NamedTuple):
    """A message whose rows go home.

    Attributes:
        slot: its number among those of its home rank.
        token: the home rank's token.
        valid: whether there is one.
        rows: where the row numbers of its top-k slots are.
    """

    slot: Any
    token: Any
    valid: Any
    rows: Any


class Present(NamedTuple):
    """The rows of a message that are there (``kernels.combine.present_rows``).

    Attributes:
        rows: [slots] row numbers.
        nth: [slots] their number among those that are there, -1 for the others.
        count: how many are there.
    """

    rows: Any
    nth: Any
    count: Any


class Share(NamedTuple):
    """Parts [begin, begin + count) of the columns of a message."""

    begin: Any
    count: Any


class Piece(NamedTuple):
    """A part of a token's result that a CTA of combine's home role stores.

    Attributes:
        part, parts: every ``parts``-th block of columns from ``part``.
        is_last: the CTA waits for no other rank once the rows of this part have come.
    """

    part: Any
    parts: Any
    is_last: Any
