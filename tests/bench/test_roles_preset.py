"""The preset ``roles``: what is measured, what is left out, what is compared. No GPU is needed."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moelink.errors import ConfigError
from moelink.tools.cli.console import make_console
from moelink.tools.results import SYMMETRIC
from moelink_bench import peers, render, roles, roles_flashinfer, roles_preset, roles_result
from moelink_bench import roles_worker as worker
from moelink_bench.peers import FLASHINFER
from moelink_bench.roles_preset import make_roles_plan
from moelink_bench.view import view
from tests.support.paths import ROOT

COUNTS = {"messages": 8, "own_messages": 4, "rows": 8, "own_rows": 4, "row": 110664, "scale": 14336}
"""Of 8 tokens, whose rows have 14336 bytes, a sender reads and writes 1 MB, and a receiver 2 MB."""
TIMES = dict(zip(worker.ROLES, (2.0, 3.0, 4.0, 6.0), strict=True))


class FakeWorker:
    """Answers at once. ``bits`` are those of the collective transport, ``error`` answers everything."""

    bits, error = "same", ""

    def __init__(self, name: str, *_: object) -> None:
        self.theirs = name == "FlashInfer"

    def start(self, timeout: float) -> dict[str, Any]:
        return {"device": "Some GPU"}

    def ask(self, case: worker.Case, *, check: bool, timeout: float) -> dict[str, Any]:
        if self.error:
            return {"error": self.error}
        times = {"dispatch": 10.0, "combine": 5.0} if self.theirs else {**TIMES, worker.LAYOUT: 1.0}
        sizes = {"bytes": dict.fromkeys(times, 1_000_000)} if self.theirs else {"counts": COUNTS}
        checksum = self.bits if case.kind == "bits" else "same"
        return {"times": times, **sizes, "kernels": {}, **({"checksum": checksum} if check else {})}

    def stop(self) -> None:
        pass


def run_with(monkeypatch: pytest.MonkeyPatch, *, free: float = 1e12, refusal: str = "", **given: Any) -> dict[str, Any]:
    """The document of a run whose processes are faked."""
    for name, value in {
        "Worker": FakeWorker, "compile_all": lambda *_: None, "free_memory": lambda _: free,
        "flashinfer_refusal": lambda: refusal, "copy_bandwidth": lambda _: {"gb_per_s": 1000.0, "method": "copies"},
    }.items():  # fmt: skip
        monkeypatch.setattr(roles_preset, name, value)
    plan = make_roles_plan("roles", device="cuda", **{"ranks": 2, "tokens": (8, 4096), **given})
    document = roles_preset.run_roles(plan, commit="abc1234def", command="moelink bench --preset roles")
    loaded: dict[str, Any] = json.loads(json.dumps(document))
    return loaded


def test_cases_of_the_preset() -> None:
    cases = make_roles_plan("roles", device="cuda").cases
    assert {case.ranks for case in cases} == {2, 4, 8}
    assert {case.tokens for case in cases} == {1, 8, 32, 128, 512, 4096}
    assert {case.layout for case in cases} == {"expert", "rank"}
    assert len(cases) == 3 * 6 * 2
    quick = roles.cases_of(quick=True)
    assert {case.ranks for case in quick if case.kind == "roles"} == {2, 4, 8}
    assert {case.tokens for case in quick if case.kind == "roles"} == set(roles.TOKENS)


@pytest.mark.parametrize(
    "given", [{"tokens": (0,)}, {"rounds": 0}, {"topk": 300}, {"layout": "masked"}, {"formats": ("no",)}], ids=str
)
def test_unusable_settings_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_roles_plan("roles", device="cuda", **given)


def test_rows_and_comparisons(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """1 MB in 2 us are half of 1000 GB/s; the receiver's bytes are with those of scales, whose launch it includes."""
    document = run_with(monkeypatch)
    assert document["gate"]["passed"]
    rows = {(row["contender"], row["layout"], row["tokens"], row["role"]): row for row in document["rows"]}
    assert rows[SYMMETRIC, "expert", 8, "dispatch sender"]["share"] == 0.5
    assert rows[SYMMETRIC, "rank", 8, "dispatch receiver"]["bytes"] == 2_000_000
    assert rows[SYMMETRIC, "rank", 8, "combine sender"]["bytes"] == (8 + 8) * 14336
    assert rows[SYMMETRIC, "rank", 4096, "combine sender"]["bytes"] == (4 + 4) * 14336, "own rows stay"
    assert len(rows) == 2 * (2 * 5 + 2)
    found = {(one["phase"], one["layout"]): one for one in document["comparisons"] if one["tokens"] == 8}
    assert (found["dispatch", "rank"]["ours"], found["dispatch", "rank"]["ratio"]) == (5.0, 2.0)
    assert (found["combine", "expert"]["ours"], found["combine", "expert"]["ratio"]) == (10.0, 0.5)
    console = make_console()
    console.print(view(console, document))
    assert "2.0 (50 %)" in capsys.readouterr().out
    page = render.page([], [], [("roles_preset_h200.json", document)])
    remarked = {**document, "remark": "Disturbed."}
    assert render.page([], [], [("roles_preset_h200.json", remarked)]).count("\n\nDisturbed.\n\n") == 1
    assert "## roles, one GPU" in page
    assert "| 8 | 2.0 (50 %) | 3.0 (67 %) |" in page


