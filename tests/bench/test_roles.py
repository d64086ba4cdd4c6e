"""The comparison of two trees, role by role: what of it needs no GPU."""

import argparse
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import moelink
from moelink_bench import roles
from moelink_bench import roles_worker as worker
from moelink_bench.roles_result import bytes_of
from tests.support.paths import ROOT
from tests.support.symmetric_ranks import note_launches

CASE = worker.Case("roles", 2, 2, "fp8_block128", hidden=256, experts=8, topk=2)
COUNTS = {"messages": 3, "own_messages": 2, "rows": 4, "own_rows": 2, "row": 264, "scale": 8}


def answer(scale: float = 1.0, checksum: str = "same") -> dict:
    """What a tree's process answers."""
    times = {role: scale * (index + 1) for index, role in enumerate(worker.ROLES)}
    return {"times": times, "counts": COUNTS, "checksum": checksum, "kernels": {}}


@pytest.mark.timeout(600)
def test_two_trees_are_compared_end_to_end(tmp_path, capsys):
    """Both processes measure every kind of case, interpreted, and give the same bits."""
    out = tmp_path / "roles.json"
    arguments = ["--a", str(ROOT), "--b", str(ROOT), "--tiny", "--device", "cpu", "--rounds", "1", "--seconds", "500"]
    arguments += ["--cache", str(tmp_path), "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roles.Comparison, "slower_cases", lambda _: [])  # times of the interpreter mean nothing
        assert roles.main(arguments) == 0
    document = json.loads(out.read_text())
    assert document["errors"] == []
    assert {row["role"] for row in document["rows"]} == {*worker.ROLES, worker.FUSED}
    assert {row["role"] for row in document["host"]} == set(worker.HOST)
    assert all(row["a_us"] > 0 and row["b_us"] > 0 for row in document["rows"] + document["host"])
    ((one, two),) = document["checksums"].values()
    assert one == two != ""
    assert "rows slower than 2 %" in capsys.readouterr().out.splitlines()[-1]


def test_a_checksum_tells_results_apart():
    """One element of a result, one scale or one source changes it."""
    with moelink.init_devices(["cpu"] * 2, **{**CASE.fields(), "transport": "collective"}) as ep:
        pair = worker.Pair(ep, worker.Inputs(CASE, torch.device("cpu")))
        pair.run()
        before = worker.checksum(pair)
        assert worker.checksum(pair) == before
        for tensor in (pair.outs[1], pair.recvs[0].scales, pair.recvs[1].src_info):
            kept = tensor.clone()
            tensor.view(-1)[0] += 1
            assert worker.checksum(pair) != before
            tensor.copy_(kept)
        assert worker.checksum(pair) == before


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_counts_of_roles(layout):
    """Two ranks with four experts each: a message for each rank that a token goes to, a row for each expert."""
    case = replace(CASE, layout=layout)
    with moelink.init_devices(["cpu"] * 2, **{**case.fields(), "transport": "collective"}) as ep:
        inputs = worker.Inputs(case, torch.device("cpu"))
        inputs.ids = [torch.tensor([[0, 1], [0, 4]], dtype=torch.int32)] * 2  # three messages of each rank
        pair = worker.Pair(ep, inputs)
        pair.run()
        scale = 2 * 4  # for each 128 of 256 elements of one byte
        # Rank 0 sends two messages with three rows to itself, rank 1 one with one.
        rows = {"rows": 4, "own_rows": 2} if layout == "expert" else {"rows": 3, "own_rows": 1}
        expected = {"messages": 3, "own_messages": 1, "row": 256 + scale, "scale": scale, **rows}
        assert worker.counts_of(case, pair) == expected


def test_bytes_of_roles():
    """By expert, own rows of two ranks stay from 1025 tokens on, by rank from 129."""
    row, wide = 264, 512
    assert bytes_of(CASE, COUNTS, "cpu") == {
        "dispatch sender": 2 * wide + 3 * row, "dispatch receiver": 3 * row + 4 * row,
        "combine sender": 4 * wide + 3 * wide, "combine home": 3 * wide + 2 * wide, "scale layout": 2 * 4 * 8,
    }  # fmt: skip
    every, others = (4 + 3) * wide, (4 - 2) * wide + (3 - 2) * wide
    for layout, most in (("expert", 1024), ("rank", 128)):
        few = replace(CASE, tokens=most, layout=layout)
        many = replace(few, tokens=most + 1)
        assert bytes_of(few, COUNTS, "cuda")["combine sender"] == every
        assert bytes_of(many, COUNTS, "cuda:0")["combine sender"] == others
        assert bytes_of(many, COUNTS, "cuda")["combine home"] == (3 - 2) * wide + 2 * wide + (most + 1) * wide
        assert bytes_of(replace(many, ranks=4), COUNTS, "cuda")["combine sender"] == every


def test_rows_are_medians_and_the_worst_comes_first():
    comparison = roles.Comparison([CASE], "cpu")
    for scale in (1.0, 1.0, 50.0):
        comparison.add(CASE, 0, answer())
        comparison.add(CASE, 1, answer(scale))
    assert [row["ratio"] for row in comparison.rows()] == [1.0] * 4
    assert comparison.slower_cases() == []
    slow = answer(1.0)
    slow["times"]["combine home"] *= 1.03
    comparison = roles.Comparison([CASE], "cpu")
    comparison.add(CASE, 0, answer())
    comparison.add(CASE, 1, slow)
    assert comparison.slower_cases() == [CASE]
    assert comparison.rows()[0]["role"] == "combine home"
    document = comparison.document()
    assert document["slower"] == 1
    assert roles.table(document).splitlines()[-1].startswith("1 of 4 rows slower than 2 %")


def test_other_bits_failed_cases_and_changed_kernels_are_told():
    comparison = roles.Comparison([CASE], "cpu")
    one, two = answer(), answer(checksum="other")
    one["kernels"], two["kernels"] = {"k": {"regs": 80}}, {"k": {"regs": 96}}
    comparison.add(CASE, 0, one)
    comparison.add(CASE, 1, two)
    comparison.add(CASE, 1, {"error": "OutOfMemoryError: no room"})
    text = roles.table(comparison.document())
    assert "A and B give other bits (same, other)" in text
    assert "B roles W=2 tokens=2 fp8_block128: OutOfMemoryError: no room" in text
    assert "{'regs': 80}, B {'regs': 96}" in text
    assert text.splitlines()[-1].endswith("1 of 1 kernels changed; 2 errors")


class FakeTree:
    """A tree that answers at once, and notes in which order trees are asked."""

    def __init__(self, name: str, asked: list[str], scale: float) -> None:
        self.name, self.asked, self.scale = name, asked, scale

    def ask(self, case, *, check, timeout):
        self.asked.append(self.name)
        return answer(self.scale)


def test_trees_take_turns_and_slower_cases_get_more_rounds():
    asked: list[str] = []
    comparison = roles.Comparison([CASE], "cpu")
    trees = [FakeTree("A", asked, 1.0), FakeTree("B", asked, 1.5)]
    roles.compare(comparison, trees, 2, float("inf"), lambda: None)
    assert "".join(asked) == "ABBA" * 2
    asked.clear()
    roles.compare(comparison, trees, 2, 0.0, lambda: None)  # the time is over
    assert asked == []


def test_a_tree_without_the_package_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="expected a tree with src/moelink, got"):
        roles.Tree(tmp_path, "cpu", tmp_path)


