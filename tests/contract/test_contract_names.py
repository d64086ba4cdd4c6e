"""Launch facts, layout functions and names of the contract; the page that lists them; examples."""

import dataclasses
import doctest
import importlib
import re

import pytest

from moelink import contract
from moelink.contract.combine_kernel import combine_kernel
from moelink.contract.layouts import dispatch_kernel
from moelink.errors import ArgumentError, ConfigError, UnsupportedError
from moelink.kernels.launch.device import is_interpreted
from moelink.memory import workspace
from moelink.memory.protocol import CONTROL_WORDS, COUNT_HEADER, RECORD_WORDS
from tests.contract.contract_names import PAGES
from tests.contract.contract_ranks import params_of, ranks_of, setup
from tests.support.paths import ROOT

DOCS = ROOT / "docs" / "contract.md"

FACTS = dict(
    num_threads=256, n_sms=132, top_k=8, n_experts=256, n_ranks=8, msg_bytes=14336, max_tokens_per_rank=128,
    p2p_world_size=8,
)  # fmt: skip


def test_launch_facts() -> None:
    kernel = contract.EPCombineKernel(**FACTS)
    assert (kernel.n_local_experts, kernel.n_warps) == (32, 8)
    assert (kernel.n_send_sms, kernel.n_reduce_sms, kernel.n_wait_sms) == (131, 131, 1)
    assert kernel.n_reduce_sms + kernel.n_wait_sms == kernel.n_sms
    assert dataclasses.replace(kernel, n_experts=7, n_ranks=3, p2p_world_size=3).n_local_experts == 3
    assert dataclasses.replace(kernel, warp_size=64).n_warps == 4
    with pytest.raises(UnsupportedError, match="p2p_world_size=4"):
        dataclasses.replace(kernel, p2p_world_size=4)
    assert dataclasses.replace(kernel, p2p_world_size=2, use_shmem=True).inter_node_ranks == 6


IMPOSSIBLE = [
    *[(name, value) for name in FACTS for value in (-3, 2.0, True, None)],
    *[(name, 0) for name in FACTS if name != "max_tokens_per_rank"],
    ("num_threads", 7), ("num_threads", 2048), ("warp_size", 16), ("p2p_world_size", 3), ("p2p_world_size", 16),
    *[(name, "no") for name in ("use_shmem", "fused_shared_expert", "skip_a2a")],
]  # fmt: skip


def test_impossible_launch_facts_are_refused() -> None:
    for kind in (contract.EPCombineKernel, contract.EPDispatchKernel):
        for name, value in IMPOSSIBLE:
            with pytest.raises(ConfigError, match=f"^{name}: expected "):
                kind(**{**FACTS, name: value})
        with pytest.raises(ConfigError, match="use_shmem: expected False with skip_a2a"):
            kind(**FACTS, use_shmem=True, skip_a2a=True)
        assert kind(**{**FACTS, "max_tokens_per_rank": 0}).n_warps == 8
        assert kind(**FACTS, use_shmem=True).inter_node_ranks == 0
    with pytest.raises(ConfigError, match="n_parts"):
        contract.EPCombineKernel(**FACTS, n_parts=0)
    with pytest.raises(ConfigError, match="pre_reduce"):
        contract.EPCombineKernel(**FACTS, pre_reduce=1)


def test_a_fused_shared_expert_adds_a_group_that_is_not_sent() -> None:
    plain = contract.EPCombineKernel(**FACTS)
    fused = dataclasses.replace(plain, fused_shared_expert=True)
    assert (plain.n_groups, plain.max_shared_rows) == (32, 0)
    assert (fused.n_groups, fused.max_shared_rows) == (33, 128)
    assert dataclasses.replace(fused, skip_a2a=True, n_ranks=3, p2p_world_size=1).max_shared_rows == 43
    params = contract.EPParams(
        dispatch_fmt_str="BF16", hidden_size=16, top_k=2, n_experts=7, max_token_per_rank=5, n_gpus_per_node=3,
        fused_shared_expert=True,
    )  # fmt: skip
    for kernel in (dispatch_kernel(params, n_sms=2), combine_kernel(params, n_sms=2)):
        assert (kernel.n_groups, kernel.max_shared_rows) == (
            params.config(0).num_groups,
            params.config(0).max_shared_rows,
        )


def test_layouts_in_worked_numbers() -> None:
    combine = contract.EPCombineKernel(**FACTS)
    assert combine.send_buf_layout(3) == 43008
    assert combine.recv_buf_layout(5, 2) == 602112
    assert dataclasses.replace(combine, pre_reduce=True).recv_buf_layout(5, 2) == 3741696
    assert combine.recv_count_layout(1, 3) == 1048
    assert dataclasses.replace(combine, n_parts=4).recv_count_layout(1, 3, 2) == 4208
    dispatch = contract.EPDispatchKernel(**{**FACTS, "msg_bytes": 7552})
    assert dispatch.recv_buf_layout(1, 2) == 981760
    assert dispatch.recv_count_layout(1, 0) == 384
    with pytest.raises(UnsupportedError, match="no send buffer"):
        dispatch.send_buf_layout(0)
    across = dataclasses.replace(dispatch, p2p_world_size=2, use_shmem=True)
    assert across.send_buf_layout(2, far=1) == 130 * 7552
    assert (
        dataclasses.replace(combine, msg_bytes=14400, p2p_world_size=2, use_shmem=True).send_buf_layout(3) == 3 * 14464
    )
    for call in (
        lambda: across.send_buf_layout(0, far=6),
        lambda: combine.recv_buf_layout(128, 0),
        lambda: combine.recv_buf_layout(0, 8),
        lambda: combine.recv_count_layout(8, 0),
        lambda: dispatch.recv_buf_layout(0, -1),
        lambda: dispatch.recv_count_layout(0, 32),
    ):
        with pytest.raises(ArgumentError, match="expected in"):
            call()


