"""Models of transformers over ranks: each family's logits, generated tokens, losses and gradients equal the unsharded
model's, however the ranks are fed, through parallelize and through transformers' own expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

import moelink
from moelink.routing import ExpertMap
from moelink.testing import run_ranks
from tests.integrations.transformers.transformers_models import (
    BUILDERS,
    MOE_LAYERS,
    NEW_TOKENS,
    NUM_EXPERTS,
    Truth,
    build,
    files_by_expert,
    only_experts,
    save_all,
    share,
    tensors_of,
    truth,
    write,
)  # fmt: skip
from tests.integrations.transformers.transformers_ranks import Answers, Registered, compiled, everything, mishaps

# Sums of a few hundred terms in another order: measured below 1e-6 for logits and 3e-6 for gradients.
FP32_LOGITS, FP32_GRADIENTS = 5e-6, 2e-5

EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
needs_registry = pytest.mark.skipif(
    find_spec("transformers.distributed.expert_parallel") is None,
    reason="this transformers has no registry of expert-parallel implementations",
)


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of the families that the selected tests are about."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {"mixtral", *(item.callspec.params.get("family") for item in here)}
    saved = save_all(tmp_path_factory.mktemp("checkpoints"))
    return {family: folder for family, folder in saved.items() if family in wanted}


@pytest.fixture(scope="module")
def truths(folders: dict[str, str]) -> dict[str, Truth]:
    return {family: truth(folder) for family, folder in folders.items()}


@dataclass(frozen=True)
class Run:
    """All that the ranks of one world said, by rank and family."""

    world_size: int
    answers: list[dict[str, Answers]]
    registered: list[dict[str, Registered]]
    saved: Path


@pytest.fixture(scope="module", params=[2, 1, 4], ids=lambda size: f"{size}-ranks")
def run(request: pytest.FixtureRequest, folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    world_size, scratch = request.param, tmp_path_factory.mktemp("ranks")
    owned = ExpertMap(NUM_EXPERTS, world_size)
    own = {
        family: [
            only_experts(scratch / f"{family}-{rank}", folder, range(owned.first(rank), owned.first(rank + 1)))
            for rank in range(world_size)
        ]
        for family, folder in folders.items()
    }
    saved = scratch / "saved"
    if world_size == 1:
        results = [everything(0, 1, folders, own, str(saved))]
    else:
        results = run_ranks(everything, world_size, folders, own, str(saved), timeout=240)
    return Run(world_size, [found for found, _ in results], [reg for _, reg in results], saved)


def off_by(got: Tensor, want: Tensor) -> float:
    """The largest difference relative to the largest value wanted."""
    assert got.shape == want.shape
    return float((got.float() - want).abs().max() / want.abs().max())


def rms(got: Tensor, want: Tensor) -> float:
    """The difference relative to what is wanted, both as root mean squares."""
    return float((got.float() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())


def local_part(name: str, whole: Tensor, rank: int, world_size: int) -> Tensor:
    owned = ExpertMap(NUM_EXPERTS, world_size)
    return whole[owned.first(rank) : owned.first(rank + 1)] if name.endswith(EXPERTS) else whole


def check_gradients(got: dict[str, Tensor], want: dict[str, Tensor], *, factor: float = 1.0, what: str) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert off_by(value * factor, want[name]) < FP32_GRADIENTS, f"{what}: {name}"


@pytest.mark.parametrize("family", BUILDERS)
def test_the_experts_matter(truths: dict[str, Truth], family: str) -> None:
    assert rms(truths[family].without_experts, truths[family].logits) > 0.2
    assert all(truths[family].gradients[name].any() for name in truths[family].gradients)


@pytest.mark.parametrize("family", BUILDERS)
def test_logits_and_generated_tokens_of_one_batch_on_every_rank(
    run: Run, truths: dict[str, Truth], family: str
) -> None:
    for found in run.answers:
        assert off_by(found[family].replicated, truths[family].logits) < FP32_LOGITS
        assert torch.equal(found[family].continuation, truths[family].continuation)


@pytest.mark.parametrize("family", BUILDERS)
def test_logits_and_generated_tokens_of_a_batch_shared_out(run: Run, truths: dict[str, Truth], family: str) -> None:
    for rank, found in enumerate(run.answers):
        mine = share(rank, run.world_size)
        assert off_by(found[family].sharded, truths[family].logits[mine]) < FP32_LOGITS
        # Ranks stop at different lengths, and go on taking part until the last one has.
        want = truths[family].continuation[mine, : NEW_TOKENS - rank]
        assert torch.equal(found[family].own_continuation[:, : NEW_TOKENS - rank], want)


@pytest.mark.parametrize("feeding", ["allreduce", "alltoall", "recomputed"])
@pytest.mark.parametrize("family", BUILDERS)
def test_training_equals_one_process_on_the_whole_batch(
    run: Run, truths: dict[str, Truth], family: str, feeding: str
) -> None:
    right = truths[family]
    losses = [found[family].losses[feeding] for found in run.answers]
    loss = losses[0] if feeding == "allreduce" else torch.stack(losses).sum()
    assert off_by(loss, right.loss) < FP32_LOGITS
    for rank, found in enumerate(run.answers):
        want = {name: local_part(name, value, rank, run.world_size) for name, value in right.gradients.items()}
        check_gradients(found[family].gradients[feeding], want, what=f"rank {rank}")
        norm = torch.stack([value.norm() for value in right.gradients.values()]).norm()
        assert off_by(found[family].norms[feeding], norm) < FP32_GRADIENTS


@pytest.mark.parametrize("name", ["bf16", "fp8_block128"])
@pytest.mark.parametrize("family", BUILDERS)
def test_rows_that_travel_rounded(run: Run, truths: dict[str, Truth], family: str, name: str) -> None:
    """Each layer with experts adds, in root mean square, no more than the format's own tolerance."""
    got = torch.cat([found[family].by_format[name] for found in run.answers])
    assert 0 < rms(got, truths[family].logits) < MOE_LAYERS * moelink.get_format(name).tolerance


