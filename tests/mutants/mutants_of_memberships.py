# ruff: noqa: E501 - a row is three lines
"""Faults in masks and admissions (``mutants_table``).

Three lines a row: fault and file, text and replacement, test.
"""

from __future__ import annotations

from tests.mutants.mutants import Mutant

_CALLS = "kernels/test_protocol_masked.py::test_calls_go_on_without_a_masked_rank[{}-few]"
_REFUSED = "kernels/test_protocol_masked.py::test_refusals_name_a_rank_that_takes_part[few]"
_MISMATCH = "kernels/test_protocol_masked.py::test_a_mismatch_names_a_rank_that_takes_part[few]"
_RENEWED = "memory/test_renewed.py::{}"
_BAD = "control/test_elastic.py::test_what_cannot_be_masked_or_admitted_is_refused_by_name"
_DEATH = "control/test_elastic.py::test_a_rank_that_dies_in_mask_is_named_and_masked_as_well[building]"
_NEWCOMER = (
    "control/test_elastic.py::test_a_newcomer_that_dies_in_admit_is_named_and_nothing_has_changed[run-collective]"
)
_BOUND = "control/test_elastic.py::test_bound_calls_go_on_at_the_same_addresses[run]"
_SEEDS = "control/test_elastic.py::test_every_schedule_ends_with_the_sums_of_the_experts_present[few]"
_DROPPED = "transports/test_dropped.py::{}"
_FAR = "nodes/test_protocol_masked_nodes.py::test_calls_go_on_without_masked_ranks[apart-few]"
_FAR_REFUSED = "nodes/test_protocol_masked_nodes.py::test_refusals_name_a_rank_that_takes_part[levels-1-few]"
_PUTS = "nodes/test_network_masked.py::{}"

