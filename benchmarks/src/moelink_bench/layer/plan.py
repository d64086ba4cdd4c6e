"""Define what the benchmark of the layer measures: shapes of layers, cases, and its presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from moelink.config import EPConfig
from moelink.errors import ConfigError
from moelink.nn.router import RouterConfig
from moelink_bench.names import DeviceKind
from moelink_bench.presets import SMOKE, Distribution, RunPlan, Settings, settings_of


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The Mixture-of-Experts layer of a model.

    Attributes:
        model: its name in tables.
        hidden_size, num_experts, topk, intermediate_size: sizes; the last is that of one expert.
        router: how experts are chosen from the logits. No correction bias is given.
        tokens: numbers of tokens of a rank that the preset measures.
    """

    model: str
    hidden_size: int
    num_experts: int
    topk: int
    intermediate_size: int
    router: RouterConfig = RouterConfig()
    tokens: tuple[int, ...] = (1, 8, 32, 128, 512, 4096)

    def ep_config(self, *, fmt: str, max_tokens: int, rank: int, world_size: int) -> EPConfig:
        """The configuration of moelink's communicator. Raises ConfigError where the format does not fit."""
        return EPConfig(
            num_experts=self.num_experts, topk=self.topk, hidden_size=self.hidden_size, max_tokens_per_rank=max_tokens,
            dispatch_format=fmt, world_size=world_size, rank=rank,
        )  # fmt: skip


SHAPES: Mapping[str, Shape] = MappingProxyType({
    "deepseek-v3": Shape(
        model="DeepSeek-V3", hidden_size=7168, num_experts=256, topk=8, intermediate_size=2048,
        router=RouterConfig(scoring="sigmoid", num_groups=8, topk_groups=4, group_score="top2", scaling_factor=2.5),
    ),
    "qwen3-30b-a3b": Shape(
        model="Qwen3-30B-A3B", hidden_size=2048, num_experts=128, topk=8, intermediate_size=768,
        tokens=(1, 4, 8, 32, 128, 512, 4096),
    ),
    "mixtral-8x7b": Shape(
        model="Mixtral-8x7B", hidden_size=4096, num_experts=8, topk=2, intermediate_size=14336
    ),
    "tiny": Shape(
        model="tiny", hidden_size=128, num_experts=6, topk=2, intermediate_size=32, tokens=(1, 5)
    ),
})  # fmt: skip
"""Name of a case, as ``--case`` takes it, to its shape."""

_MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3")
LAYER_PRESETS: Mapping[str, tuple[tuple[str, ...], Distribution]] = MappingProxyType({
    "layer": (_MODELS, "uniform"),
    "layer-zipf": (_MODELS, "zipf"),
    "layer-smoke": (("tiny",), "uniform"),
})  # fmt: skip
"""Name of a preset to its cases, and how experts are loaded; ``layer-smoke`` runs on CPUs."""

FORMATS = ("bf16", "fp8_block128")
"""Dispatch formats of moelink's contenders."""

CALLS = 8
"""Most calls in one sample, each of other inputs."""

_TOKENS_A_SAMPLE = 2048
_LAYER = Settings(calls=CALLS, samples=15, warmup=3, host_calls=CALLS, host_samples=7)


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """One shape with one number of tokens of each rank, which choose experts uniformly or some more than others."""

    name: str
    shape: Shape
    tokens: int
    distribution: Distribution = "uniform"

    @property
    def label(self) -> str:
        """The case in a few words: ``"Qwen3-30B-A3B, 128 tokens"``."""
        skewed = "" if self.distribution == "uniform" else f", {self.distribution}"
        return f"{self.shape.model}{skewed}, {self.tokens} token{'s' * (self.tokens != 1)}"

    def calls(self, settings: Settings) -> int:
        """Calls of a sample, each of an input of its own: fewer where there are many tokens.

        Example: with 8 calls in the settings 1, 128 and 256 tokens make 8 calls, 512 make 4, 4096 make 2.
        """
        return min(settings.calls, max(2, _TOKENS_A_SAMPLE // self.tokens))


@dataclass(frozen=True, kw_only=True)
class LayerPlan(RunPlan):
    """A run of the layer.

    Attributes:
        cases: in order; the cases of one shape follow one another.
        contenders: names of those that take part, None for all.
        peers: contenders outside moelink take part.
    """

    cases: tuple[LayerCase, ...]
    contenders: tuple[str, ...] | None = None
    peers: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for shape, most in self.shapes().items():
            if shape.num_experts < self.ranks:
                raise ConfigError("ranks", f"at most the {shape.num_experts} experts of {shape.model}", self.ranks)
            shape.router.validate_sizes(num_experts=shape.num_experts, topk=shape.topk)
            for fmt in FORMATS:
                shape.ep_config(fmt=fmt, max_tokens=most, rank=0, world_size=self.ranks)

    def shapes(self) -> dict[Shape, int]:
        """Each shape and the most tokens that it is measured with, which its communicators are sized for."""
        most: dict[Shape, int] = {}
        for case in self.cases:
            most[case.shape] = max(case.tokens, most.get(case.shape, 0))
        return most


def with_experts(shape: Shape, experts: int | None) -> Shape:
    """Return ``shape`` with so many experts, or as it is for None."""
    if experts in (None, shape.num_experts):
        return shape
    return replace(shape, model=f"{shape.model} with {experts} experts", num_experts=experts)


def make_layer_plan(
    preset: str,
    *,
    ranks: int,
    device: DeviceKind,
    cases: Sequence[str] = (),
    tokens: Sequence[int] = (),
    experts: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    contenders: Sequence[str] | None = None,
    peers: bool = True,
    timeout: float = 600.0,
) -> LayerPlan:
    """Return a preset with some of its settings replaced.

    Args:
        preset: a key of :data:`LAYER_PRESETS`.
        cases: keys of :data:`SHAPES`, in place of the preset's.
        tokens: replace each shape's.
        experts: of each shape, in place of its own; None leaves it. With 32 one rank has as many as a rank of 8 has of
            DeepSeek-V3.
        samples: samples per figure, or None for the preset's.
        contenders: names of those that take part, None for all.

    Raises:
        ConfigError: no such preset or case, or a value that is not acceptable.
    """
    if preset not in LAYER_PRESETS:
        raise ConfigError("preset", f"one of {', '.join(LAYER_PRESETS)}", preset)
    for name in cases:
        if name not in SHAPES:
            raise ConfigError("case", f"one of {', '.join(SHAPES)}", name)
    if any(count < 1 for count in tokens):
        raise ConfigError("tokens", "at least 1", min(tokens))
    models, distribution = LAYER_PRESETS[preset]
    shapes = {name: with_experts(SHAPES[name], experts) for name in dict.fromkeys(cases or models)}
    chosen = [
        LayerCase(name=name, shape=shape, tokens=count, distribution=distribution)
        for name, shape in shapes.items()
        for count in dict.fromkeys(tokens or shape.tokens)
    ]
    settings = settings_of(SMOKE if device == "cpu" else _LAYER, seed=seed, samples=samples)
    return LayerPlan(
        preset=preset, cases=tuple(chosen), device=device, ranks=ranks, settings=settings,
        contenders=None if contenders is None else tuple(contenders), peers=peers, timeout=timeout,
    )  # fmt: skip
