# ruff: noqa: E501 - a row is three lines
"""Faults in two levels between nodes (``mutants_table``).

Three lines a row: fault and file, text and replacement, test.
"""

from __future__ import annotations

from tests.mutants.mutants import Mutant

_CALL = "nodes/test_protocol_levels.py::test_scenario_under_every_schedule[fused_pair-few]"
_REFUSED = "nodes/test_protocol_levels.py::test_what_goes_wrong_is_forwarded_and_collected_to_the_end[refused_combine_fast_network-few]"
_BLAME = "nodes/test_protocol_levels.py::test_the_error_names_the_rank_that_did_not_pass_on[forwarder-few]"
_BITS = "transports/test_property.py::test_kept_draws[levels]"
_KINDS = "nodes/test_nodes_levels.py::test_calls_of_every_kind[every_way-{}]"

# fmt: off
OF_LEVELS = (
    Mutant("a forwarder does not wait for relays", "kernels/nodes/forward.py",
           "wait_all(flags, came, ctx.call,", "wait_all(flags, came, ctx.call * 0,",
           _CALL),
    Mutant("a forwarder does not wait for marks", "kernels/nodes/forward.py",
           "wait_all(flag, one == 0, ctx.call,", "wait_all(flag, one == 0, ctx.call * 0,",
           _CALL),
    Mutant("a forwarder leaves out the tail of a message", "kernels/nodes/forward.py",
           "S.MESSAGE_POSITIONS // 4, S.RELAY_EXPERTS // 4, S.FORWARD_TAIL", "S.MESSAGE_POSITIONS // 4, S.MESSAGE_POSITIONS // 4, S.FORWARD_TAIL",
           _CALL),
    Mutant("forwarded ids count from another rank's first expert", "kernels/nodes/forward.py",
           "first_of(rank, numbers.first_expert, S), -1)", "first_of(rank * 0 + numbers.me, numbers.first_expert, S), -1)",
           _CALL),
    Mutant("relays to the second node are not put", "kernels/nodes/relay.py",
           "for step in range(token.shape[0] * (S.NODES - 1)):", "for step in range(token.shape[0] * (S.NODES - 1) - 1):",
           _CALL),
    Mutant("marks over cached routing are those of this node", "kernels/nodes/relay.py",
           "goes = tl.max((relayed & (r // S.NODE_SIZE == peer // S.NODE_SIZE)).to(tl.int32), 1) > 0", "goes = tl.max((relayed & (r // S.NODE_SIZE == ctx.me // S.NODE_SIZE)).to(tl.int32), 1) > 0",
           _KINDS),
    Mutant("a collector does not wait for rows", "kernels/nodes/collect.py",
           "wait_all(flags, slots >= 0, ctx.call,", "wait_all(flags, slots >= 0, ctx.call * 0,",
           _CALL),
    Mutant("a collector sums all ranks but the last", "kernels/nodes/level_rows.py",
           "for rank in tl.static_range(S.NODE_SIZE):", "for rank in tl.static_range(S.NODE_SIZE - 1):",
           _CALL),
    Mutant("home does not wait for other nodes", "kernels/nodes/level_rows.py",
           "is_peer(r, ctx.me, S) & _nodes_of(slots, S))", "is_peer(r, ctx.me, S) & (slots < -1))",
           _CALL),
    Mutant("home rounds its node's sum", "kernels/nodes/level_rows.py",
           "        total += row_columns(source, c0, sent, S)\n    return total", "        total += row_columns(source, c0, sent, S)\n        total = tl.where(near, total.to(S.ROW_DTYPE).to(S.SUM_DTYPE), total)\n    return total",
           _BITS),
    Mutant("a rank that refuses raises no flags for collectors", "kernels/combine/heads.py",
           "            in_two_levels(raise_flags_at_stop, (ctx, d, c0 + i), S)\n", "",
           _REFUSED),
    Mutant("the collectors of a rank that refuses put no flags", "kernels/nodes/collect.py",
           "                if program == 0:\n                    put_all_flags(ctx, S)", "                pass",
           _REFUSED),
    Mutant("home ranks are blamed for forwarders", "kernels/nodes/levels.py",
           "return tl.where(itself, source, forwarder)", "return source + forwarder * 0",
           _BLAME),
    Mutant("a rank collects for no other node", "kernels/nodes/levels.py",
           "return me // S.NODE_SIZE * S.NODE_SIZE + home % S.NODE_SIZE", "return home + me * 0",
           _CALL),
    Mutant("two levels take rows that are not summed", "config.py",
           "elif not self.pre_reduce:", "elif not self.two_level:",
           "nodes/test_nodes_levels.py::test_what_has_no_levels_is_refused"),
    Mutant("\"auto\" always means two levels", "config.py",
           "(self.two_level is True or self._prefers_two_levels())", "bool(self.two_level)",
           "nodes/test_nodes_levels.py::test_auto_takes_what_is_estimated_to_be_faster"),
    Mutant("a rank keeps relays of every rank", "memory/workspace.py",
           "\"relays\", u8, (nodes, tokens,", "\"relays\", u8, (far, tokens,",
           "nodes/test_nodes_levels.py::test_staging_is_bounded_by_nodes_and_reported"),
    Mutant("what passes through is not reported", "memory/workspace.py",
           "(\"staged_\", \"marks\", \"relays\", \"node_rows\")", "(\"staged_\",)",
           "nodes/test_nodes_levels.py::test_staging_is_bounded_by_nodes_and_reported"),
    Mutant("ranks of one CPU process forward", "transports/build.py",
           "if config.two_level and len(devices) > 1:", "if config.two_level and len(devices) > 64:",
           "nodes/test_nodes_levels.py::test_ranks_of_one_cpu_process_have_no_forwarders"),
)

# fmt: on