# fmt: off
OF_MEMBERSHIPS = (
    Mutant("a masked rank never grants credit", "memory/absence.py",
           'parts["credit"][:, ranks] = ANY_CALL', 'parts["credit"][:, ranks] = 1',
           _CALLS.format("sums")),
    Mutant("counts of a masked rank are waited for", "kernels/dispatch/row_offsets.py",
           "((word >> 32) != stamp) & ((word >> 32) != _MASKED), S.WORLD_SIZE - i // _HEADER, 0)", "((word >> 32) != stamp), S.WORLD_SIZE - i // _HEADER, 0)",
           _CALLS.format("sums")),
    Mutant("a planner waits for counts of a masked rank", "kernels/sync/ll_words.py",
           " & ((word >> 32) != _MASKED)).to(tl.int32)", ").to(tl.int32)",
           _CALLS.format("planned")),
    Mutant("options of a masked rank are compared", "kernels/dispatch/receive.py",
           "(tl.arange(0, S.WORLD_SIZE_POW2) < S.WORLD_SIZE) & (options != _OF_NOBODY)", "tl.arange(0, S.WORLD_SIZE_POW2) < S.WORLD_SIZE",
           _CALLS.format("every_row")),
    Mutant("a masked rank is never in a combine", "memory/absence.py",
           'parts["combine_head"][ranks] = ANY_CALL', 'parts["combine_head"][ranks] = 1',
           _CALLS.format("sums")),
    Mutant("a masked rank is named for a refusal", "kernels/combine/heads.py",
           "tl.where(mask & ((status & 1) != 0), r,", "tl.where((status & 1) != 0, r,",
           _REFUSED),
    Mutant("a masked rank refuses each combine", "kernels/combine/heads.py",
           "mask = mask & (heads >= 0)", "mask = mask & (heads >= -1)",
           _CALLS.format("sums")),
    Mutant("a masked rank is named for another dispatch", "kernels/sync/quiesce.py",
           "mask = (r < S.WORLD_SIZE) & (heads >= 0)", "mask = r < S.WORLD_SIZE",
           _MISMATCH),
    Mutant("rows of an earlier call stand in for those of a masked rank", "kernels/combine/arrivals.py",
           "mask=r < S.WORLD_SIZE, other=0) < 0, -1, slots)", "mask=r < S.WORLD_SIZE, other=0) < -1, -1, slots)",
           _CALLS.format("every_row")),
    Mutant("a new block is mapped beside the old one", "memory/posix.py",
           "flags | _MAP_FIXED, file, 0)", "flags, file, 0)",
           _RENEWED.format("test_a_new_block_is_where_the_old_one_was_and_late_writes_miss_it")),
    Mutant("a block stays what it was", "memory/posix.py",
           "_map_over(self._memory.peer(rank), self._files.get(rank))", "self._files.get(rank)",
           _RENEWED.format("test_a_new_block_is_where_the_old_one_was_and_late_writes_miss_it")),
    Mutant("a new block is not filled in", "memory/posix.py",
           '            fill(_view(fd, nbytes, "this rank\'s shared memory"))\n', "",
           _RENEWED.format("test_a_new_block_is_where_the_old_one_was_and_late_writes_miss_it")),
    Mutant("a renewal that is given up keeps its files open", "memory/posix.py",
           "os.close(self._files.popitem()[1])", "self._files.popitem()",
           _RENEWED.format("test_a_renewal_that_is_given_up_changes_nothing")),
    Mutant("tokens of absent experts are sent", "transports/collective/dispatch.py",
           'if masked and config.mode == "alltoall":', 'if masked and config.mode == "allreduce":',
           _SEEDS),
    Mutant("headers of masked ranks are awaited", "transports/collective/group_wire.py",
           "return [counts[rank] for rank in self._ranks]", "return list(counts)",
           _SEEDS),
    Mutant("outputs of another membership are combined", "transports/endings.py",
           "self.identity, self.detector, self.masked = identity, detector, masked", "self.detector, self.masked = detector, masked",
           _BAD),
    Mutant("the error that ended a communicator stays after a mask", "transports/endings.py",
           "        self.fate.error = None\n", "",
           _SEEDS),
    Mutant("a masked rank that lives is not told", "ops/changes.py",
           "    detector.tell_masked(leaving)\n", "",
           _BAD),
    Mutant("the last copy of an expert may be masked", "control/membership.py",
           "lost = sorted(set(experts) - kept)", "lost = sorted(kept - kept)",
           _DROPPED.format("test_what_may_be_masked_and_admitted")),
    Mutant("a rank masks itself", "control/membership.py",
           "if rank not in present or rank == config.rank]", "if rank not in present]",
           _BAD),
    Mutant("a rank that takes part is admitted", "control/membership.py",
           "if not given or any(rank not in masked for rank in given):", "if not given:",
           _DROPPED.format("test_what_may_be_masked_and_admitted")),
    Mutant("a member that refuses an admission says nothing", "ops/changes.py",
           "            decline(world, config.timeout)\n", "",
           _BAD),
    Mutant("newcomers are named by their place among members", "control/admission.py",
           "peer = members[error.peer] if 0 <= error.peer < len(members) else -1", "peer = error.peer + len(members)",
           _NEWCOMER),
    Mutant("a failed admission changes the membership", "ops/changes.py",
           "        world = receive(world,", "        session.masked = ()\n        world = receive(world,",
           _NEWCOMER),
    Mutant("ranks in a mask are named by their place among survivors", "ops/changes.py",
           "        with named_as_before(around, survivors):", "        with named_as_before(None, survivors):",
           _DEATH),
    Mutant("calls that were prepared before a mask stay", "lifetime.py",
           "            ep._fast_path = ep._session.fast_path()\n", "            pass\n",
           "control/test_elastic.py::test_every_schedule_of_the_symmetric_transport[few]"),
    Mutant("bound calls go on in the old block", "transports/build.py",
           "        renewal.commit()", "        renewal.discard()",
           _BOUND),
    Mutant("pairs of present experts count as dropped", "output.py",
           "(absent[torch.where(valid, ids, 0).long()] != present)", "(absent[torch.where(valid, ids, 0).long()] == present)",
           _DROPPED.format("test_an_output_counts_pairs_of_absent_experts[collective]")),
    Mutant("new blocks are mapped while puts are under way", "transports/build.py",
           "with transport.ranks[0].network.without(masked):", "if masked:",
           _PUTS.format("test_a_late_put_of_a_member_misses_the_new_blocks")),
    Mutant("puts that are under way outlast a mask", "memory/nodes/network_proxy.py",
           "self._under_way, self.lost, self._taken, self.failure = [], [], 0, None", "self.lost, self._taken, self.failure = [], 0, None",
           _PUTS.format("test_no_put_of_before_arrives_after_a_change[under way]")),
    Mutant("puts in the ring outlast a mask", "memory/nodes/network_proxy.py",
           "self._words[0], self._words[RING_HEADER_WORDS:] = 0, 0", "self._words[0] = 0",
           _PUTS.format("test_no_put_of_before_arrives_after_a_change[in the ring]")),
    Mutant("puts go to masked ranks", "memory/nodes/network_proxy.py",
           "if peer in self._masked:", "if peer in self._masked and peer < 0:",
           _PUTS.format("test_no_put_of_before_arrives_after_a_change[under way]")),
    Mutant("counts of a masked rank of another node are waited for", "memory/absence.py",
           'regions["counts_flag"].view(block)[ranks] = ANY_CALL', 'regions["counts_flag"].view(block)[ranks] = 1',
           _FAR),
    Mutant("marks of a masked rank are waited for", "memory/absence.py",
           "for peer in peers]] = ANY_CALL", "for peer in peers]] = 1",
           _FAR),
    Mutant("relays go to a masked peer", "kernels/nodes/relay.py",
           "                if is_masked(ctx.control, peer, S):\n", "                if is_masked(ctx.control, peer, S) & (peer < 0):\n",
           _FAR),
    Mutant("ids past a relay are taken for local ones", "kernels/nodes/past.py",
           "return tl.where(ids <= _FIRST_ID, tl.where(here, local, -1), ids)", "return ids",
           _FAR),
    Mutant("home waits for a masked collector", "kernels/nodes/level_rows.py",
           "direct = is_intra_node(r, ctx.me, S) | lacks_relay(ctx.control, ctx.me, r, S)", "direct = is_intra_node(r, ctx.me, S)",
           _FAR),
    Mutant("rows of masked ranks are waited for after a refusal", "kernels/sync/quiesce.py",
           "status = tl.maximum(status, 0)", "status = tl.maximum(status, -1)",
           _FAR_REFUSED),
    Mutant("ranks are masked over NVSHMEM", "ops/changes.py",
           "    refuse_nvshmem(what, config, session.devices[0])\n", "",
           _PUTS.format("test_mask_and_admit_are_refused_over_nvshmem_before_anything_is_sent")),
    Mutant("replicas on masked ranks are chosen", "nn/placement.py",
           "there or places for there, places", "places for there, places",
           _DROPPED.format("test_replicas_that_are_there_are_chosen")),
)
