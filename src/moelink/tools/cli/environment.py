"""What ``moelink env`` reports: versions, devices, the transport that would be chosen, and every variable."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated

import torch
import typer
from rich.console import Console, Group, RenderableType

import moelink
from moelink.config import EPConfig
from moelink.env import VARIABLES
from moelink.tools.cli.console import make_console, table, to_json
from moelink.transports.select import choose_transport

PACKAGES = ("torch", "triton", "numpy")


@dataclass(frozen=True)
class VariableReport:
    """One ``MOELINK_*`` variable: what it is set to (None when unset), its default and its meaning."""

    name: str
    value: str | None
    default: str
    meaning: str


@dataclass(frozen=True)
class EnvironmentReport:
    """This machine as moelink sees it.

    Attributes:
        versions: Python and packages; None for one that is not installed.
        platform: operating system and processor.
        cpu_cores: cores this process may use.
        devices: names of the CUDA devices.
        transport: what ``transport="auto"`` would choose.
        variables: every ``MOELINK_*`` variable.
    """

    versions: dict[str, str | None]
    platform: str
    cpu_cores: int
    devices: tuple[str, ...]
    transport: str
    variables: tuple[VariableReport, ...]


def package_version(name: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def chosen_transport() -> str:
    """The transport of ``transport="auto"`` on this machine."""
    sizes = EPConfig(num_experts=1, topk=1, hidden_size=1, max_tokens_per_rank=1)
    return choose_transport(sizes, [torch.device("cuda" if torch.cuda.is_available() else "cpu")])


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def inspect_environment(environ: Mapping[str, str] = os.environ) -> EnvironmentReport:
    """Look at this machine. Asks CUDA for device names, touches nothing else."""
    installed = {name: package_version(name) for name in PACKAGES}
    return EnvironmentReport(
        versions={"moelink": moelink.__version__, "python": platform.python_version(), **installed},
        platform=f"{platform.system()} {platform.machine()}",
        cpu_cores=cpu_cores(),
        devices=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
        transport=chosen_transport(),
        variables=tuple(VariableReport(v.name, environ.get(v.name), v.default, v.meaning) for v in VARIABLES),
    )


def environment_view(console: Console, report: EnvironmentReport) -> RenderableType:
    """Versions, devices and variables."""
    facts = table(console, "Environment")
    facts.add_column("what", style="bold")
    facts.add_column("value")
    for name, version in report.versions.items():
        facts.add_row(name, version or "not installed")
    facts.add_row("platform", f"{report.platform}, {report.cpu_cores} cores")
    facts.add_row("devices", ", ".join(report.devices) or "no CUDA device")
    facts.add_row("transport", f"{report.transport} (what transport='auto' chooses)")
    variables = table(console, "Variables")
    for name in ("name", "value", "default", "meaning"):
        variables.add_column(name, overflow="fold")
    for variable in report.variables:
        value = "not set" if variable.value is None else variable.value
        variables.add_row(variable.name, value, variable.default or "none", variable.meaning)
    return Group(facts, "", variables)


def env(json_output: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False) -> None:
    """Show versions, devices, the transport that would be chosen, and every MOELINK_* variable."""
    report = inspect_environment()
    if json_output:
        typer.echo(to_json({"schema_version": 1, **dataclasses.asdict(report)}))
        return
    console = make_console()
    console.print(environment_view(console, report))
