"""Checkpoints of torch.distributed: saved on some ranks, loaded on others, training as on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import moelink
from moelink.nn import MoE, Placement, TrainingState, all_reduce_gradients
from moelink.testing import run_ranks
from tests.nn.plain_moe import SIZES, Model, close, full_state, loss_of, plain_model, tokens

STEPS = 2


def batch(step: int) -> Tensor:
    return torch.cat([tokens(rank, step) for rank in range(2)])


def train(ep: moelink.Communicator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    config = ep.config
    for step in steps:
        optimizer.zero_grad()
        loss_of(model(batch(step)[config.rank :: config.world_size])).backward()
        all_reduce_gradients(model)
        optimizer.step()


def trained(model: torch.nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def save(rank: int, world_size: int, folder: str, fields: dict[str, Any]) -> None:
    with moelink.init(**SIZES | fields) as ep:
        model = Model(ep)
        optimizer = trained(model)
        train(ep, model, optimizer, range(STEPS))
        dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)


def resume(rank: int, world_size: int, folder: str, fields: dict[str, Any]) -> dict[str, Tensor]:
    """Load into a model of other weights, and go on training."""
    with moelink.init(**SIZES | fields) as ep:
        model = Model(ep, seed=77)
        optimizer = trained(model)
        dcp.load({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)
        train(ep, model, optimizer, range(STEPS, 2 * STEPS))
        return {name: value.clone() for name, value in model.state_dict().items()}


def plain_training() -> dict[str, Tensor]:
    """The weights after all steps on one process, in plain torch."""
    state = {name: value.clone().requires_grad_() for name, value in full_state().items()}
    optimizer = torch.optim.Adam(list(state.values()), lr=0.01)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss_of(plain_model(state, batch(step))).backward()
        optimizer.step()
    return {name: value.detach() for name, value in state.items()}


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2), (6, 2)])
def test_training_goes_on_on_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    run_ranks(save, before, str(tmp_path), {})
    results, want = run_ranks(resume, after, str(tmp_path), {}), plain_training()
    for name, value in want.items():
        parts = [result[name] for result in results]
        got = torch.cat(parts) if ".experts." in name else parts[0]
        assert (got - value).abs().max() < 1e-9, name


def test_a_fused_shared_expert_and_moments_of_all_experts_are_kept(tmp_path: Path) -> None:
    fused = {"fused_shared_expert": True}
    run_ranks(save, 2, str(tmp_path), fused)
    (one,) = run_ranks(resume, 1, str(tmp_path), fused)
    for result in run_ranks(resume, 2, str(tmp_path), fused):
        for name, value in one.items():
            got = result[name]
            close(got[:1] if ".experts." in name else got, value[:1] if ".experts." in name else value, name)


def test_the_file_has_each_tensor_as_one_rank_has_it(tmp_path: Path) -> None:
    """So a model that is not parallel loads it."""
    run_ranks(save, 2, str(tmp_path), {})
    found = dcp.FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata
    for name, value in full_state().items():
        assert found[f"training.model.{name}"].size == value.shape, name
        assert found[f"training.optimizer.state.{name}.exp_avg"].size == value.shape, name


def refused(rank: int, world_size: int) -> dict[str, str]:
    said = {}

    def tell(name: str, error: type[Exception], call: Any) -> None:
        with pytest.raises(error) as info:
            call()
        said[name] = str(info.value)

    with moelink.init(**SIZES | {"num_experts": 5}) as ep:
        layer = MoE(ep, intermediate_size=8)
        tell("uneven", moelink.UnsupportedError, lambda: TrainingState(layer))
    with moelink.init(**SIZES) as ep:
        moved = MoE(ep, intermediate_size=8, placement=Placement((5, 0, 1, 2, 3, 4)))
        tell("moved", moelink.UnsupportedError, lambda: TrainingState(moved))
        layer = MoE(ep, intermediate_size=8)
        layer.experts.register_parameter("adapter", torch.nn.Parameter(torch.zeros(7)))
        tell("adapter", moelink.UnsupportedError, lambda: TrainingState(layer))
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        tell("mesh", moelink.ArgumentError, lambda: TrainingState(MoE(ep, intermediate_size=8), mesh=mesh["b"]))
        dist.barrier()  # rank 0, which hosts the store, must not end while rank 1 makes groups of the mesh
    return said


def plain_state_dicts(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Save and load plain state dicts in every way; return the errors, and whether all other values were plain."""
    with moelink.init(**SIZES) as ep:
        model, other = Model(ep), Model(ep, seed=7)
        said = {}
        copies: dict[str, Callable[[], Any]] = {
            "as it is": model.state_dict,
            "of torch's function": lambda: {"model": get_model_state_dict(model)},
            "on the CPU": lambda: get_model_state_dict(model, options=StateDictOptions(cpu_offload=True)),
            "cloned": lambda: {name: value.detach().clone() for name, value in model.state_dict().items()},
            "copied": lambda: copy.deepcopy(model.state_dict()),
        }
        calls: dict[str, Callable[[], Any]] = {
            name: partial(lambda call: dcp.save(call(), checkpoint_id=folder), call) for name, call in copies.items()
        }
        dcp.save({name: value * 1 for name, value in model.state_dict().items()}, checkpoint_id=folder)
        calls["loaded"] = lambda: dcp.load(model.state_dict(), checkpoint_id=folder)
        for name, call in calls.items():
            with pytest.raises(CheckpointException) as info:
                call()
            said[name] = str(info.value)
        file = Path(folder) / f"{rank}.pt"
        torch.save(model.state_dict(), file)
        read = torch.load(file, weights_only=True)
        other.load_state_dict(read)
        equal = [torch.equal(value, read[name]) for name, value in other.state_dict().items()]
        other = Model(ep, seed=8)
        other.load_state_dict(model.state_dict(), assign=True)
        equal += [torch.equal(value, read[name]) for name, value in other.named_parameters()]
        kinds = {type(value) for value in read.values()} | {type(p.data) for p in other.parameters()}
        kinds.add(type(model.state_dict()["moe.experts.down_proj"] * 2))
        words = repr(model.state_dict()["moe.experts.down_proj"])
        return {"said": said, "equal": equal, "plain": kinds == {Tensor} and words.startswith("tensor(")}


def test_a_plain_state_dict_is_refused_and_is_plain_in_all_else(tmp_path: Path) -> None:
    for result in run_ranks(plain_state_dicts, 2, str(tmp_path)):
        assert all(result["equal"])
        assert result["plain"]
        for name, said in result["said"].items():
            assert "UnsupportedError: " in said, name
            assert "expected experts of all ranks for torch.distributed.checkpoint, got a plain state_dict" in said, (
                name
            )


def save_and_load(rank: int, world_size: int, folder: str) -> bool:
    with moelink.init(**SIZES) as ep:
        model, other = Model(ep), Model(ep, seed=7)
        dcp.save(model.state_dict(), checkpoint_id=folder)
        dcp.load(state := other.state_dict(), checkpoint_id=folder)
        return all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


def test_one_rank_with_all_experts_saves_a_plain_state_dict(tmp_path: Path) -> None:
    assert run_ranks(save_and_load, 1, str(tmp_path)) == [True]


def test_what_a_checkpoint_would_get_wrong_is_refused_on_every_rank() -> None:
    for said in run_ranks(refused, 2):
        assert "experts.gate_up_proj: expected as many experts on every rank" in said["uneven"]
        assert "in the order of their ids, got [" in said["moved"]
        assert "experts.adapter: expected 3 groups as the first dimension" in said["adapter"]
        assert "mesh: expected the ranks of the communicator" in said["mesh"]
