"""What FlashInfer's user adds to its all-to-all: the permutation, the sum, and the whole operation made of them."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moelink_bench import peers
from moelink_bench.contenders import difference_from_truth
from moelink_bench.peers import FlashInferMarked, FlashInferWhole
from moelink_bench.permute import Permutation
from moelink_bench.presets import SMOKE, Case
from moelink_bench.workload import make_workload

CPU = torch.device("cpu")
SLOTS, TOPK, FIRST, LOCAL, HIDDEN, ROOM = 10, 3, 5, 5, 64, 40


def test_rows_go_to_each_of_their_experts_and_their_sum_comes_back() -> None:
    permutation = Permutation(first=FIRST, num_local=LOCAL, capacity=ROOM, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for call in range(2):
        ids = torch.randint(-1, 12, (SLOTS, TOPK), dtype=torch.int32, generator=generator)
        ids[4] = -1
        rows = torch.randint(0, 255, (SLOTS, HIDDEN), dtype=torch.uint8, generator=generator)
        scales = torch.rand(SLOTS, 3, generator=generator) if call else None
        weights = torch.rand(SLOTS, TOPK, generator=generator)
        got = permutation.permute(rows, scales, ids, weights)
        mine = (ids >= FIRST) & (ids < FIRST + LOCAL)
        counts = [int((ids == FIRST + expert).sum()) for expert in range(LOCAL)]
        assert permutation.counts.tolist() == counts
        assert torch.equal(got.places >= 0, mine)
        assert sorted(got.places[mine].tolist()) == list(range(sum(counts)))
        order = got.places[mine].argsort()
        assert ids[mine][order].tolist() == ids[mine].sort().values.tolist(), "experts in their order"
        slots = torch.arange(SLOTS)[:, None].expand(SLOTS, TOPK)[mine][order]
        assert torch.equal(got.rows[: sum(counts)], rows[slots])
        assert (got.scales is None) == (scales is None)
        if scales is not None and got.scales is not None:
            assert torch.equal(got.scales[: sum(counts)], scales[slots])
        y = torch.randn(ROOM, HIDDEN, generator=generator).bfloat16()
        out = torch.full((SLOTS, HIDDEN), 7.0, dtype=torch.bfloat16)
        permutation.sum(y, got, out)
        terms = weights[..., None] * y.float()[got.places.clamp(min=0)] * mine[..., None]
        want = terms.sum(1).where(mine.any(1, keepdim=True), torch.tensor(7.0))
        assert torch.allclose(out.float(), want, rtol=1e-2, atol=1e-2)
        assert not permutation.counts.any(), "ready for the next call"


class FakeFlashInfer:
    """Its all-to-all of two ranks in one process: a rank's rows arrive in another order than they were sent."""

    def __init__(self, rank: int, world_size: int, experts: int) -> None:
        self.rank, self.world_size, self.local = rank, world_size, experts // world_size
        self.everyone: list[list[Tensor]] = []
        self.given = torch.empty(0)
        self.came: list[tuple[int, Tensor]] = []

    def dispatch(
        self,
        ids: Tensor,
        mine: list[Tensor],
        tokens: int,
        *,
        invalid_token_expert_id: int,
        expert_id_payload_index: int,
    ) -> list[Tensor]:
        assert invalid_token_expert_id == -1
        assert torch.equal(mine[expert_id_payload_index], ids)
        arrived = [torch.full((self.world_size, *each.shape), 99, dtype=each.dtype) for each in mine]
        arrived[expert_id_payload_index].fill_(-1)
        self.came = []
        for source, sent in enumerate(self.everyone):
            here = (sent[expert_id_payload_index] // self.local == self.rank).any(1).nonzero()[:, 0].flip(0)
            for into, each in zip(arrived, sent, strict=True):
                into[source, : len(here)] = each[here]
            self.came += [(source, token) for token in here]
        return arrived

    def get_combine_payload_tensor_in_workspace(self, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        return torch.full((self.world_size, tokens, hidden), float("nan"), dtype=dtype)

    def combine(self, ready: Tensor, tokens: int, *, payload_in_workspace: bool) -> Tensor:
        """What this rank gives to the sum of each rank's tokens; the caller adds what the other ranks give."""
        assert payload_in_workspace
        self.given = torch.zeros(ready.shape)
        at = dict.fromkeys(range(self.world_size), 0)
        for source, token in self.came:
            self.given[source, token] = ready[source, at[source]].float()
            at[source] += 1
        return self.given[self.rank].to(ready.dtype)


def contenders_of(
    case: Case, world_size: int, monkeypatch: pytest.MonkeyPatch, kind: type[Any] = FlashInferWhole
) -> list[Any]:
    fakes = [FakeFlashInfer(rank, world_size, case.num_experts) for rank in range(world_size)]
    monkeypatch.setattr(peers, "open_flashinfer", lambda *, rank, **_: fakes[rank])
    made = []
    for rank in range(world_size):
        workload = make_workload(case, SMOKE, rank=rank, world_size=world_size, device=CPU)
        made.append(kind(workload, rank=rank, world_size=world_size))
    return made


@pytest.mark.parametrize("fmt", ["fp8_block128", "bf16", "mxfp4"])
def test_the_whole_operation_is_the_layer(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=5, hidden_size=256, num_experts=6, topk=3, format=fmt)
    contenders = contenders_of(case, 2, monkeypatch)
    for contender in contenders:
        contender._moe.everyone = [each._payloads[0] for each in contenders]
    for contender in contenders:
        handle = contender.dispatch(0)
        contender._home(contender.experts(handle), handle)
    for rank, contender in enumerate(contenders):
        combined = sum(each._moe.given[rank] for each in contenders).bfloat16()  # type: ignore[attr-defined]
        assert difference_from_truth(combined, contender._workload.batches[0], case) == ""
    assert contender.combine(0, contender.dispatch(0)).shape == (5, 256), "of the rows that rotate"


def test_a_wrong_whole_operation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rank the check needs nobody else."""
    case = Case(tokens=4, hidden_size=256, num_experts=4, topk=2)
    (contender,) = contenders_of(dataclasses.replace(case), 1, monkeypatch)
    contender._moe.everyone = [contender._payloads[0]]
    assert contender.check() == ""
    right: Any = contender._permutation.sum

    def wrong(y: Tensor, handle: Any, out: Tensor) -> None:
        right(y, dataclasses.replace(handle, weights=handle.weights.flip(0)), out)

    monkeypatch.setattr(contender._permutation, "sum", wrong)
    assert contender.check().startswith("combine differs from the layer's result in ")


def test_names_by_layout() -> None:
    by_rank, by_expert = (
        [contender.name for contender in peers.flashinfer_contenders(layout)] for layout in ("rank", "expert")
    )
    assert by_rank == ["FlashInfer one-sided", "FlashInfer as engines call it"]
    assert by_expert == ["FlashInfer + permute + sum"]


@pytest.mark.parametrize("fault", ["", "stale ids", "ids lost", "half the sum"])
def test_the_call_of_engines_marks_rows_that_no_token_fills(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's view of two ranks: of rank 0's 5 tokens some go to rank 1, and its rows come first in the block."""
    case = Case(tokens=5, hidden_size=256, num_experts=6, topk=2, layout="rank", zero_copy=True, quantised=True)
    contenders = contenders_of(case, 2, monkeypatch, FlashInferMarked)
    for contender in contenders:
        contender._moe.everyone = [each._payloads[0] for each in contenders]
    owners = [contender._ids[0] // 3 for contender in contenders]
    counts = [[int((owner == rank).any(1).sum()) for rank in range(2)] for owner in owners]
    assert any(each[1] < 5 for each in counts), "a row without a token"
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(peers, "everyone", lambda mine: counts)
    one, moe = contenders[1], contenders[1]._moe
    right = moe.dispatch

    def dispatch(*arguments: Any, **options: int) -> list[torch.Tensor]:
        arrived = right(*arguments, **options)
        if fault == "stale ids":
            arrived[-2][:, -1] = 3
        if fault == "ids lost":
            arrived[-2].fill_(-1)
        return arrived

    def combine(ready: torch.Tensor, tokens: int, **options: bool) -> torch.Tensor:
        ranks = sum((owners[1] == rank).any(1).to(ready.dtype) for rank in range(2))
        return (ranks[:, None] * (0.5 if fault == "half the sum" else 1)).expand(tokens, ready.shape[-1])  # type: ignore[index]

    monkeypatch.setattr(moe, "dispatch", dispatch)
    monkeypatch.setattr(moe, "combine", combine)
    wanted = {"": "", "half the sum": "combine does not sum one row of each rank"}
    assert one.check() == wanted.get(fault, "ids of rows that no token fills are not marked")
