"""Schedules: right protocols pass under all of them, wrong ones are caught, and who waits for ever is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import talking_kernels as kernels
import torch
import triton.language as tl
from triton.runtime import interpreter

from moelink_testing import Deadlock, FailedSchedule, Scheduler, explore_schedules, run_ranks, scheduler
from moelink_testing.scheduler import place_of

N = 4
SEEDS = range(20)


def words(n: int = 1) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


def talk(send=kernels.send, receive=kernels.receive, value=7):
    """Ranks of which the first sends to the second, which returns what came."""
    data, out, flag = torch.zeros(N), torch.zeros(N), words()

    def receiver():
        receive[(1,)](data, flag, out, N)
        return out.tolist()

    return [lambda: send[(1,)](data, flag, value, N), receiver]


def is_seven(results):
    assert results[1] == [7.0] * N, results[1]


def test_a_right_protocol_passes_under_every_schedule():
    explore_schedules(talk, SEEDS, check=is_seven)
    explore_schedules(talk, range(3), check=is_seven, store_buffer=False)


@pytest.mark.parametrize("send", [kernels.send_without_release, kernels.release_first], ids=["dropped", "early"])
def test_a_release_that_is_missing_or_early_is_caught_and_its_seed_repeats_it(send):
    with pytest.raises(FailedSchedule, match=r"seed \d+ failed \(run_ranks\(make_ranks\(\), seed=") as found:
        explore_schedules(lambda: talk(send), SEEDS, check=is_seven)
    error = found.value
    assert isinstance(error.__cause__, AssertionError)
    first = run_ranks(talk(send), seed=error.seed)
    assert first[1] != [7.0] * N
    assert run_ranks(talk(send), seed=error.seed) == first
    for seed in range(error.seed):
        is_seven(run_ranks(talk(send), seed=seed))


def test_a_dropped_release_does_no_harm_without_a_store_buffer():
    explore_schedules(lambda: talk(kernels.send_without_release), SEEDS, check=is_seven, store_buffer=False)


def test_what_barriers_are_for_schedules_do_not_show():
    explore_schedules(lambda: talk(kernels.send_without_barrier), range(5), check=is_seven)


def test_stores_drain_by_themselves_in_any_order():
    """Without a release each store becomes visible at some time, in some schedule each before the other."""
    seen = set()
    for seed in range(40):
        pair, other, out = words(2), words(), words()
        ranks = [lambda: kernels.store_two[(1,)](pair, other), lambda: kernels.look[(1,)](pair, out)]  # noqa: B023
        run_ranks(ranks, seed=seed, drain=0.3)
        seen.add(out.item())
    assert seen == {0, 1, 2}


def test_a_program_sees_its_own_stores():
    word, out = words(), words(2)
    run_ranks([lambda: kernels.store_and_add[(1,)](word, out)], drain=0.0)
    assert (out.tolist(), word.item()) == ([5, 6], 6)


def test_a_deadlock_names_who_waits_where():
    """Rank 0 never sends: the receiver's wait, its file and line, and the function that called it."""
    with pytest.raises(Deadlock) as found:
        run_ranks([lambda: None, talk()[1]])
    line = next(
        number
        for number, text in enumerate(Path(kernels.__file__).read_text().splitlines(), 1)
        if text.startswith("    while tl.atomic_add(flag")
    )
    waiting = str(found.value).partition("waiting: ")[2]
    assert waiting.startswith("rank1:receive[0] receive (talking_kernels.py:")
    assert waiting.endswith(f" > wait (talking_kernels.py:{line})")


def test_a_deadlock_in_a_schedule_names_its_seed():
    with pytest.raises(
        FailedSchedule, match=r"seed 3 failed .*: Deadlock: no progress after .*rank0:receive\[0\]"
    ) as found:
        explore_schedules(lambda: talk()[1:], [3])
    assert isinstance(found.value.__cause__, Deadlock)


def test_ranks_that_wait_in_host_code_are_named():
    schedule = Scheduler(0, patience=3)

    def forever():
        while True:
            schedule.pause(False)

    with pytest.raises(Deadlock, match=r"rank0 forever \(test_schedules.py:\d+\); rank1 forever \("):
        schedule.run([forever, forever])


def test_a_deadlock_names_functions_of_the_packages_that_it_is_told(tmp_path):
    """A folder above may have the package's name as well."""
    package = tmp_path / "talk" / "src" / "talk"
    frames = []

    def function(path, name, calls):
        scope = {"stop": lambda: frames.append(sys._getframe())}
        exec(compile(f"def {name}(inner=None): {calls}", str(path), "exec"), scope)
        return scope[name]

    support = function(tmp_path / "talk" / "tests" / "support.py", "pause", "stop()")
    waiting = function(package / "signals.py", "wait_all", "inner()")
    waiting(support)
    support()
    assert [place_of(frame, [package]) for frame in frames] == ["wait_all (signals.py:1)", ""]
    assert [place_of(frame.f_back).rpartition(" > ")[2] for frame in frames] == ["pause (support.py:1)"] * 2


