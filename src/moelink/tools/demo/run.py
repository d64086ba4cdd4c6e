"""The demonstration: real text through an expert-parallel layer, and the result compared with the unsharded layer."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from moelink.control.group import is_launched
from moelink.errors import ConfigError
from moelink.testing import run_ranks
from moelink.tools.demo.config import DemoConfig
from moelink.tools.demo.judge import Truth, judge
from moelink.tools.demo.launched import run_launched
from moelink.tools.demo.ranks import RankOutput, rank_main
from moelink.tools.demo.results import DemoReport

Progress = Callable[[str], None]
"""Called with one sentence at each step, possibly from another thread."""


@contextmanager
def watch(progress_file: Path, progress: Progress, count: int) -> Iterator[None]:
    """Report each line that rank 0 appends to ``progress_file`` while the block runs."""
    stop = threading.Event()

    def follow() -> None:
        seen = 0
        while not stop.wait(0.1):
            lines = progress_file.read_text().splitlines()
            for name in lines[seen:]:
                seen += 1
                progress(f"{name}: dispatched, computed and combined ({seen} of {count})")

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread while the block runs: its matrix products are small, and waiting threads spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_all_ranks(config: DemoConfig, text: bytes, progress: Progress) -> list[list[RankOutput]]:
    """What every rank returned, by rank: ranks of a launcher, of which this is rank 0, or processes started here."""
    with tempfile.TemporaryDirectory(prefix="moelink-") as folder:
        progress_file = Path(folder) / "progress"
        progress_file.touch()
        with watch(progress_file, progress, len(config.formats)):
            if is_launched():
                progress(f"rank 0 of {config.ranks} under a launcher")
                found = run_launched(config, text, str(progress_file))
                assert found is not None
                return found
            progress(f"starting {config.ranks} ranks")
            everyone: list[list[RankOutput]] = run_ranks(
                rank_main, config.ranks, config, text, str(progress_file), timeout=config.timeout
            )
            return everyone


@one_thread()
def run_demo(config: DemoConfig, text: bytes, progress: Progress = lambda message: None) -> DemoReport | None:
    """Run ``text`` through the sharded layer in every format and compare.

    Without a launcher, ranks are processes of this call. Under torchrun every rank calls this, and all but rank 0 get
    None.

    Raises:
        ConfigError: when ``text`` is empty, or a launcher started another number of ranks.
    """
    if not text:
        raise ConfigError("text", "at least one byte", text)
    text = text[: config.ranks * config.tokens_per_rank]
    if is_launched() and os.environ["RANK"] != "0":
        run_launched(config, text, "")
        return None
    by_rank = run_all_ranks(config, text, progress)
    progress(f"running the layer in one process over {len(text)} tokens")
    truth = Truth.compute(config, text)
    results = []
    for index, name in enumerate(config.formats):
        progress(f"{name}: comparing with the layer in one process ({index + 1} of {len(config.formats)})")
        parts = [outputs[index] for outputs in by_rank]
        out = torch.from_numpy(np.concatenate([part.out for part in parts]))
        results.append(judge(name, out, parts, truth))
    return DemoReport(
        config=config, device="cuda" if config.uses_cuda else "cpu", num_tokens=len(text),
        tokens_by_rank_and_expert=truth.tokens_by_rank_and_expert, remote_copies=truth.remote_copies,
        remote_messages=truth.remote_messages, formats=tuple(results),
    )  # fmt: skip
