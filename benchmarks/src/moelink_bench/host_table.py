"""Render host time of calls in Markdown: a table of results, and whether each meets its targets, and why not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from moelink_bench.document import results_folder
from moelink_bench.host import BUDGET, TARGETS

HOST_BENCHMARK, OPERATORS_BENCHMARK = "host_time", "ops_overhead"


def results(benchmark: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (file, result) of a benchmark by file name: GPUs first, and of each machine what came before first."""
    found = [(path.name, json.loads(path.read_text())) for path in results_folder().glob("*.json")]
    found = [(name, document) for name, document in found if document["benchmark"] == benchmark]
    return sorted(found, key=lambda entry: (entry[1].get("device") != "cuda", "before" not in entry[0], entry[0]))


def machine(document: dict[str, Any]) -> str:
    """Return the words for the machine of a result."""
    if document.get("device") == "cuda":
        return str(document["devices"][0])
    return f"{document['host']['processor']}, GPU played"


def times_table(documents: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Render the host time of a pair and its parts, a line per (file, result), and the targets."""
    parts = ("dispatch", "combine", "pair", "tensors", "launches", "own", "bound dispatch", "bound combine")
    lines = [
        "| host time, µs | dispatch | combine | pair | of that, tensors | launches | moelink | bound dispatch | bound "
        "combine | file, commit |",
        f"|---|{'---:|' * len(parts)}---|",
    ]
    for name, document in documents:
        us = document["microseconds"]
        cells = [f"{us[part]:.1f}" if part in us else "–" for part in parts]
        lines.append(f"| {machine(document)} | {' | '.join(cells)} | `{name}`, {document['commit'][:7]} |")
    targets = [f"**{TARGETS[part]:.0f}**" if part in TARGETS else "" for part in parts]
    lines.append(f"| **target, with an H200** | {' | '.join(targets)} | |")
    return "\n".join(lines)


def verdict(name: str, document: dict[str, Any]) -> str:
    """Return a sentence: whether a pair and bound calls meet their targets, and what of the time is whose."""
    us = document["microseconds"]
    pair, target = us["pair"], TARGETS["pair"]
    bound = [part for part in TARGETS if part.startswith("bound") and us.get(part, 0.0) > TARGETS[part]]
    words = f"`{name}`: a pair takes {pair:.1f} µs"
    words += f", within its target of {target:.0f}" if pair <= target else f", {pair - target:.1f} more than its target"
    if "launches" not in us:
        return f"{words}; the launches alone were not measured, so it is not known which part is whose."
    floor = us["tensors"] + us["launches"]
    words += (
        f". {floor:.1f} of it are the driver's launches and PyTorch's tensors, and {us['own']:.1f} moelink's Python"
    )
    if pair > target:
        words += ": without any of that" if floor > target else f": with {target - floor:.1f} of that"
        words += f" it would still take {floor:.1f}" if floor > target else " the target would be met"
    if bound:
        words += f". Over {TARGETS[bound[0]]:.0f} is a {' and a '.join(bound)}"
    return f"{words}."


def host_summary(documents: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the paragraphs of docs/performance.md about host time: a table, then a line for each present result on a
    GPU. Earlier results are not judged."""
    judged = [verdict(*each) for each in documents if each[1]["launches"] and "before" not in each[0]]
    return [times_table(documents), *[f"* {line}" for line in judged]]


def overhead_of(document: dict[str, Any]) -> str:
    """Return what the operator layer costs by one result, and whether that is within the budget."""
    row, versions = document["rows"][0], document["versions"]
    us = {name: times["median"] for name, times in row["us"].items()}
    more = {name: us[name] - us["direct"] for name in BUDGET}
    within = all(more[name] <= BUDGET[name] for name in BUDGET)
    device = document["devices"][0] if document.get("device") == "cuda" else document["host"]["processor"]
    token = f"{row['tokens']} token{'s' * (row['tokens'] != 1)}"
    return (
        f"Through the operators, a pair of dispatch and combine of {token} takes {more['operator']:.0f} µs more than "
        f"the {us['direct']:.0f} µs of the direct way, and {more['operator, gradients']:.0f} where gradients are "
        f"recorded. Choosing between the two takes {us['choice']:.1f} µs. The budget of {BUDGET['operator']:.0f} and "
        f"{BUDGET['operator, gradients']:.0f} µs is {'kept' if within else 'exceeded'}. One rank of the "
        f"{document['case']['transport']} transport, {device}, torch {versions['torch']}, {document['date']}."
    )
