"""Hold the Triton kernels of the symmetric transport. One source compiles on GPUs and runs interpreted on CPUs.

A token meets the files of ``dispatch`` in this order, and its row those of ``combine`` on the way home:

=====================  ==============================================================================================
records                what kernels receive: peers, inputs, outputs, notes, numbers
dispatch/kernel        both roles in one launch, or in two
dispatch/route         which rank owns an expert; what precedes a token; block counts
dispatch/counts        the CTA that tells every rank how many messages and rows come
dispatch/send          the sender role: CTAs that store messages; pieces: how a row is read, encoded and stored
dispatch/receive       the receiver role: wait for counts and messages; row_offsets: where rows go
dispatch/receive_planned  few tokens of four ranks or more: one CTA plans for all where rows go; row_table: where it
                       says so
dispatch/unpack        copies messages to their rows
dispatch/padding       zeros the padding of each group, while messages are on their way
dispatch/scales        writes the scales of large calls, in a launch of its own
dispatch/send_cached   the sender role over cached routing; receive_cached: the receiver role
combine/kernel         both roles in one launch, or in two
combine/send           the expert role: ``send_tokens_back``
combine/own_rows       rows of a rank's own tokens that do not travel, with two ranks and many tokens
combine/heads          what ranks tell one another of a combine; refusals
combine/arrivals       the waits of the home role
combine/reduce         the home role: ``gather_home``, ``reduce_and_copy_to_output``
combine/single_rows    both roles where rows travel one by one
combine/finish         what is added to a token's sum, and the store
combine/phases         the home role in launches of its own: wait, ``copy_shared_expert_outputs``, reduce
=====================  ==============================================================================================

The parts that they are built from:

=====================  ==============================================================================================
sync/signals           publish, wait, report failure: the memory order of every signal
sync/ll_words          words that carry their call number, and so need no signal
sync/lamport_slots     rows that are their own signal: sums that travel home without flags
sync/credit            when a rank may overwrite a peer's block
sync/quiesce           waiting for puts that nobody will read
nodes                  what knows two nodes: puts, and the relays of the two-level form
launch/constants       launch constants: what is fixed when a kernel is compiled
launch/grid            how many CTAs a launch has, and what each does; roles: runs them; sm_limit: which SMs they use
launch/own_rows        which combines keep own rows where they are
launch/launcher        compiles and launches; cache_keys: lets every process find what another one has compiled
launch/row_launch      launches kernels on rows, which are prepared once; replay: makes such launches again;
                       tile_counters: by which their programs take tiles
numeric                rounding
scale_tiles            where scales are in tiles of 128 rows
epilogues              Triton halves of the built-in epilogues
=====================  ==============================================================================================

``tracing.device`` has the stamps of a CTA where a trace asks for them, and ``rows`` the kernels of the layers.
Importing this package does not import triton; its modules do.
"""
