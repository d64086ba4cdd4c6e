"""Test session set-up.

Tests have two tiers, which :mod:`tests.tiers` explains. ``pytest`` runs the quick one, ``pytest --full`` everything.

Kernels are interpreted unless a GPU is there: the variable must be set before anything imports triton, and it is
inherited by the ranks that tests spawn.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support.paths import ROOT
from tests.tiers import OWN_TIERS, choose, folder_of

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Processes that tests start have the tests and the other distributions without having them installed.
PATHS = [ROOT, ROOT / "testing/src", ROOT / "benchmarks/src"]
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
torch.set_num_threads(1)
from tests.support import (  # noqa: E402
    fast_kernels,  # noqa: F401 - for its effect, when it is known whether kernels are interpreted
    rank_server,
)
from tests.support.quick_tier import QuickTier  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the full tier: all parameter sets of every test")
    parser.addoption("--compiled", action="store_true", help="kernels of GPU tests are compiled already (gpu_files.py)")


def pytest_configure(config):
    """Warnings are errors in the processes that tests start as well, with the same filters (``pyproject.toml``)."""
    os.environ["PYTHONWARNINGS"] = ",".join(config.getini("filterwarnings"))
    quick = not config.getoption("full") and not torch.cuda.is_available()
    config.pluginmanager.register(QuickTier(whole=quick and _is_whole(config), quick=quick), "quick-tier")


def _is_whole(config):
    return config.args == config.getini("testpaths") and not config.option.keyword


def pytest_ignore_collect(collection_path, config):
    """Save the seconds of collecting folders that a whole run of the quick tier leaves out."""
    whole = _is_whole(config) and not config.getoption("full") and config.option.markexpr == "not gpu"
    if whole and collection_path.is_relative_to(ROOT):
        inside = collection_path.relative_to(ROOT).as_posix() + "/"
        return True if folder_of(inside) in OWN_TIERS else None
    return None


CHOSEN = pytest.StashKey[list[str]]()
"""Node ids of the tests that run."""


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    if not config.getoption("full"):
        items[:], left_out = choose(items, config.args)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
    config.stash[CHOSEN] = [item.nodeid for item in items]


DESELECTED = pytest.StashKey[int]()


def pytest_deselected(items):
    for item in items[:1]:
        item.config.stash[DESELECTED] = item.config.stash.get(DESELECTED, 0) + len(items)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = session.config.stash.get(DESELECTED, 0)


def pytest_runtest_logreport(report):
    """Show a failure at once where there is a GPU: a run there may be cut off before pytest lists its failures."""
    if report.failed and torch.cuda.is_available():
        print(f"\n{report.longreprtext}", flush=True)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Of pytest-xdist: a worker has ended. What workers deselect is missing in the closing line without this."""
    stats = node.config.pluginmanager.get_plugin("terminalreporter").stats
    stats["deselected"] = [SimpleNamespace()] * getattr(node, "workeroutput", {}).get("deselected", 0)


@pytest.fixture(scope="session", autouse=True)
def started_rank_server():
    """Interpreted ranks start in a tenth of a second each. On a GPU machine each rank loads what it uses."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        rank_server.start()


@pytest.fixture
def tests_of_the_quick_tier(pytestconfig):
    """A function that returns the node ids of the quick tier in files of ``tests/``.

    They are those of this run where it is of the quick tier and has all tests. Otherwise pytest collects the files.
    """

    def of(files):
        if _is_whole(pytestconfig) and not pytestconfig.getoption("full"):
            return {node for node in pytestconfig.stash[CHOSEN] if node.partition("::")[0] in set(files)}
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        done = subprocess.run([*command, *files], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        return {line for line in done.stdout.splitlines() if "::" in line}

    return of


@pytest.fixture
def patient(monkeypatch):
    """Probes of this process wait for an answer longer than 0.4 s, which a busy machine may take to give it."""
    monkeypatch.setattr("moelink.control.probe._PROBE_SECONDS", 20.0)


@pytest.fixture
def filled_memory():
    """What is not written shows: torch fills new tensors with NaN, or with the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture
def blocks(monkeypatch):
    """A function that sets how many columns of a row combine sums at a time, and, if given, how many tokens are few."""
    import moelink.kernels.launch.constants as specs
    import moelink.memory.workspace as workspaces

    def set_blocks(columns, few=workspaces.FEW_TOKENS):
        monkeypatch.setattr(workspaces, "COMBINE_BLOCK", columns)
        monkeypatch.setattr(workspaces, "FEW_TOKENS", few)

    specs.combine_spec.cache_clear()
    yield set_blocks
    specs.combine_spec.cache_clear()


def pytest_collection_finish(session):
    """On GPU machines: what the selected GPU tests launch is in Triton's cache before the first of them begins, so none
    of it counts as the time of a test. Workers of pytest-xdist compile side by side what their tests need; with
    ``--compiled`` it is there already."""
    others = hasattr(session.config, "workerinput") or session.config.option.compiled
    if torch.cuda.is_available() and not others and not session.config.option.collectonly:
        from tests.gpu.gpu_compile import ahead, compile_all

        compile_all(ahead(item for item in session.items if item.get_closest_marker("gpu")))
