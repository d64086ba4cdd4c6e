"""Define what is measured: cases, how often they run, and the presets of ``moelink bench``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from moelink.config import EPConfig
from moelink.errors import ConfigError
from moelink.formats import get_format
from moelink.names import Layout
from moelink_bench.names import LAYOUTS, PEERS, DeviceKind, PeerName

Distribution = Literal["uniform", "zipf", "one-rank"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration that every contender runs.

    Attributes:
        tokens: tokens of every rank in every call, also ``max_tokens_per_rank``.
        hidden_size, num_experts, topk: sizes of the layer.
        format: dispatch format; rows come home in bf16.
        distribution: how ids are drawn: "uniform", "zipf" (exponent 1 over experts), or "one-rank" (all experts of
            all tokens are on rank 0).
        num_sms: SMs that moelink may use, or None for all.
        layout: of received rows: "expert", or "rank", one per (token, rank), whose slots the experts' side has
            summed before combine.
        zero_copy: rows of layout "rank" stay in the workspace, as FlashInfer's do; dispatch and combine then alternate.
        quantised: dispatch is given rows in the format, and their scales, as FlashInfer is. They are made before
            anything is timed. Not with formats that carry rows unchanged, where there is nothing to make.
    """

    tokens: int
    hidden_size: int = 7168
    num_experts: int = 256
    topk: int = 8
    format: str = "fp8_block128"
    distribution: Distribution = "uniform"
    num_sms: int | None = None
    layout: Layout = "expert"
    zero_copy: bool = False
    quantised: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError("tokens", "at least 1", self.tokens)
        if self.topk > self.num_experts:
            raise ConfigError("topk", f"at most num_experts = {self.num_experts}", self.topk)
        if self.layout not in LAYOUTS:
            raise ConfigError("layout", f"{' or '.join(LAYOUTS)} in a benchmark", self.layout)
        if self.zero_copy and self.layout != "rank":
            raise ConfigError("zero_copy", f"False with layout={self.layout!r}", self.zero_copy)
        if self.quantised and not quantises(self.format):
            raise ConfigError("quantised", f"False with format={self.format!r}, which has no scales", self.quantised)
        if self.distribution not in get_args(Distribution):
            raise ConfigError("distribution", " or ".join(get_args(Distribution)), self.distribution)

    @property
    def label(self) -> str:
        """The case in a few words: ``"128 tokens, fp8_block128, zipf, 16 SMs"``."""
        words = [f"{self.tokens} token{'s' * (self.tokens != 1)}", self.format]
        if self.distribution != "uniform":
            words.append(self.distribution)
        if self.num_sms is not None:
            words.append(f"{self.num_sms} SMs")
        if self.layout != "expert":
            words.append(f"by {self.layout}" + ", views" * self.zero_copy)
        if self.quantised:
            words.append("quantised")
        return ", ".join(words)

    @property
    def like_for_like(self) -> bool:
        """The contract is FlashInfer's: rows come in the format, and stay by rank where they arrive."""
        return self.zero_copy and self.quantised == quantises(self.format)

    def ep_config(self, rank: int, world_size: int) -> EPConfig:
        """The configuration that sizes follow from. Raises ConfigError where the format does not fit."""
        return EPConfig(
            num_experts=self.num_experts, topk=self.topk, hidden_size=self.hidden_size,
            max_tokens_per_rank=self.tokens, dispatch_format=self.format, num_sms=self.num_sms,
            layout=self.layout, zero_copy=self.zero_copy, world_size=world_size, rank=rank,
        )  # fmt: skip


def quantises(format_name: str) -> bool:
    """Return whether rows change in a format, so that they have scales. Raises ConfigError where there is none."""
    return get_format(format_name).scale_dtype is not None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How often things are called.

    Attributes:
        calls: calls in one CUDA graph, and in one sample of eager calls.
        samples: samples per figure; each is one replay of a graph, or one batch of eager calls.
        warmup: samples that are thrown away before.
        host_calls, host_samples: the same for contenders that synchronise with the host in every call.
        rotation_bytes: inputs are rotated until this many bytes have passed, and this many bytes are written between
            two samples: more than the second-level cache holds. 0 on CPUs.
        seed: of inputs and routing.
    """

    calls: int = 20
    samples: int = 15
    warmup: int = 3
    host_calls: int = 5
    host_samples: int = 5
    rotation_bytes: int = 120_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("calls", 1), ("samples", 1), ("warmup", 0), ("host_calls", 1), ("host_samples", 1)):
            if getattr(self, name) < minimum:
                raise ConfigError(name, f"at least {minimum}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The common part of the plans of all presets.

    Attributes:
        preset: its name.
        device: "cuda" (one device a rank) or "cpu".
        ranks: number of ranks.
        settings: how often things are called.
        timeout: seconds after which the ranks are given up.
    """

    preset: str
    device: DeviceKind
    ranks: int
    settings: Settings = Settings()
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError("ranks", "at least 1", self.ranks)

    @property
    def flush_bytes(self) -> int:
        """Bytes that are written before each sample."""
        return 2 * self.settings.rotation_bytes


@dataclass(frozen=True, kw_only=True)
class Plan(RunPlan):
    """A run of dispatch and combine.

    Attributes:
        cases: in order.
        peers: of :data:`PEERS`, those that take part.
    """

    cases: tuple[Case, ...]
    peers: tuple[PeerName, ...] = PEERS

    def __post_init__(self) -> None:
        super().__post_init__()
        for peer in self.peers:
            if peer not in PEERS:
                raise ConfigError("peers", f"some of {', '.join(PEERS)}", peer)
        if not self.cases:
            raise ConfigError("cases", "at least one", self.cases)
        for case in self.cases:
            case.ep_config(0, self.ranks)


