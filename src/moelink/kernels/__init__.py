"""Triton kernels of the symmetric transport, compiled on GPUs and interpreted on CPUs from the same source.

A token meets the files of ``dispatch`` in this order, its row those of ``combine`` on the way home:

=====================  ==============================================================================================
records                what kernels are given: peers, inputs, outputs, notes, numbers
dispatch/kernel        both roles in one launch, or in two
dispatch/route         who owns an expert; what comes before a token; what CTAs count for one another
dispatch/counts        the CTA that tells every rank how much comes
dispatch/send          the sender role: messages, and the CTAs that store them; send_cached: over a cached routing
dispatch/receive       the receiver role: wait for counts and messages; row_offsets: where rows go
dispatch/unpack        messages to their rows, and the zeros behind each group
dispatch/scales        scales of many tokens, in a launch of their own
combine/kernel         both roles in one launch, or in two
combine/send           the expert role: ``send_tokens_back``
combine/reduce         the home role: ``wait_for_all_arrivals``, ``reduce_and_copy_to_output``,
                       ``copy_shared_expert_outputs``
=====================  ==============================================================================================

What they are built of:

=====================  ==============================================================================================
sync/signals           publish, wait, report a failure: the memory order of every signal
sync/ll_words          words that carry their call's number, and so are their own signal
sync/lamport_slots     rows that are their own signal: sums of small calls go home without flags
sync/credit            when a peer's block may be overwritten
sync/internode         puts to ranks of other nodes; quiesce: waiting for what nobody will read
launch/constants       what is fixed when a kernel is compiled
launch/grid            how many CTAs a launch has, and what each of them does; sm_limit: which SMs they use
launch/launcher        compiles and launches; cache_keys: every process finds what another one has compiled
numeric                rounding
activation, epilogues  SiLU and quantise between the two grouped products; Triton halves of ready epilogues
=====================  ==============================================================================================

Importing this package does not import triton; its modules do.
"""
