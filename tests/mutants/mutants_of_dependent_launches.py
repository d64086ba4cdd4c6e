# ruff: noqa: E501 - a row is three lines
"""Faults in launches that start while the one before them ends, and in CTAs that work in turn (``mutants_table``).

Three lines a row: fault and file, text and replacement, test.
"""

from __future__ import annotations

from tests.mutants.mutants import Mutant

_COMPILED = "kernels/test_kernels_aot.py::test_memory_order_and_width_on_nvidia[sm_90-roles-4]"
_SCHEDULES = "kernels/test_dependent_launch.py::test_a_program_waits_for_no_rank_once_it_has_allowed_the_next_launch"
_ATTRIBUTE = "kernels/test_launches.py::test_only_a_kernel_that_waits_may_start_before_the_last_one_has_ended"
_CALLERS = "kernels/test_launches.py::test_a_direct_form_gets_the_callers_table_and_counters"

# fmt: off
OF_DEPENDENT_LAUNCHES = (
    Mutant("a kernel does not wait for the launch before it", "kernels/sync/dependent_launch.py",
           '"griddepcontrol.wait; // $0"', '"mov.u32 $0, 0;"',
           _COMPILED),
    Mutant("a launch never lets the next one start early", "kernels/sync/dependent_launch.py",
           '"griddepcontrol.launch_dependents; // $0"', '"mov.u32 $0, 0;"',
           _COMPILED),
    Mutant("a receiver lets go after its first source", "kernels/dispatch/receive.py",
           "(source + others >= S.WORLD_SIZE) & (not (S.TWO", "(source + others >= 0) & (not (S.TWO",
           _SCHEDULES),
    Mutant("a receiver lets go before its last message has come", "kernels/dispatch/receive.py",
           "if source.is_last & (tl.max(last - at - ready.to(tl.int32), 0) <= 0):", "if source.is_last:",
           _SCHEDULES),
    Mutant("home lets go after its first token", "kernels/combine/reduce.py",
           "(i + step >= items) & (not (S.TWO", "(step > 0) & (not (S.TWO",
           _SCHEDULES),
    Mutant("home lets go before the last columns have come", "kernels/combine/reduce.py",
           "is_last = piece.is_last & (c0 + step >= S.HIDDEN_SIZE)", "is_last = piece.is_last",
           _SCHEDULES),
    Mutant("a kernel that does not wait is launched early", "kernels/launch/direct.py",
           '_WAITS in loaded.asm["ptx"] and driver', "driver",
           _ATTRIBUTE),
    Mutant("a driver that cannot capture early launches gets them", "kernels/launch/direct.py",
           'dependent = _WAITS in loaded.asm["ptx"] and driver.has_dependent_launches()', 'dependent = _WAITS in loaded.asm["ptx"]',
           _ATTRIBUTE),
    Mutant("a kernel on rows never starts early", "kernels/launch/row_launch.py",
           "self._config = config_of(loaded, driver_)", "self._config = config_of(loaded, driver_); self._config.num_attributes = 0",
           "kernels/test_row_launch.py::test_a_kernel_that_waits_for_the_launch_before_may_start_beside_it"),
    Mutant("Triton launches the contract's kernels", "kernels/launch/launcher.py",
           "not hooked and peers.record is self.peers.record:", "not hooked and peers is self.peers:",
           _CALLERS),
    Mutant("a direct launch takes the launcher's own table in place of the caller's", "kernels/launch/launcher.py",
           "        if peers is self.peers:\n            return self._own_addresses\n        return peers.table", "        if peers is not None:\n            return self._own_addresses\n        return peers.table",
           _CALLERS),
    Mutant("a CTA does the work of one number although it may take more", "kernels/launch/sm_limit.py",
           "            number = next_number(words)\n        leave", "            number = programs\n        leave",
           "kernels/test_turns.py::test_numbers_in_turn_are_taken_once_and_within_the_limit[30-2]"),
    Mutant("the words of a launch are cleared while a CTA may take a number", "kernels/launch/sm_limit.py",
           "== tl.num_programs(0) - 1:", "== tl.num_programs(0) - 2:",
           "kernels/test_turns.py::test_numbers_in_turn_are_taken_once_and_within_the_limit[30-2]"),
)
