"""``moelink env``: facts about the machine for a report of a problem.

The short form has the versions that moelink depends on, the transport that it would choose, and the variables that are
set. ``--full`` adds all variables and PyTorch's own report (``torch.utils.collect_env``: system, drivers, devices and
packages), which takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from moelink.env import VARIABLES
from moelink.tools.cli.console import JsonOption, show, table

SCHEMA_VERSION = 3


def inspect_environment(environ: Mapping[str, str] = os.environ, *, full: bool = False) -> dict[str, Any]:
    """Return the document of ``moelink env --json``.

    Its fields: ``versions`` of moelink, Python and the packages that moelink needs (None: not installed), ``devices``
    (names of CUDA devices, "CPU" without one), ``transport`` (what ``transport="auto"`` takes), ``variables`` (name,
    value or None, default and meaning of every ``MOELINK_*`` variable), and if ``full`` ``torch``, the fields of
    ``torch.utils.collect_env.get_env_info()``.
    """
    import torch
    from torch.utils import collect_env

    from moelink.config import EPConfig
    from moelink.tools.common import versions
    from moelink.transports.build import choose_transport

    count = torch.cuda.device_count()
    sizes = EPConfig(num_experts=1, topk=1, hidden_size=1, max_tokens_per_rank=1)
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": versions(),
        "devices": [torch.cuda.get_device_name(index) for index in range(count)] or ["CPU"],
        "transport": choose_transport(sizes, [torch.device("cuda" if count else "cpu")]),
        "variables": [
            {"name": v.name, "value": environ.get(v.name), "default": v.default, "meaning": v.meaning}
            for v in VARIABLES
        ],
        **({"torch": collect_env.get_env_info()._asdict()} if full else {}),
    }  # fmt: skip


def environment_view(console: Console, document: dict[str, Any]) -> RenderableType:
    """Render a document of :func:`inspect_environment`: all variables and PyTorch's own text if it has the latter."""
    report = document.get("torch")
    facts = table(console, "Environment")
    facts.add_column("fact", style="bold")
    facts.add_column("value")
    for name, version in document["versions"].items():
        facts.add_row(name, version or "not installed")
    for name in dict.fromkeys(document["devices"]):
        facts.add_row("device", f"{document['devices'].count(name)} x {name}")
    facts.add_row("transport", f"{document['transport']} (what transport='auto' chooses)")
    for variable in document["variables"]:
        if variable["value"] is not None:
            facts.add_row(variable["name"], variable["value"])
    if report is None:
        return Group(facts, Text("--full adds every variable, and PyTorch's report.", "dim"))
    variables = table(console, "Variables")
    for name in ("name", "value", "default", "meaning"):
        variables.add_column(name, overflow="fold")
    for variable in document["variables"]:
        value = "not set" if variable["value"] is None else variable["value"]
        variables.add_row(variable["name"], value, variable["default"] or "none", variable["meaning"])
    from torch.utils import collect_env

    text = collect_env.pretty_str(collect_env.SystemEnv(**report))
    return Group(facts, "", variables, "", Text("PyTorch's report (torch.utils.collect_env)", "bold"), Text(text))


def env(
    full: Annotated[
        bool, typer.Option("--full", help="Add all variables and PyTorch's report; takes seconds.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Show versions, devices and the MOELINK_* variables that are set.

    It also shows the transport that "auto" would choose.
    """
    document = inspect_environment(full=full)
    show(document, lambda console: environment_view(console, document), as_json=json_output)