def test_layouts_of_a_deepseek_shape_match_the_workspace() -> None:
    params = contract.EPParams(
        dispatch_fmt_str="BlockwiseFP8", hidden_size=7168, top_k=8, n_experts=256, max_token_per_rank=128,
        n_gpus_per_node=8,
    )  # fmt: skip
    assert (params.config(0).dispatch_format, params.n_ranks, params.workspace.message_bytes) == (
        "fp8_block128",
        8,
        7552,
    )
    regions = params.workspace.regions
    dispatch, combine = (make(params, n_sms=132) for make in (dispatch_kernel, combine_kernel))
    assert dispatch.recv_buf_layout(7, 127) + 7552 == regions["messages"].nbytes
    assert combine.recv_buf_layout(127, 7) + 14336 == regions["rows"].nbytes
    assert combine.n_parts == 4
    assert combine.recv_count_layout(7, 127, 3) + 8 == regions["combine_flag"].nbytes
    assert dispatch.recv_count_layout(7, 31) + 8 == regions["counts"].nbytes


@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("name", ("params", "buffers"))
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"moelink.contract.{name}")
    assert doctest.testmod(module).failed == 0


def rows_of_docs() -> dict[str, set[str]]:
    """First cells of the tables of docs/contract.md, by section."""
    sections: dict[str, set[str]] = {}
    title = ""
    for line in DOCS.read_text().splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ").strip(" `")
        match = re.match(r"\| `([^`]+)`", line)
        if match:
            cells = line.split("|")
            assert len(cells) >= 4, line
            assert cells[2].strip(), line
            sections.setdefault(title, set()).update(re.findall(r"`([^`]+)`", cells[1]))
    return sections


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_the_contract_has_a_row(page: str) -> None:
    sections = rows_of_docs()
    assert page in sections, f"docs/contract.md has no section {page!r}"
    assert not set(PAGES[page]) - sections[page], f"{page}: names without a row"


def test_the_page_begins_with_what_a_port_changes() -> None:
    text = DOCS.read_text()
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections[:3] == ["What to change in a port", "Two ways to call it", "Errors"]
    assert text.count("```python") >= 3
    assert "<!-- test: skip" not in text  # tests/project/test_docs.py runs all of them
    for name in ("raise_error", "check", "PeerTimeoutError", "CapacityError", "RoutingError", "ProtocolError"):
        assert name in text[text.index("## Errors") : text.index("## Struct_ep_init")]


def test_names_that_the_docs_promise_exist() -> None:
    text = DOCS.read_text()
    promised = set(re.findall(r"`(?:moelink\.)?((?:kernels|contract)\.[A-Za-z_.]+)`", text))
    assert promised
    for name in promised:
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                thing = importlib.import_module("moelink." + ".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[cut:]:
                thing = getattr(thing, attribute)
            break
        else:
            pytest.fail(name)


@pytest.mark.parametrize(
    "number, pattern",
    [
        (CONTROL_WORDS, r"`ep\.atomic_counters\[0\]`: \[(\d+)\] int64"),
        (CONTROL_WORDS, r"the same (\d+) words"),
        (COUNT_HEADER, r"counts \[R, (\d+) \+ L\] int64"),
    ],
)
@pytest.mark.quick("each is another number")
def test_numbers_of_the_page_are_those_of_the_protocol(number: int, pattern: str) -> None:
    assert re.findall(pattern, DOCS.read_text()) == [str(number)]


def test_numbers_of_the_docstrings_are_those_of_the_protocol() -> None:
    text = " ".join((contract.EPBuffers.__doc__ or "").split())
    assert re.findall(r"of group 1, \[(\d+)\] int64", text) == [str(CONTROL_WORDS)]
    assert re.findall(r"record: \[(\d+)\] int64", text) == [str(RECORD_WORDS)]
    header = f"counts [R, {COUNT_HEADER} + L] int64"
    assert header in (importlib.import_module("moelink.contract.layouts").__doc__ or "")
    assert f"control [{CONTROL_WORDS}] int64" in " ".join((workspace.__doc__ or "").split())
    if is_interpreted():
        (ep,) = ranks_of(params_of(setup(), 1))
        assert {tuple(group.shape) for group in ep.atomic_counters} == {(CONTROL_WORDS,)}
        assert tuple(ep.record.shape) == (RECORD_WORDS,)
