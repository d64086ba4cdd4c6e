"""How many ranks and nodes a token reaches: the closed formulas against draws, and traces against plain counting."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelink.errors import ConfigError
from moelink.tools.plan.routing import Routing, Statistics, Trace, Uniform, Zipf, make_routing, read_array
from moelink_bench.presets import Case
from moelink_bench.workload import draw_ids

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")

DRAWS = 40_000


def npy(header: str) -> bytes:
    """A .npy file with this header and four numbers."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(32)


def drawn(distribution: str, num_experts: int, topk: int) -> np.ndarray:
    """Ids as the bench draws them."""
    case = Case(tokens=DRAWS, num_experts=num_experts, topk=topk, distribution=distribution)
    return draw_ids(case, torch.Generator().manual_seed(1), 1).numpy().astype(np.int64)


def counted(ids: np.ndarray, bounds: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hits and slots of each block, one block after the other."""
    blocks = [(ids >= first) & (ids < last) for first, last in zip(bounds[:-1], bounds[1:], strict=True)]
    return np.array([b.any(1).mean() for b in blocks]), np.array([b.sum(1).mean() for b in blocks])


@pytest.mark.parametrize(("kind", "name"), [(Uniform, "uniform"), (Zipf, "zipf")])
@pytest.mark.parametrize(
    ("num_experts", "topk", "bounds"),
    [(64, 6, [0, 8, 16, 24, 32, 40, 48, 56, 64]), (50, 8, [0, 17, 34, 50]), (7, 7, [0, 3, 5, 7]), (9, 1, [0, 1, 1, 9])],
)
def test_formulas_against_draws(kind: type[Routing], name: str, num_experts: int, topk: int, bounds: list[int]) -> None:
    routing = kind(num_experts, topk)
    hits, slots = counted(drawn(name, num_experts, topk), bounds)
    # Five standard errors of a share, and of a mean of numbers that are at most topk.
    assert np.abs(routing.hits(bounds) - hits).max() <= 5 * 0.5 / DRAWS**0.5
    assert np.abs(routing.slots(bounds) - slots).max() <= 5 * 0.5 * topk / DRAWS**0.5
    assert routing.slots(bounds).sum() == pytest.approx(topk)


def test_uniform_by_hand() -> None:
    assert Uniform(4, 2).hits([0, 2]).tolist() == pytest.approx([5 / 6])
    assert Uniform(256, 8).hits(range(0, 257, 32)).sum() == pytest.approx(
        8 * (1 - np.prod([(224 - i) / (256 - i) for i in range(8)]))
    )


def test_zipf_by_hand() -> None:
    assert Zipf(2, 1).hits([0, 1, 2]).tolist() == pytest.approx([2 / 3, 1 / 3], abs=1e-12)
    # Three experts of weights 6, 3, 2 (of 11), two of them: expert 2 stays out when the others come in either order.
    assert Zipf(3, 2).hits([2, 3]).tolist() == pytest.approx([1 - (6 / 11 * 3 / 5 + 3 / 11 * 6 / 8)], abs=1e-12)


def test_zipf_is_uniform_when_all_experts_are_taken() -> None:
    assert Zipf(12, 12).hits([0, 5, 12]).tolist() == pytest.approx([1, 1], abs=1e-12)


def test_a_large_zipf_is_quick_and_sums_up() -> None:
    assert Zipf(1024, 10).slots(range(0, 1025, 8)).sum() == pytest.approx(10, rel=1e-9)


@given(
    st.integers(1, 30).flatmap(
        lambda experts: st.tuples(
            st.just(experts),
            st.lists(st.lists(st.integers(-1, experts - 1), min_size=3, max_size=3), min_size=1, max_size=9),
            st.integers(1, 40),
        )
    )
)
@settings(max_examples=60, deadline=None)
def test_traces_are_counted(what: tuple[int, list[list[int]], int]) -> None:
    experts, rows, ranks = what
    ids = np.array(rows)
    statistics = Statistics.of(Trace(ids), num_experts=experts, ranks=ranks, nodes=1)
    bounds = [r * (experts // ranks) + min(r, experts % ranks) for r in range(ranks + 1)]
    hits, slots = counted(ids, bounds)
    assert statistics.rank_hits.tolist() == pytest.approx(hits.tolist())
    assert statistics.rank_slots.tolist() == pytest.approx(slots.tolist())
    assert statistics.node_hits.tolist() == pytest.approx([(ids >= 0).any(1).mean()])


def test_the_docstring_of_a_trace() -> None:
    trace = Trace(np.array([[0, 1], [1, 2], [3, -1]]))
    assert trace.hits([0, 2, 4]).tolist() == pytest.approx([2 / 3, 2 / 3])
    assert trace.slots([0, 2, 4]).tolist() == pytest.approx([1, 2 / 3])


def test_a_trace_is_read(tmp_path: Path) -> None:
    ids = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    np.save(tmp_path / "trace.npy", ids)
    trace = make_routing(str(tmp_path / "trace.npy"), num_experts=24, topk=4)
    assert isinstance(trace, Trace)
    assert trace.topk_ids.tolist() == ids.reshape(6, 4).tolist()
    assert trace.name == "trace.npy, 6 tokens"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (np.zeros((3, 4)), "integers"),
        (np.zeros((0, 2), dtype=np.int64), "at least one token"),
        (np.zeros(6, dtype=np.int64), "at least one token"),
        (np.zeros((3, 3), dtype=np.int64), "2 ids a token"),
        (np.array([[0, 8]]), r"ids in \[-1, 8\), got '8 in"),
        (np.array([[0, -2]]), r"ids in \[-1, 8\), got '-2 in"),
        (np.array([[0, None]], dtype=object), "a .npy file"),
        (b"no numpy at all", "a .npy file"),
        (b"", "a .npy file"),
        (b"PK\x03\x04" + bytes(40), "a .npy file"),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000, 2), }"), r"too short for shape \[1000"),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (2, 2), }")[:-1], r"too short for shape \[2, 2\]"),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (-2, -2), }"), "no header of numbers"),
        (npy("{'descr': '<i3', 'fortran_order': False, 'shape': (2, 2), }"), "no header of numbers"),
        (npy("{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (2, 2), }"), "no header of numbers"),
        (npy("(" * 3000), "no header of numbers"),
        (npy("{'descr': [\n"), "no header of numbers"),
        (npy("{[]: 1}"), "no header of numbers"),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (" + "1" * 4000), "no header of numbers"),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (" + "1, " * 100 + "2), }"), "a .npy file"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, content: np.ndarray | bytes, words: str) -> None:
    path = tmp_path / "bad.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(ConfigError, match=words):
        make_routing(str(path), num_experts=8, topk=2)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_what_numpy_writes_is_read(order: Literal["C", "F"], version: tuple[int, int], tmp_path: Path) -> None:
    for shape in ((), (5,), (4, 2), (2, 3, 4)):
        for dtype in ("u1", "<i2", ">i4", "i8", "?", "f4"):
            array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype, order=order)
            with (tmp_path / "trace.npy").open("wb") as file:
                np.lib.format.write_array(file, array, version)
            found = read_array(tmp_path / "trace.npy")
            assert found.dtype == array.dtype
            assert found.shape == array.shape
            assert (found == array).all()


def test_nothing_of_a_trace_is_run(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "touched",)

    np.save(tmp_path / "pickled.npy", np.array([[Touch(), 1]], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="no header of numbers"):
        make_routing(str(tmp_path / "pickled.npy"), num_experts=8, topk=2)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["skewed", "", ".", "x" * 5000, "\0"])
def test_unknown_routings_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'uniform', 'zipf' or the path"):
        make_routing(name, num_experts=8, topk=2)


def test_zipf_of_any_size_fits_into_memory() -> None:
    with pytest.raises(ConfigError, match="of at most 65536 with zipf"):
        make_routing("zipf", num_experts=1 << 20, topk=8)