def test_what_needs_too_much_memory_is_left_out_by_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    document = run_with(monkeypatch, free=5e8)
    assert {row["tokens"] for row in document["rows"]} == {8}
    assert "80%" in document["memory_rule"]
    assert all("GB that are free" in one["reason"] for one in document["left_out"])
    assert len(document["left_out"]) == 2


def test_other_bits_and_errors_leave_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "bits", "others")
    document = run_with(monkeypatch)
    assert "rows" not in document
    assert "other bits than the collective transport: same is not others" in document["gate"]["fault"]
    monkeypatch.setattr(FakeWorker, "error", "RuntimeError: replays gave rank 0 other tokens")
    assert "replays gave rank 0" in run_with(monkeypatch)["gate"]["fault"]
    monkeypatch.setattr(FakeWorker, "error", "OutOfMemoryError: no room")
    document = run_with(monkeypatch)
    assert document["rows"] == []
    assert len([one for one in document["left_out"] if "no room" in one["reason"]]) == 4


def test_flashinfer_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"flashinfer-python=={peers.FLASHINFER_RELEASE}"
    assert line in (ROOT / "constraints-cuda.txt").read_text().splitlines()
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: None)
    assert (
        peers.flashinfer_refusal()
        == f"expected flashinfer-python {peers.FLASHINFER_RELEASE}, got none; run pip install {line}"
    )
    document = run_with(monkeypatch, refusal=peers.flashinfer_refusal())
    assert {row["contender"] for row in document["rows"]} == {SYMMETRIC}
    assert document["left_out"][-1]["reason"].endswith(f"pip install {line}")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: "there")
    for found, told in (("0.6.6", "got 0.6.6"), (f"{peers.FLASHINFER_RELEASE}+cu130", "")):
        monkeypatch.setattr(peers, "version_of", lambda _, found=found: found)
        assert told in peers.flashinfer_refusal()
        assert bool(peers.flashinfer_refusal()) == bool(told)


