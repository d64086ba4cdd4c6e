"""Define the numbers that kernels and host share: words of the control block and of error records, phases, codes."""

POISON_WORDS = 8
"""int64 words of one error record: code, rank, peer, phase, call, expected, got, (unused)."""

CONTROL_WORDS = 24
"""int64 words of the control block. Their indices:"""
DISPATCH_SENT, DISPATCH_RECEIVED, COMBINE_SENT, COMBINE_RECEIVED = 0, 1, 2, 3
"""calls that each role of each phase has completed, times ``1 << CALL_SHIFT``, which the CTAs of a call add together"""
DONE = 4
"""+ role: CTAs of that role that have arrived in this call, in roles whose last CTA has work of its own"""
CLAIM = 8
"""1 once a CTA has claimed the error record"""
INVALID_IDS, OVERFLOW, DISPATCH_BYTES, COMBINE_BYTES = 9, 10, 11, 12
"""sums over all calls"""
FENCE = 13
"""always 0; read to order stores"""
MALFORMED = 14
"""bit r (62 for all higher ranks): rank r sent a count or an index out of range, which was not used"""
MALFORMED_RANKS = 62
COMBINE_WITH_FLAGS = 15
"""+ parity of the call: one more than the last combine in which a rank refused its arguments or sent rows with flags"""
TRACE_AT = 17
"""address of the open trace's buffer, 0 for none (``tracing.device.stamps``)"""
TRACE_STEPS = 18
"""of rank 0: the count of the stamps of interpreted kernels"""
CLOCK_ASKED, CLOCK_TOLD = 19, 20
"""questions and answers of ranks that compare their clocks (``tracing.device.clocks``)"""
DISPATCH_FORWARDED, COMBINE_COLLECTED = 21, 22
"""calls that the forwarders of a two-level dispatch, and the collectors of a combine, have completed, counted as for
other roles"""
SOME_MASKED = 23
"""1 if some ranks are masked (``memory.absence``)"""

RECORD_WORDS = 16
"""int64 words of the host-visible record: an error that poisons the communicator, then a peer's refusal."""
ABORT_RECORD = 8

CALL_SHIFT = 20
"""Low bits of a role's word, which count the CTAs of a call under way; a launch has fewer CTAs than they can count."""

SM_LIMIT_KINDS = 4
"""Launches that may run at the same time, each with its own words for the SM limit (``kernels.launch.sm_limit``): a
role, or both, of a phase, numbered as roles are."""
MAX_SMS = 384
"""Most SMs of a device."""
SM_LIMIT_WORDS = 4 + MAX_SMS
"""int32 words of one SM limit: numbers given out, SMs seen, CTAs that left, (unused), then one word for each SM."""

PHASE_DISPATCH, PHASE_COMBINE = 0, 1
PHASES = ("dispatch", "combine")

CODE_TIMEOUT, CODE_ABORT, CODE_OPTIONS, CODE_ROUTING = 1, 2, 3, 4

STATUS_OK, STATUS_ABORT = 0, 1

OPTIONS_BY_ROW, OPTIONS_SUMS, OPTIONS_WEIGHED_SUMS = 1, 2, 3
"""The result of a combine: every row, sums of rows, or sums of rows that the expert's rank has multiplied by router
weights. Stored in combine_status beside the refusal and the rest of ``kernels.sync.quiesce.beside_status``."""
OPTIONS_BY_ROW_SUMMED = 4
"""Every row, which the home rank sums. Headers of the collective transport alone tell it from every row."""


def dispatch_options(weights: bool, cached: bool) -> int:
    """Return the options of a dispatch, with router ``weights``, over an earlier, ``cached`` routing."""
    return 1 + int(weights) + 2 * int(cached)


def combine_options(sums: bool, weighed: bool) -> int:
    """Return the options of a combine that returns ``sums``, of ``weighed`` rows."""
    return OPTIONS_BY_ROW if not sums else OPTIONS_WEIGHED_SUMS if weighed else OPTIONS_SUMS


COUNT_HEADER = 8
"""Words before the counts in a row of ``counts``: status, messages, tokens, sending CTAs (0: each counted for itself),
most messages of one of them, options, the call whose routing is cached, (unused). Each word carries the call number
beside its value (``kernels.sync.ll_words``)."""

TABLE_GO, TABLE_NOTHING = 1, 2
"""Words of the head of ``row_table``: unpack the messages; or nothing, as a rank refused the call or is mismatched."""

MAX_SENDERS = 512
"""Most sending CTAs: ``block_counts`` has a row for each."""

MOST_THREADS = 512
"""Most threads of a CTA of any launch: 8 warps, which have 64 threads on AMD."""

RING_HEADER_WORDS, RING_ENTRY_WORDS = 8, 8
"""int64 words of a network proxy's ring before its entries: tickets given, number of entries, and at RING_STAGED the
address of memory outside the blocks from which rows are put that no relay takes (``kernels.nodes.past``); and of one
entry: destination address, source address, bytes, the signal's address and value, peer, (unused), ticket + 1 once the
entry is complete."""
RING_STAGED = 2

MARKS_HEADER = 16
"""Bytes before the marks of a rank's tokens: their number, int32, and padding (``kernels.nodes.relay``)."""

ANY_CALL = 1 << 62
"""In the words of a masked rank (``memory.absence``): it has reached any call."""
MASKED_CALL = -0x6D61736B
"""In place of the call number in a masked rank's LL words. Those of calls are not negative."""
OPTIONS_OF_NOBODY = 0x7FFFFFFF
"""In place of a masked rank's options of a dispatch."""
STATUS_OF_NOBODY = -1
"""In place of a masked rank's ``combine_status``. Those of other ranks are not negative."""

ROW_ABSENT, ROW_DROPPED = -1, -2
"""Values of rows_of_message: the slot's expert is on another rank; the row did not fit ``capacity``."""