def settings_of(usual: Settings, *, seed: int, samples: int | None) -> Settings:
    """Return a preset's settings with another seed, and another number of samples unless that is None."""
    changes = {} if samples is None else {"samples": samples, "host_samples": samples}
    return dataclasses.replace(usual, seed=seed, **changes)


FORMATS = ("bf16", "fp8_block128", "mxfp8", "nvfp4", "mxfp4")
SM_BUDGETS = (8, 16, 24, 32, 64, None)
DISTRIBUTIONS: tuple[Distribution, ...] = ("uniform", "zipf", "one-rank")
SMOKE = Settings(calls=1, samples=1, warmup=0, host_calls=1, host_samples=1, rotation_bytes=0)
"""On CPUs a call of interpreted kernels takes most of a second, and only the harness is of interest."""


def _like_for_like(case: Case) -> Case:
    """The case by FlashInfer's contract."""
    return dataclasses.replace(case, layout="rank", zero_copy=True, quantised=quantises(case.format))


def _compared(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Each case with rows by expert, for the whole operation, and like for like."""
    return tuple(one for case in cases for one in (case, _like_for_like(case)))


def _in_layout(case: Case, layout: Layout) -> Case:
    """The case with rows by ``layout``. What only rows by rank have goes with them."""
    if layout == "rank":
        return dataclasses.replace(case, layout=layout)
    return dataclasses.replace(case, layout=layout, zero_copy=False, quantised=False)


def _layouts() -> tuple[Case, ...]:
    forms: list[Case] = []
    for tokens in (1, 128, 4096):
        case, by_rank = Case(tokens=tokens), Case(tokens=tokens, layout="rank")
        forms += [case, by_rank, dataclasses.replace(by_rank, zero_copy=True), _like_for_like(case)]
    return tuple(forms)


_SMALL = {"hidden_size": 256, "num_experts": 6, "topk": 2}
PRESETS: Mapping[str, Callable[[], tuple[Case, ...]]] = MappingProxyType({
    "decode": lambda: _compared([Case(tokens=tokens) for tokens in (1, 8, 32, 128, 256)]),
    "prefill": lambda: _compared([
        *[Case(tokens=tokens) for tokens in (512, 1024, 2048, 4096, 8192)], Case(tokens=4096, format="bf16"),
    ]),
    "formats": lambda: tuple(Case(tokens=tokens, format=name) for tokens in (1, 32, 128, 4096) for name in FORMATS),
    "skew": lambda: tuple(Case(tokens=tokens, distribution=kind) for tokens in (128, 4096) for kind in DISTRIBUTIONS),
    "sms": lambda: tuple(Case(tokens=tokens, num_sms=budget) for tokens in (128, 4096) for budget in SM_BUDGETS),
    "layouts": _layouts,
    "smoke": lambda: (
        Case(tokens=5, format="bf16", **_SMALL),  # type: ignore[arg-type]
        Case(tokens=3, format="fp8_block128", distribution="zipf", **_SMALL),  # type: ignore[arg-type]
        _like_for_like(Case(tokens=3, format="fp8_block128", **_SMALL)),  # type: ignore[arg-type]
    ),
})  # fmt: skip
"""Name of a preset to its cases."""


def make_plan(
    preset: str,
    *,
    ranks: int,
    device: DeviceKind,
    tokens: Sequence[int] = (),
    formats: Sequence[str] = (),
    samples: int | None = None,
    seed: int = 0,
    peers: Sequence[PeerName] = PEERS,
    timeout: float = 600.0,
    layout: Layout | None = None,
    num_sms: int | Sequence[int] | None = None,
    **sizes: int | None,
) -> Plan:
    """Return a preset with some of its settings replaced.

    Args:
        preset: a key of :data:`PRESETS`.
        tokens, formats: replace the preset's (each of its other variations is kept).
        samples: samples per figure, or None for the preset's.
        peers: of :data:`PEERS`, those that take part.
        layout: replaces the preset's, None leaves it. Without "rank" rows are neither views nor quantised before.
        num_sms: SM limits that replace the preset's. A preset with several keeps its cases without one.
        sizes: fields of :class:`Case` (``hidden_size``, ``num_experts``, ``topk``) to replace; None leaves them.

    Raises:
        ConfigError: no such preset, or a value that is not acceptable.
    """
    if preset not in PRESETS:
        raise ConfigError("preset", f"one of {', '.join(PRESETS)}", preset)
    cases = PRESETS[preset]()
    fields = {name: value for name, value in sizes.items() if value is not None}
    if fields:
        cases = tuple(dataclasses.replace(case, **fields) for case in cases)  # type: ignore[arg-type]
    limits = [num_sms] if isinstance(num_sms, int) else list(num_sms or ())
    if limits:
        free = [None] if len({case.num_sms for case in cases}) > 1 else []
        sizes_of = dict.fromkeys(dataclasses.replace(case, num_sms=None) for case in cases)
        cases = tuple(dataclasses.replace(case, num_sms=limit) for case in sizes_of for limit in (*limits, *free))
    if layout is not None:
        cases = tuple(_in_layout(case, layout) for case in cases)
    if formats:
        cases = tuple(
            dataclasses.replace(case, format=name, quantised=case.like_for_like and quantises(name))
            for name in formats for case in cases
        )  # fmt: skip
    if tokens:
        cases = tuple(dataclasses.replace(case, tokens=count) for count in tokens for case in cases)
    return Plan(
        preset=preset, cases=tuple(dict.fromkeys(cases)), device=device, ranks=ranks, peers=tuple(peers),
        settings=settings_of(SMOKE if device == "cpu" else Settings(), seed=seed, samples=samples), timeout=timeout,
    )  # fmt: skip
