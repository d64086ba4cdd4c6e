"""``moelink env``: facts about the machine for a report of a problem.

PyTorch's own report (``torch.utils.collect_env``) covers the system, drivers, devices and packages. moelink adds the
versions it depends on, the transport that it would choose, and its variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.text import Text
from torch.utils import collect_env

from moelink.config import EPConfig
from moelink.env import VARIABLES
from moelink.tools.cli.console import JsonOption, show, table
from moelink.tools.common import versions
from moelink.transports.build import choose_transport

SCHEMA_VERSION = 2


def chosen_transport() -> str:
    """Return the transport that ``transport="auto"`` takes on this machine."""
    sizes = EPConfig(num_experts=1, topk=1, hidden_size=1, max_tokens_per_rank=1)
    return choose_transport(sizes, [torch.device("cuda" if torch.cuda.is_available() else "cpu")])


def inspect_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the document of ``moelink env --json``.

    Its fields: ``versions`` of moelink, Python and the packages that moelink needs (None: not installed), ``transport``
    (what ``transport="auto"`` takes), ``variables`` (name, value or None, default and meaning of every ``MOELINK_*``
    variable) and ``torch``, the fields of ``torch.utils.collect_env.get_env_info()``.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": versions(),
        "transport": chosen_transport(),
        "variables": [
            {"name": v.name, "value": environ.get(v.name), "default": v.default, "meaning": v.meaning}
            for v in VARIABLES
        ],
        "torch": collect_env.get_env_info()._asdict(),
    }  # fmt: skip


def environment_view(console: Console, document: dict[str, Any]) -> RenderableType:
    """Render a document of :func:`inspect_environment` as tables and PyTorch's own text."""
    facts = table(console, "Environment")
    facts.add_column("what", style="bold")
    facts.add_column("value")
    for name, version in document["versions"].items():
        facts.add_row(name, version or "not installed")
    facts.add_row("transport", f"{document['transport']} (what transport='auto' chooses)")
    variables = table(console, "Variables")
    for name in ("name", "value", "default", "meaning"):
        variables.add_column(name, overflow="fold")
    for variable in document["variables"]:
        value = "not set" if variable["value"] is None else variable["value"]
        variables.add_row(variable["name"], value, variable["default"] or "none", variable["meaning"])
    report = collect_env.pretty_str(collect_env.SystemEnv(**document["torch"]))
    return Group(facts, "", variables, "", Text("PyTorch's report (torch.utils.collect_env)", "bold"), Text(report))


def env(json_output: JsonOption = False) -> None:
    """Show versions, devices, the transport that would be chosen, and every MOELINK_* variable."""
    document = inspect_environment()
    show(document, lambda console: environment_view(console, document), as_json=json_output)