@pytest.mark.parametrize("family", BUILDERS)
def test_a_model_in_bf16_is_as_good_as_unsharded(
    run: Run, truths: dict[str, Truth], folders: dict[str, str], family: str
) -> None:
    """Its distance from the model in fp32 is at most half as much again as that of transformers' own bf16 model."""
    got = torch.cat([found[family].bf16 for found in run.answers])
    unsharded = truth(folders[family], torch.bfloat16).logits
    assert rms(got, truths[family].logits) < 1.5 * rms(unsharded, truths[family].logits)


@pytest.mark.parametrize("family", BUILDERS)
def test_a_rank_reads_its_own_experts_only(run: Run, folders: dict[str, str], family: str) -> None:
    """The ranks were given folders in which the files of all other experts are missing; and the report adds up."""
    files = files_by_expert(folders[family])
    rest = files.pop("rest.safetensors")
    owned = ExpertMap(NUM_EXPERTS, run.world_size)
    for rank, found in enumerate(run.answers):
        names = [f"expert-{expert}.safetensors" for expert in range(owned.first(rank), owned.first(rank + 1))]
        mine = [tensor for name in names for tensor in files[name].values()]
        report = found[family].read
        assert report.files == tuple(sorted([*names, "rest.safetensors"]))
        assert report.tensors == len(mine) + len(rest)
        assert report.nbytes == sum(tensor.nbytes for tensor in [*mine, *rest.values()])
        assert report.other_ranks == sum(len(tensors) for tensors in files.values()) - len(mine)
        assert not report.ignored


@pytest.mark.parametrize("family", BUILDERS)
def test_the_whole_model_is_written_again(run: Run, folders: dict[str, str], family: str) -> None:
    was, now = tensors_of(folders[family]), tensors_of(run.saved / family)
    assert was.keys() == now.keys()
    assert all(torch.equal(was[name], now[name]) for name in was)


@needs_registry
@pytest.mark.parametrize("run", [2, 4], ids=lambda size: f"{size}-ranks", indirect=True)
@pytest.mark.parametrize("family", BUILDERS)
def test_transformers_own_expert_parallelism(run: Run, truths: dict[str, Truth], family: str) -> None:
    right = truths[family]
    for rank, found in enumerate(run.registered):
        mine: Any = found[family]
        assert mine.modes == ["allreduce", "alltoall"]
        assert run.world_size != 4 or "one each (tp_size == 1), got tp_size=2 and ep_size=4" in mine.refused
        assert off_by(mine.replicated, right.logits) < FP32_LOGITS
        assert torch.equal(mine.continuation, right.continuation)
        assert off_by(mine.sharded, right.logits[share(rank, run.world_size)]) < FP32_LOGITS
        check_gradients(mine.gradients["allreduce"], right.gradients, what=f"rank {rank}, same batch")
        # FSDP takes the mean over ranks where one process takes the sum.
        check_gradients(mine.gradients["alltoall"], right.gradients, factor=run.world_size, what=f"rank {rank}, FSDP")


def test_a_model_compiles_as_one_graph(folders: dict[str, str]) -> None:
    """With the all-reduce of mode "allreduce" in it, besides dispatch and combine."""
    assert all(run_ranks(compiled, 2, folders["mixtral"], timeout=200))


def test_mishaps_reach_every_rank_and_end_in_clear_errors(
    folders: dict[str, str], truths: dict[str, Truth], tmp_path: Path
) -> None:
    """Three ranks: what one rank misses all are told, and eight experts are spread three, three, two."""
    broken, small = tmp_path / "broken", tmp_path / "small"
    files = files_by_expert(folders["mixtral"])
    write(broken, folders["mixtral"], files, leave_out={"expert-7.safetensors"})
    build("mixtral", num_local_experts=2).save_pretrained(small)
    malformed = tmp_path / "malformed"
    write(malformed, folders["mixtral"], files, leave_out=set())
    (malformed / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": 7}}')
    said = run_ranks(mishaps, 3, folders["mixtral"], str(broken), str(small), str(malformed), timeout=120)
    assert [s["experts"] for s in said] == [3, 3, 2]
    for rank, s in enumerate(said):
        assert s["small"] == "ConfigError: num_experts: expected at least one expert for each of 3 ranks, got 2"
        assert s["broken"].startswith(f"CheckpointError: {'' if rank == 2 else 'rank 2: '}checkpoint {broken}: missing")
        assert (
            "file expert-7.safetensors, which should hold tensors model.layers.0.block_sparse_moe.experts.7.w1"
            in (s["broken"])
        )
        assert s["malformed"].startswith(f"CheckpointError: {'' if rank == 1 else 'rank 1: '}checkpoint {malformed}")
        assert "save_pretrained of the ParallelModel" in s["saved"]
        assert off_by(s["logits"], truths["mixtral"].logits) < FP32_LOGITS
