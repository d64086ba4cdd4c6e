"""Run the demonstration: text through an expert-parallel layer, compared with the same layer in one process.

The layer in one process uses no transport. Each format is judged twice:

* **rounding**: against the unsharded layer whose input was quantised and dequantised the same way. Then only combine's
  roundings differ, and their largest effect is known: :func:`moelink.tools.demo.layer.allowed_rounding`.
* **precision**: against the unsharded layer in full precision, in units of the bound of the format's tolerance:
  :func:`moelink.tools.demo.layer.allowed_relative_error`.

Both must be at most 1.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from moelink.control.group import is_launched
from moelink.errors import ConfigError
from moelink.formats import get_format
from moelink.routing import ExpertMap
from moelink.testing import run_ranks
from moelink.tools.common import Progress, followed
from moelink.tools.demo.layer import (
    LayerOutput,
    Routing,
    allowed_relative_error,
    allowed_rounding,
    embed,
    route,
    unsharded_layer,
)
from moelink.tools.demo.ranks import RankOutput, rank_main, run_launched
from moelink.tools.demo.report import DemoConfig, DemoReport, FormatResult


@dataclass(frozen=True)
class Truth:
    """The oracle of the run, computed in this process.

    Attributes:
        config: the input.
        x: [T, H] bf16, all tokens.
        routing: of all tokens.
        full: the layer in full precision.
        owner: [T, K] rank of each chosen expert.
        home: [T] rank of each token.
    """

    config: DemoConfig
    x: Tensor
    routing: Routing
    full: LayerOutput
    owner: Tensor
    home: Tensor

    @classmethod
    def compute(cls, config: DemoConfig, text: bytes) -> Truth:
        """Embed, route and run the layer over ``text``."""
        x = embed(text, config.layer)
        routing = route(x, config.layer)
        return cls(
            config=config, x=x, routing=routing, full=unsharded_layer(x, routing, config.layer),
            owner=ExpertMap(config.layer.num_experts, config.ranks).owner(routing.topk_ids),
            home=torch.arange(len(text)) // config.tokens_per_rank,
        )  # fmt: skip

    @property
    def remote_copies(self) -> int:
        """(token, expert) pairs that cross ranks."""
        return int((self.owner != self.home[:, None]).sum())

    @property
    def remote_messages(self) -> int:
        """(token, rank) pairs that cross ranks."""
        ranks = torch.arange(self.config.ranks)
        present = (self.owner[:, :, None] == ranks).any(1)
        return int((present & (ranks != self.home[:, None])).sum())

    @property
    def tokens_by_rank_and_expert(self) -> tuple[tuple[int, ...], ...]:
        """[ranks][experts] tokens."""
        experts = self.config.layer.num_experts
        flat = torch.bincount(
            (self.home[:, None] * experts + self.routing.topk_ids).flatten(), minlength=self.config.ranks * experts
        )
        return tuple(tuple(row) for row in flat.view(self.config.ranks, experts).tolist())


def judge(name: str, out: Tensor, parts: Sequence[RankOutput], truth: Truth) -> FormatResult:
    """Compare one format's output [T, H] with both unsharded layers."""
    config, fmt = truth.config, get_format(name)
    ep_config = config.ep_config(name)
    routing = Routing(truth.routing.topk_ids, truth.routing.topk_weights.to(ep_config.weight_dtype))
    rows = fmt.quantize(truth.x.to(ep_config.combine_dtype))
    same_input = unsharded_layer(fmt.dequantize(rows.payload, rows.scales), routing, config.layer)
    allowed = allowed_rounding(
        same_input, topk=config.layer.topk, ranks=config.ranks,
        combine_dtype=ep_config.combine_dtype, accumulate_dtype=ep_config.accumulate_dtype,
    )  # fmt: skip
    difference = (out - same_input.out).abs()
    # 0 / 0 counts as equal; NaN stays NaN, which passes nothing.
    rounding = torch.where((difference == 0) & (allowed == 0), 0.0, difference / allowed)
    full = truth.full.out
    return FormatResult(
        format=name,
        combine_dtype=str(ep_config.combine_dtype).removeprefix("torch."),
        transport=parts[0].transport,
        bytes_per_token=fmt.bytes_per_token(config.layer.hidden_size),
        dispatch_bytes=sum(part.dispatch_bytes for part in parts),
        combine_bytes=sum(part.combine_bytes for part in parts),
        copies_dispatch_bytes=truth.remote_copies * fmt.bytes_per_token(config.layer.hidden_size),
        copies_combine_bytes=truth.remote_copies * ep_config.combine_row_bytes,
        rounding_error=float(rounding.max()),
        relative_error=float((out - full).norm() / full.norm()),
        allowed_error=allowed_relative_error(fmt.tolerance, ep_config.combine_dtype),
    )


def bundled_text() -> bytes:
    """Return Lewis Carroll's "Alice's Adventures in Wonderland" (public domain), 148476 bytes of ASCII.

    ``data/NOTICE`` beside it names the source.

    Example:
        >>> bundled_text().split()[:3]
        [b"ALICE'S", b'ADVENTURES', b'IN']
    """
    return files("moelink.tools.demo").joinpath("data", "alice.txt").read_bytes()


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch on one thread while the block runs: its matrix products are small, and waiting threads spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_all_ranks(config: DemoConfig, text: bytes, progress: Progress) -> list[list[RankOutput]]:
    """Run all ranks, a launcher's (this is rank 0) or processes started here, and return their outputs by rank."""
    steps = itertools.count(1)

    def finished(name: str) -> None:
        progress(f"{name}: dispatched, computed and combined ({next(steps)} of {2 * len(config.formats)})")

    with followed(finished) as path:
        if is_launched():
            progress(f"rank 0 of {config.ranks} under a launcher")
            found = run_launched(config, text, path)
            assert found is not None
            return found
        progress(f"starting {config.ranks} ranks")
        everyone: list[list[RankOutput]] = run_ranks(
            rank_main, config.ranks, config, text, path, timeout=config.timeout
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
        parts = [outputs[index] for outputs in by_rank]
        out = torch.from_numpy(np.concatenate([part.out for part in parts]))
        results.append(judge(name, out, parts, truth))
        count = len(config.formats)
        progress(f"{name}: compared with the layer in one process ({count + index + 1} of {2 * count})")
    return DemoReport(
        config=config, device="cuda" if config.uses_cuda else "cpu", num_tokens=len(text),
        tokens_by_rank_and_expert=truth.tokens_by_rank_and_expert, remote_copies=truth.remote_copies,
        remote_messages=truth.remote_messages, formats=tuple(results),
    )  # fmt: skip
