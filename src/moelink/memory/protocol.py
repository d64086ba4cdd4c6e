"""Numbers shared by kernels and host: words of the control block and of an error record, phases, codes, states."""

POISON_WORDS = 8
"""int64 words of one error record: code, rank, peer, phase, call, expected, got, (unused)."""

CONTROL_WORDS = 24
"""int64 words of the control block, in this order:"""
DISPATCH_SENT, DISPATCH_RECEIVED, COMBINE_SENT, COMBINE_RECEIVED = 0, 1, 2, 3
"""calls completed by each role of each phase, times ``1 << CALL_SHIFT``; a call's programs add that much together"""
DONE = 4
"""+ role: programs of that role that arrived in this call, where the last one has something to do"""
CLAIM = 8
"""1 once a program has claimed the error record"""
INVALID_IDS, OVERFLOW, DISPATCH_BYTES, COMBINE_BYTES = 9, 10, 11, 12
"""sums over all calls"""
FENCE = 13
"""always 0; read to order stores"""
MALFORMED = 14
"""bit r (62 for higher ones too): rank r sent a count or an index that cannot be; it was not used"""
MALFORMED_RANKS = 62
COMBINE_WITH_FLAGS = 15
"""+ parity of the call: the combine call after the last one that a rank refused or made otherwise"""

RECORD_WORDS = 16
"""int64 words of the host-visible record: an error that poisons, then one that does not (a peer's refusal)."""
ABORT_RECORD = 8

CALL_SHIFT = 20
"""bits of a role's word that count the programs of a call under way; a launch has fewer programs than these count"""

TURN_KINDS = 4
"""Launches that may run at the same time, each with turns of its own (``kernels.launch.sm_limit``): a role, or both, of
a phase, numbered as roles are."""
MOST_MULTIPROCESSORS = 384
"""of a device"""
TURN_WORDS = 4 + MOST_MULTIPROCESSORS
"""int32 words: numbers handed out, multiprocessors that asked, programs that left, (unused), one for each of these"""

PHASE_DISPATCH, PHASE_COMBINE = 0, 1
PHASES = ("dispatch", "combine")

CODE_TIMEOUT, CODE_ABORT, CODE_OPTIONS, CODE_ROUTING = 1, 2, 3, 4

STATUS_OK, STATUS_ABORT = 0, 1

OPTIONS_BY_ROW, OPTIONS_SUMS = 1, 2
"""What a combine sends home: every row, or sums of rows. Told in combine_status beside the refusal; across nodes its
high half is the number of messages."""

COUNT_HEADER = 8
"""Words before the counts of a counts row: status, messages, tokens, sending programs (0: each counted alone), most
messages of one of them, options, the call whose routing this one uses again, (unused). Each word carries the call
beside its value (``kernels.sync.ll_words``)."""

MAX_SENDERS = 512
"""Most programs that cut a rank's tokens into runs, so that what each of them counted has a place."""

COUNTED_ALONE = 512
"""Of so many tokens, or fewer, every sending program counts for itself what is before its own, unless its communicator
is for more than MANY_TOKENS."""

FEW_TOKENS, MANY_TOKENS = 256, 1024
"""Communicators of up to FEW_TOKENS per rank are built for latency, of more than MANY_TOKENS for throughput, others for
something in between."""

SMALL_BYTES = 1 << 25
"""Most bytes of a block for sums that go home without flags (``kernels.sync.small_calls``), which have a place of their
own. Communicators of up to FEW_TOKENS per rank have it, and of up to MANY_TOKENS where it holds all of a call's."""

MOST_THREADS = 512
"""Most threads of a program of any launch: 8 warps, which have 64 threads on AMD."""

COMBINE_BLOCK = 2048
"""Most columns of a row that a program of combine sums at a time."""

RING_HEADER_WORDS, RING_ENTRY_WORDS = 8, 8
"""int64 words before the entries of a courier's ring: tickets given, entries, (unused); and of one entry: destination
address, source address, bytes, signal's address, its value, peer, (unused), ticket + 1 once the entry is complete."""

ROW_ABSENT, ROW_DROPPED = -1, -2
"""rows_of_message: the slot is not for this rank; the row did not fit ``capacity``."""
