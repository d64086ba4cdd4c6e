"""Releases of torch and Triton: too old ones are refused by name before anything is sent, untested pairs warn once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton

import moelink
from moelink import contract
from moelink.errors import PeerTimeoutError, UnsupportedError
from moelink.memory import create_all
from moelink.testing import run_ranks
from moelink.transports import build
from moelink.version import OLDEST, TESTED_PAIRS, check_pair
from tests.support.paths import ROOT

FIELDS: dict[str, Any] = {"num_experts": 2, "topk": 1, "hidden_size": 16, "max_tokens_per_rank": 4}
TOO_OLD = r"triton: expected release 3\.6 or a newer one for the symmetric transport, got 3\.5\.1; run pip install"
UNTESTED = (
    r"torch \+ triton: expected a pair that moelink was tested with \(2\.11 \+ 3\.6, .*, got 2\.16\.0a0 \+ 3\.10\.2; "
)


@pytest.fixture(autouse=True)
def nothing_checked_before() -> Iterator[None]:
    check_pair.cache_clear()
    yield
    check_pair.cache_clear()


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    ("torch_release", "triton_release"),
    [
        ("2.11.0+cu130", "3.6.0"),
        ("2.13.1", "3.6.0"),
        ("2.13.0", "3.7.1"),
        ("2.14.1+cpu", "3.8.0+git1a2b"),
        ("2.15", "3.9"),
    ],
)
def test_a_tested_pair_passes_without_a_word(torch_release: str, triton_release: str) -> None:
    check_pair(torch_release, triton_release)


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    ("torch_release", "triton_release", "message"),
    [
        ("2.13.0", "3.5.1", TOO_OLD),
        ("2.13.0", None, r"triton: expected release 3\.6 or a newer one .*, got none; run pip install 'triton>=3\.6'"),
        (
            "2.9.1",
            "3.6.0",
            r"torch: expected release 2\.10 or a newer one .*, got 2\.9\.1; run pip install 'torch>=2\.10'",
        ),
    ],
)
def test_what_is_too_old_is_refused_by_name(torch_release: str, triton_release: str | None, message: str) -> None:
    for _ in range(2):  # and again at the next call
        with pytest.raises(UnsupportedError, match=message):
            check_pair(torch_release, triton_release)


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    ("torch_release", "triton_release"), [("2.16.0a0", "3.10.2"), ("2.11.0", "3.9.0"), ("2.10.0", "3.6.0")]
)
def test_an_untested_pair_warns_once(torch_release: str, triton_release: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(f"got {torch_release} + {triton_release}; ")):
        check_pair(torch_release, triton_release)
    check_pair(torch_release, triton_release)  # a warning is an error here


def test_the_warning_is_silenced_as_it_says() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_pair("2.16.0", "3.10.0")
        (text,) = [str(warning.message) for warning in caught]
        (arguments,) = re.findall(r"warnings\.filterwarnings\('(\w+)', '([^']+)'\)", text)
        warnings.filterwarnings(*arguments)
        check_pair.cache_clear()
        check_pair("2.16.0", "3.10.0")
    assert len(caught) == 1


@pytest.fixture
def old_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is allocated in this test is one too early."""
    monkeypatch.setattr(build, "create_all", lambda *_: pytest.fail("allocated before the check"))


def test_a_communicator_over_kernels_is_refused_before_it_allocates(old_triton: None, no_memory: None) -> None:
    with pytest.raises(UnsupportedError, match=TOO_OLD):
        moelink.init(**FIELDS, device="cpu", transport="symmetric")
    with pytest.raises(UnsupportedError, match=TOO_OLD):
        moelink.init_devices(["cpu", "cpu"], **FIELDS, transport="symmetric")


def test_a_platform_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch, no_memory: None) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"triton: .*, got none; .* or use transport='collective'"):
        moelink.init(**FIELDS, device="cpu", transport="symmetric")


def test_the_collective_transport_needs_no_triton(old_triton: None) -> None:
    with moelink.init(**FIELDS, device="cpu", transport="collective") as ep:
        ids = torch.tensor([[1], [0]])
        assert ep.dispatch(torch.ones(2, 16, dtype=torch.bfloat16), ids).row_offsets.tolist() == [0, 1, 2]


def test_the_contract_is_refused(old_triton: None) -> None:
    params = contract.EPParams(
        dispatch_fmt_str="BF16", hidden_size=16, top_k=1, n_experts=2, max_token_per_rank=4, n_gpus_per_node=1
    )
    (memory,) = create_all(["cpu"], params.nbytes)
    with pytest.raises(UnsupportedError, match=TOO_OLD):
        contract.ep_init(params, memory)
    memory.close()


def test_an_untested_pair_warns_at_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.10.2")
    monkeypatch.setattr(torch, "__version__", "2.16.0a0")
    with pytest.warns(UserWarning, match=UNTESTED):
        moelink.init(**FIELDS, device="cpu", transport="symmetric").close()


def refused_on_one(rank: int, world_size: int) -> str:
    """What a rank raises when rank 1 has a Triton that is too old."""
    if rank == 1:
        triton.__version__ = "3.5.1"
    with pytest.raises((UnsupportedError, PeerTimeoutError)) as raised:
        moelink.init(**FIELDS, device="cpu", transport="symmetric")
    return f"{type(raised.value).__name__}: {raised.value}"


def test_peers_of_a_refused_rank_learn_of_it() -> None:
    first, second = run_ranks(refused_on_one, 2)
    assert re.match(f"UnsupportedError: {TOO_OLD}", second)
    assert re.match(r"PeerTimeoutError: rank 0: rank 1 did not .*it raised UnsupportedError in init", first)


def test_the_table_is_the_same_wherever_it_stands() -> None:
    """In the Makefile's files of constraints, in the nightly job, in the page and in pyproject.toml."""
    names = [f"torch-{first}-triton-{second}" for first, second in TESTED_PAIRS]
    found = {path.stem: path.read_text() for path in (ROOT / "requirements" / "pairs").glob("*.txt")}
    assert sorted(found) == sorted(names)
    for (first, second), name in zip(TESTED_PAIRS, names, strict=True):
        assert re.search(rf"^torch=={re.escape(first)}\.\d", found[name], re.MULTILINE), name
        assert re.search(rf"^triton=={re.escape(second)}\.\d", found[name], re.MULTILINE), name
    nightly = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"test-pair PAIR=(\S+)", nightly) == names
    page = (ROOT / "docs" / "works-with.md").read_text()
    assert re.findall(r"^\| (2\.\d+) \| (3\.\d+) \|", page, re.MULTILINE) == list(TESTED_PAIRS)
    project = (ROOT / "pyproject.toml").read_text()
    for name, oldest in OLDEST.items():
        assert f'"{name}>={oldest}' in project