def test_all_cases_fit_their_capacity():
    """Rows of the busiest rank, on the inputs that are measured, with each group's padding."""
    for case in roles.cases_of():
        if case.kind != "roles" or case.format != "fp8_block128":
            continue
        small = worker.Inputs(worker.replace(case, hidden=1), torch.device("cpu"))
        counts = torch.bincount(torch.cat(small.ids).flatten(), minlength=case.experts)
        padded = (-(-counts // 4) * 4).view(case.ranks, -1).sum(1)
        assert int(padded.max()) <= case.fields()["capacity"], case


class FakeDevice:
    """What the program uses of ``torch.cuda``, on a clock that counts replays: 1 ms each, the device's wait none."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.phases: list[int] = []
        device, cuda = self, torch.cuda

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream=None):
                self.at = device.now

            def elapsed_time(self, end):
                return end.at - self.at

        class Graph:
            made = 0

            def capture_begin(self, pool, capture_error_mode):
                assert pool == "pool"
                self.number, Graph.made = Graph.made, Graph.made + 1

            def capture_end(self):
                pass

            def replay(self):
                device.phases.append(self.number)
                device.now += 1.0 + self.number

            def reset(self):
                pass

        self.stream = SimpleNamespace(cuda_stream=7)
        for name, value in {
            "Stream": lambda *_: self.stream, "Event": Event, "CUDAGraph": Graph, "synchronize": lambda: None,
            "stream": lambda _: contextlib.nullcontext(), "graph_pool_handle": lambda: "pool", "_sleep": lambda _: None,
        }.items():  # fmt: skip
            patch.setattr(cuda, name, value)


def test_graphs_are_replayed_in_order_and_times_are_of_one_rank(monkeypatch):
    fields = worker.Case.fields
    monkeypatch.setattr(worker.Case, "fields", lambda case: {**fields(case), "transport": "collective"})
    device = FakeDevice(monkeypatch)
    found = worker.roles_on_cuda(CASE, torch.device("cpu"), check=True)
    assert found["times"] == {role: 1e3 * (1 + index) / 2 for index, role in enumerate(worker.ROLES)}
    assert device.phases[:8] == [0, 1, 2, 3] * 2
    assert len(found["checksum"]) == 16


def test_no_launch_grants_credit_alone(monkeypatch):
    """Ranks that share a device would make one each after a receiving half, which ranks with a GPU each do not."""
    launched = note_launches(monkeypatch)
    FakeDevice(monkeypatch)
    worker.roles_on_cuda(CASE, torch.device("cpu"), check=False)
    assert launched[:8] == [
        f"ep_{phase}_{half}_kernel" for phase in ("dispatch", "combine") for half in ("async", "wait") for _ in range(2)
    ]
    assert "ep_grant_credits_kernel" not in launched


def test_a_launch_on_another_stream_is_refused(monkeypatch):
    """Ranks on streams of their own would run side by side."""
    launches = worker.Launches(FakeDevice(monkeypatch).stream)
    for phase, name, stream in ((0, "send", 7), (1, "receive", 7), (1, "lay_out", 7), (1, "receive", 7)):
        launches.phase = phase
        launches.enter(SimpleNamespace(get=lambda name=name, stream=stream: {"name": name, "stream": stream}))
        launches.leave(None)
    assert [launches.second_of(phase) for phase in (0, 1)] == [None, "lay_out"]
    with pytest.raises(RuntimeError, match="expected all ranks' launches on stream 7, got stream 8"):
        launches.enter(SimpleNamespace(get=lambda: {"name": "send", "stream": 8}))


def test_compiled_kernels_stay_in_the_users_own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Closes over: a folder of a known name in the temporary directory, from which code of its first maker is run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_of() == tmp_path / ".cache" / "moelink" / "roles"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert cache_of() == tmp_path / "own" / "moelink" / "roles"


def cache_of() -> Path:
    """The folder of the command line without arguments."""
    parser = argparse.ArgumentParser()
    roles.options(parser)
    return parser.parse_args([]).cache
