"""Load statistics of a model as JSON, one file a rank, and the files of several ranks put together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moelink.errors import ArgumentError
from moelink.nn.load import LoadStats
from moelink.nn.moe import MoE

KIND = "expert_load"
SCHEMA_VERSION = 1


def load_report(model: torch.nn.Module) -> dict[str, Any]:
    """The statistics of all MoE layers of ``model`` that count, on this rank, for JSON. Synchronises with the host.

    ``{"schema_version": 1, "kind": "expert_load", "layers": [{"name": ..., **LoadStats}, ...]}``.
    """
    layers = [
        {"name": name or "moe", **dataclasses.asdict(module.stats())}
        for name, module in model.named_modules()
        if isinstance(module, MoE) and module.load is not None
    ]
    return {"schema_version": SCHEMA_VERSION, "kind": KIND, "layers": layers}


def save_load(model: torch.nn.Module, path: Path | str) -> None:
    """Write :func:`load_report` to ``path``, which ``moelink plot`` draws. Each rank has a file of its own to write."""
    Path(path).write_text(json.dumps(load_report(model), indent=1) + "\n")


@dataclass(frozen=True)
class LayerLoad:
    """One layer's load as far as the given reports tell.

    Attributes:
        name: of the module in its model.
        ranks: ranks whose tokens are counted.
        stats: their sum (of replicated tokens: one rank's, as all count the same).
    """

    name: str
    ranks: tuple[int, ...]
    stats: LoadStats


def combine_reports(documents: Sequence[dict[str, Any]]) -> list[LayerLoad]:
    """Put the reports of different ranks of one run together, layer by layer.

    Raises:
        ArgumentError: one is no such report, a rank comes twice, or layers, sizes or steps differ.
    """
    for document in documents:
        if document.get("kind") != KIND or document.get("schema_version") != SCHEMA_VERSION:
            got = f"kind {document.get('kind')!r}, schema_version {document.get('schema_version')!r}"
            raise ArgumentError("documents", f"JSON of moelink.nn.save_load, schema_version {SCHEMA_VERSION}", got)
    names = [[layer["name"] for layer in document["layers"]] for document in documents]
    if not names or not names[0] or any(other != names[0] for other in names):
        raise ArgumentError("documents", "reports of the same layers, one at least", names)
    return [
        _sum(name, [_stats(document["layers"][index]) for document in documents]) for index, name in enumerate(names[0])
    ]


def _stats(layer: dict[str, Any]) -> LoadStats:
    fields = {field.name: layer[field.name] for field in dataclasses.fields(LoadStats)}
    tokens, steps = tuple(layer["tokens_per_expert"]), tuple(tuple(step) for step in layer["steps"])
    if any(len(step) != len(tokens) for step in steps):
        raise ArgumentError("documents", f"{layer['name']}: steps of {len(tokens)} experts", sorted({*map(len, steps)}))
    return LoadStats(**{**fields, "tokens_per_expert": tokens, "steps": steps})


def _sum(name: str, parts: list[LoadStats]) -> LayerLoad:
    shapes = {(p.world_size, p.replicated, len(p.tokens_per_expert), len(p.steps), p.first_step): p.rank for p in parts}
    ranks = tuple(sorted(p.rank for p in parts))
    if len(shapes) > 1:
        raise ArgumentError("documents", f"{name}: reports of one run, after the same steps", f"{list(shapes)}")
    if len(set(ranks)) < len(ranks):
        raise ArgumentError("documents", f"{name}: a report of each rank once", f"ranks {list(ranks)}")
    counted = parts[:1] if parts[0].replicated else parts
    total = _add([p.tokens_per_expert for p in counted])
    steps = tuple(_add(rows) for rows in zip(*(p.steps for p in counted), strict=True))
    stats = dataclasses.replace(parts[0], rank=ranks[0], tokens_per_expert=total, steps=steps)
    return LayerLoad(name=name, ranks=ranks, stats=stats)


def _add(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))
