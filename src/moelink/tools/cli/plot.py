"""``moelink plot``: the load of experts and ranks, from what a run saved."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from moelink.tools.cli.files import drawing


class Along(str, Enum):
    """Choices of --along."""

    steps = "steps"
    layers = "layers"


def plot(
    reports: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="JSON of moelink.nn.save_load, one file a rank.")
    ],
    out: Annotated[Path, typer.Option(help="Picture to write (.png or .svg).")],
    along: Annotated[
        Along | None, typer.Option(help="Columns of the heat map. Default: steps when there is one layer to show.")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Show this layer only.")] = None,
) -> None:
    """Draw where tokens went: a heat map of experts over steps or layers, and the load of each rank.

    Give the files of all ranks of a run to see all tokens; of some, to see theirs.
    """
    from moelink.nn.report import combine_reports
    from moelink.tools.load_plots import draw_load

    documents = []
    for path in reports:
        try:
            document = json.loads(path.read_text())
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise typer.BadParameter(f"{path}: not JSON ({error})", param_hint="REPORTS") from error
        documents.append(document if isinstance(document, dict) else {})
    layers = combine_reports(documents)
    with drawing(out):
        draw_load(layers, out, along=None if along is None else along.value, layer=layer)