class FakeLibrary:
    """Stands for FlashInfer's module: ranks wait for flags as its kernels do, and here that must not be in vain."""

    NAMES = (
        "MOE_A2A_FLAG_VAL_OFFSET_INDEX", "MOE_A2A_DISPATCH_COMPLETION_FLAGS_OFFSET_INDEX",
        "MOE_A2A_COMBINE_COMPLETION_FLAGS_OFFSET_INDEX", "MOE_A2A_NUM_METAINFO_FIELDS",
    )  # fmt: skip
    broken = False

    def moe_a2a_get_workspace_size_per_rank(self, ranks: int, tokens: int, row: int, home: int) -> int:
        return 1024 + ranks * tokens * (row + home)

    def moe_a2a_initialize(self, workspace: Tensor, rank: int, ranks: int, tokens: int) -> Tensor:
        return torch.tensor([0, 128, 256])

    def get_moe_alltoall_module(self) -> Any:
        return SimpleNamespace(moe_a2a_get_metainfo_index_pairs=lambda: (self.NAMES, (0, 1, 2, 3)))

    def _wait(self, workspace: Tensor, rank: int, begin: int) -> None:
        words = workspace.view(torch.int32)
        words[rank, 0] += 1
        words[:, begin + rank] = words[rank, 0]
        assert bool((words[rank, begin : begin + len(workspace)] == words[rank, 0]).all()), "would wait for ever"

    def moe_a2a_dispatch(
        self, ids: Tensor, sent: list[Tensor], workspace: Tensor, metainfo: Tensor, tokens: int, rank: int, ranks: int,
        topk: int, experts: int,
    ) -> tuple[list[Tensor], int, None]:  # fmt: skip
        self._wait(workspace, rank, 32)
        row = sum(payload[0].nbytes for payload in sent)
        views = []
        for target in range(ranks):
            chosen, begin = (ids // (experts // ranks) == target).any(1), 1024
            for payload in sent:
                size = ranks * tokens * payload[0].nbytes
                view = workspace[target, begin : begin + size].view(payload.dtype).view(ranks, tokens, -1)
                view[rank, : int(chosen.sum())] = payload[chosen]
                begin += size
                views += [view] if target == rank else []
        if self.broken:
            views[0][rank, 0] += 1
        return views, 1024 + ranks * tokens * row, None

    def moe_a2a_combine(
        self, ready: Tensor, tokens: int, workspace: Tensor, metainfo: Tensor, most: int, rank: int, ranks: int,
        topk: int, begin: int, *, payload_in_workspace: bool,
    ) -> Tensor:  # fmt: skip
        self._wait(workspace, rank, 64)
        assert payload_in_workspace
        assert workspace[rank, begin:].data_ptr() == ready.data_ptr()
        return self.counts[rank][:, None].expand(tokens, ready.shape[-1])


def test_flashinfer_s_ranks_find_their_flags_and_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    case = worker.Case("roles", 2, 4, "fp8_block128", hidden=256, experts=8, topk=2, layout="rank")
    inputs, library = worker.Inputs(case, torch.device("cpu")), FakeLibrary()
    ranks = roles_flashinfer.Ranks(library, case, inputs)
    library.counts = [goes.sum(1).to(torch.bfloat16) for goes in ranks.goes]
    for _ in range(3):
        roles_flashinfer.check_once(ranks, ranks.steps())
    messages = sum(int(goes.sum()) for goes in ranks.goes) // 2
    row = 256 + 2 * 4 + 2 * 4 + 2 * 4  # payload, scales, ids, weights
    assert ranks.bytes() == {"dispatch": (4 + messages) * row, "combine": (4 + messages) * 512}
    with pytest.raises(AssertionError, match="would wait for ever"):
        ranks.dispatch()  # without the flags
    broken = FakeLibrary()
    broken.broken, broken.counts = True, library.counts
    again = roles_flashinfer.Ranks(broken, case, inputs)
    with pytest.raises(RuntimeError, match="dispatch lost or changed bytes"):
        roles_flashinfer.check_once(again, again.steps())
    broken.broken, broken.counts = False, [count + 1 for count in library.counts]
    again = roles_flashinfer.Ranks(broken, case, inputs)
    with pytest.raises(RuntimeError, match="does not sum one row of each rank"):
        roles_flashinfer.check_once(again, again.steps())


def test_counts_and_checksums_by_rank() -> None:
    """With layout "rank" a received row is a message, and scales lie row by row."""
    case = worker.Case("roles", 2, 2, "fp8_block128", hidden=256, experts=8, topk=2, layout="rank")
    sums = {worker.roles_by_host(replace(case, transport="collective"), "cpu")["checksum"] for _ in range(2)}
    assert len(sums) == 1
    counts = worker.roles_by_host(replace(case, transport="collective"), "cpu")["counts"]
    assert counts["row"] == 256 + 2 * 4
    assert 2 <= counts["messages"] == counts["rows"] <= 4


def test_interpreted_kernels_run_the_whole_smoke(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset's program without its processes: kernels are interpreted, results are the collective transport's."""

    class Here(FakeWorker):
        def ask(self, case: worker.Case, *, check: bool, timeout: float) -> dict[str, Any]:
            return worker.measure(case, "cpu", check=check)

    monkeypatch.setattr(roles_preset, "Worker", Here)
    plan = make_roles_plan("roles-smoke", device="cpu", tokens=(1,), layout="rank", hidden=128, experts=2, topk=1)
    document = roles_preset.run_roles(plan)
    assert document["gate"]["passed"], document["gate"]
    assert [row["role"] for row in document["rows"]] == list(worker.ROLES)
    assert all(row["us"] > 0 and row["bytes"] > 0 for row in document["rows"])
    assert document["bandwidth"]["gb_per_s"] > 0
    assert document["left_out"] == [
        {"case": "all cases", "contender": FLASHINFER, "reason": "runs on CUDA devices only"}
    ]
    assert roles_result.comparisons(document["rows"]) == []


def test_sm_limits_are_measured_besides_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer has no limit, so it is compared with full speed alone."""
    document = run_with(monkeypatch, tokens=(4096,), layout="rank", num_sms=(24, 8))
    ours = [row for row in document["rows"] if row["contender"] == SYMMETRIC and row["role"] == worker.ROLES[0]]
    assert [row["num_sms"] for row in ours] == [None, 24, 8]
    assert {one["num_sms"] for one in document["comparisons"]} == {None}
    assert [title for title, _, _ in roles_result.tables(document)][:3] == [
        f"W = 2, {SYMMETRIC}, layout rank, fp8_block128",
        f"W = 2, {SYMMETRIC}, layout rank, fp8_block128, 24 SMs",
        f"W = 2, {SYMMETRIC}, layout rank, fp8_block128, 8 SMs",
    ]
    case = worker.Case("roles", 2, 4096, "bf16", num_sms=24)
    assert case.fields()["num_sms"] == 24
    assert roles.label(case) == "roles W=2 tokens=4096 bf16 24 SMs"
