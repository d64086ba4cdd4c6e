# ruff: noqa: E501 - a row is three lines
"""Faults in comparisons of the benchmarks (``mutants_table``).

Three lines a row: fault and file, text and replacement, test.
"""

from __future__ import annotations

from tests.mutants.mutants import Mutant

# fmt: off
OF_BENCH = (
    Mutant("a lost case passes the speed gate", "benchmarks/src/moelink_bench/comparisons.py",
           "return False if False in results else", "return",
           "bench/test_comparisons.py::test_one_lost_case_is_a_lost_gate"),
    Mutant("a comparison without FlashInfer is won", "benchmarks/src/moelink_bench/comparisons.py",
           "result = False if lost else None if reasons else True", "result = False if lost else True",
           "bench/test_comparisons.py::test_a_comparison_that_was_not_made_is_not_won"),
    Mutant("phases count", "benchmarks/src/moelink_bench/report.py",
           "counts = kind in COUNTED and case.case.num_sms is None", "counts = case.case.num_sms is None",
           "bench/test_comparisons.py::test_a_phase_that_is_slower_loses_nothing"),
    Mutant("rows that moelink quantises are like for like", "benchmarks/src/moelink_bench/presets.py",
           "return self.zero_copy and self.quantised == quantises(self.format)", "return self.zero_copy",
           "bench/test_comparisons.py::test_other_forms_by_rank_are_information"),
    Mutant("rows of a quantised case come in bf16", "benchmarks/src/moelink_bench/workload.py",
           "if not case.quantised:", "if case.tokens:",
           "bench/test_bench.py::test_rows_that_come_quantised_are_the_same_rows[fp8_block128]"),
    Mutant("kernels for SM limits are not compiled ahead", "benchmarks/src/moelink_bench/run.py",
           "compile_calls(ep, quantised=case.quantised, num_sms=case.num_sms)", "compile_calls(ep, quantised=case.quantised, num_sms=None)",
           "bench/test_bench.py::test_kernels_are_compiled_ahead_once_on_one_rank"),
    Mutant("shares compare other cases", "benchmarks/src/moelink_bench/comparisons.py",
           "return without / with_limit", "return with_limit / without",
           "bench/test_comparisons.py::test_shares_of_the_full_speed_are_stated"),
    Mutant("a row goes to the first of its experts only", "benchmarks/src/moelink_bench/permute.py",
           "to = tl.sum(tl.where(k == choice, place, 0), 0).to(tl.int64)", "to = tl.sum(tl.where(k == 0, place, 0), 0).to(tl.int64)",
           "bench/test_permute.py::test_rows_go_to_each_of_their_experts_and_their_sum_comes_back"),
    Mutant("sums start where the last call ended", "benchmarks/src/moelink_bench/permute.py",
           "tl.store(taken + g, tl.zeros((S.GROUPS,), tl.int32), mask=g < S.G)", "tl.store(taken + g, tl.zeros((S.GROUPS,), tl.int32), mask=g < 0)",
           "bench/test_permute.py::test_rows_go_to_each_of_their_experts_and_their_sum_comes_back"),
    Mutant("FlashInfer's rows are summed as they come", "benchmarks/src/moelink_bench/permute.py",
           "total += of_row * tl.load(", "total += tl.load(",
           "bench/test_permute.py::test_the_whole_operation_is_the_layer[fp8_block128]"),
)
# fmt: on