@pytest.mark.parametrize("wait, busy", [
    (kernels.take_lock, 1), (kernels.take_lock_by_cas, 1), (kernels.look_by_cas, 0),
], ids=["exchange", "compare", "look"])  # fmt: skip
def test_atomics_that_change_nothing_are_no_progress(wait, busy):
    word, free = words() + busy, words()
    arguments = (word,) if wait is kernels.look_by_cas else (word, free)
    with pytest.raises(Deadlock, match=rf"rank0:{wait.fn.__name__}\[0\]"):
        run_ranks([lambda: wait[(1,)](*arguments)], patience=20)


def test_a_wait_by_plain_loads_is_left_and_may_be_a_deadlock():
    """A compiler may load once and for all; here it is seen to wait, and others run."""
    explore_schedules(lambda: talk(receive=kernels.receive_without_atomics), range(2), check=is_seven)
    with pytest.raises(Deadlock, match="receive_without_atomics"):
        run_ranks([talk(receive=kernels.receive_without_atomics)[1]], patience=20)


def test_programs_of_a_launch_wait_for_later_ones():
    flags, order, count = words(5), words(5), words()
    run_ranks([lambda: kernels.wait_for_the_next[(5,)](flags, order, 5, count)])
    assert order.tolist() == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("grid", [(2, 3, 2), lambda arguments: (2, 3, 2)], ids=["numbers", "function"])
def test_grids_of_three_dimensions(grid):
    out, count = words(12), words()
    run_ranks([lambda: kernels.note_places[grid](out, count)])
    assert out.tolist() == [100 * x + 10 * y + z for x in range(2) for y in range(3) for z in range(2)]
    assert count.item() == 12


def test_an_empty_grid_runs_nothing():
    out = words()
    assert run_ranks([lambda: kernels.note_places[(0,)](out, out) or "done"]) == ["done"]
    assert out.item() == 0


def reuse(checks):
    box, number, taken, out = words(), words(), words(), words(2)

    def taker():
        kernels.take_twice[(1,)](box, number, taken, out)
        assert out.tolist() == [1, 2], out.tolist()

    return [lambda: kernels.send_twice[(1,)](box, number, taken, checks), taker]


def test_a_buffer_that_is_used_again_too_early_is_caught_with_a_slow_rank():
    def speed(name):
        return 0.02 if name.startswith("rank1") else 1.0

    explore_schedules(lambda: reuse(True), SEEDS, speed=speed)
    with pytest.raises(FailedSchedule, match=r"\[2, 2\]"):
        explore_schedules(lambda: reuse(False), range(3), speed=speed)


def test_errors_of_ranks_and_kernels_are_raised():
    def fails():
        raise KeyError("of the rank")

    with pytest.raises(KeyError, match="of the rank"):
        run_ranks([fails])
    with pytest.raises(FailedSchedule, match="seed 0 failed .*: KeyError: 'of the rank'"):
        explore_schedules(lambda: [fails], range(3))
    with pytest.raises(ValueError, match="power of 2"):
        run_ranks([lambda: kernels.out_of_bounds[(1,)](words(4))])


def test_tensors_must_be_on_the_cpu():
    with pytest.raises(TypeError, match="send, data: expected a tensor on the CPU, got one on meta"):
        run_ranks([lambda: kernels.send[(1,)](torch.zeros(N, device="meta"), words(), 1, N)])


def test_compiled_kernels_are_refused(monkeypatch):
    monkeypatch.setattr(scheduler, "is_interpreted", lambda: False)
    for run in (lambda: run_ranks([]), lambda: explore_schedules(list, [0])):
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET: expected 1 when Triton was loaded"):
            run()


def test_the_interpreter_is_as_before_after_a_schedule():
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas", "grid_idx")

    def state():
        builder = interpreter.InterpreterBuilder
        return [vars(builder).get(name) for name in names], interpreter.GridExecutor.__call__, tl.load, tl.arange

    before = state()
    run_ranks(talk())
    assert state() == before
    with pytest.raises(Deadlock):
        run_ranks(talk()[1:], patience=5)
    assert state() == before
    ranks = talk()
    ranks[0]()
    assert ranks[1]() == [7.0] * N, "launches outside of a schedule run as ever"
