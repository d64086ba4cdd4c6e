"""Reports as text: a terminal gets colour and lines, anything else plain text. Nothing here runs anything."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moelink.tools.cli.environment import EnvironmentReport
from moelink.tools.demo import DemoReport

PLAIN_WIDTH = 120
"""Columns of output that does not go to a terminal."""

BAR = 40
"""Columns of the longest bar."""


def make_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr. Honours NO_COLOR; without a terminal it writes plain lines of fixed width."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH)


def table(console: Console, title: str) -> Table:
    """An empty table: rounded lines on a terminal, aligned columns elsewhere."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.ROUNDED if console.is_terminal else None,
        pad_edge=console.is_terminal,
    )  # fmt: skip


def quantity(count: int) -> str:
    """Bytes in decimal units. ``quantity(1_234_567) == '1.23 MB'``, ``quantity(512) == '512 B'``."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def bar(console: Console, value: int, largest: int) -> str:
    """``value`` as a bar, ``largest`` being the longest one."""
    columns = round(BAR * value / largest) if largest else 0
    return ("█" if console.is_terminal and console.encoding.startswith("utf") else "#") * columns


def experts_table(console: Console, report: DemoReport) -> Table:
    """Tokens per expert as bars, with the rank that owns each expert."""
    counts = report.tokens_per_expert
    grid = table(console, f"Tokens per expert ({report.num_tokens} bytes of text, top-{report.config.layer.topk})")
    grid.add_column("rank", justify="right")
    grid.add_column("expert", justify="right")
    grid.add_column("tokens", justify="right")
    grid.add_column("", style="cyan")
    owners = report.expert_owners
    for expert, count in enumerate(counts):
        first = expert == 0 or owners[expert] != owners[expert - 1]
        grid.add_row(str(owners[expert]) if first else "", str(expert), str(count), bar(console, count, max(counts)))
    return grid


def formats_table(console: Console, report: DemoReport) -> Table:
    """Bytes and errors of every format."""
    grid = table(console, f"Formats ({report.config.ranks} ranks, {report.formats[0].transport} transport)")
    for name in ("format", "dispatch", "combine", "one copy per expert", "ratio", "rounding", "precision", ""):
        grid.add_column(name, justify="left" if name in ("format", "") else "right")
    for result in report.formats:
        copies = result.copies_dispatch_bytes + result.copies_combine_bytes
        verdict = Text("ok", "green") if result.passed else Text("FAILED", "bold red")
        grid.add_row(
            result.format, quantity(result.dispatch_bytes), quantity(result.combine_bytes), quantity(copies),
            f"{result.wire_ratio:.2f}", f"{result.rounding_error:.2g}", f"{result.tolerance_error:.2g}", verdict,
        )  # fmt: skip
    return grid


DEMO_LEGEND = """\
dispatch, combine     bytes that left the ranks, as counted by the transport (ids and weights included)
one copy per expert   the same rows sent once per (token, expert) instead of once per (token, rank); ratio = ours / that
rounding              largest difference from the layer in one process with the same quantised input, in units of what
                      combine's three roundings allow (at most 1)
precision             difference from the layer in one process in full precision, in units of what the format's
                      tolerance allows (at most 1)"""


def demo_view(console: Console, report: DemoReport) -> RenderableType:
    """The whole report."""
    pairs, messages = report.remote_copies, report.remote_messages
    summary = f"{pairs} (token, expert) pairs cross ranks; moelink sends {messages} messages, one per (token, rank)."
    return Group(
        experts_table(console, report), "", summary, "", formats_table(console, report), "", Text(DEMO_LEGEND, "dim")
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
