"""Benchmarks that are started on their own: ``moelink bench NAME``, or ``python -m moelink_bench.NAME``."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from moelink.control.group import is_launched
from moelink.errors import ArgumentError, ConfigError, MoelinkError
from moelink_bench.document import command_line, head, results_folder, write


def main_of(name: str) -> Callable[[Sequence[str] | None], int]:
    """Return the function that runs a script with its arguments and returns the exit status."""
    module = f"moelink_bench.{name}" + ".__main__" * (name == "frameworks")
    main: Callable[[Sequence[str] | None], int] = importlib.import_module(module).main
    return main


def parser_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script. Its help has lines of 100 columns wherever it is printed, as documents show it."""
    form = functools.partial(argparse.RawDescriptionHelpFormatter, width=100)
    return argparse.ArgumentParser(f"moelink bench {name}", description=text, formatter_class=form)


class Save(Protocol):
    """Writes a result: the fields that every one begins with but ``unknown``, then its own, which may replace the
    former."""

    def __call__(self, benchmark: str, fields: Mapping[str, Any], unknown: Sequence[str] = ()) -> dict[str, Any]:
        """Return the document, written where the command line says. Called again, it writes the file anew."""


@dataclass(frozen=True)
class Script:
    """A benchmark with a command line of its own.

    Attributes:
        name: of :data:`moelink_bench.names.SCRIPTS`.
        text: of ``--help``; the first line names its purpose.
        options: adds options to those that all scripts have, ``--commit`` and ``--out``.
        run: measures by the arguments, saves the result and returns the exit status.
        out: file in ``benchmarks/results`` where ``--out`` names none, with arguments and "benchmark" in braces; "" for
            no file.
    """

    name: str
    text: str | None
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Save], int]
    out: str = ""

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run with ``arguments``, or those of the process. An error of moelink is a line on stderr; the status is 2 for
        refused arguments, 1 for all other errors."""
        given = list(sys.argv[1:] if arguments is None else arguments)
        parser = parser_of(self.name, self.text)
        parser.add_argument("--commit", help="commit to record, where there is no repository")
        out = parser.add_argument("--out", type=Path)
        self.options(parser)
        default = f"benchmarks/results/{self.out}" if self.out else out.default or "no file"
        out.help = f"write the result there, as JSON; default: {default}"
        args = parser.parse_args(given)
        launcher = f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']}" if is_launched() else "python"
        command = command_line(f"{launcher} -m moelink_bench.{self.name}", given)

        def save(benchmark: str, fields: Mapping[str, Any], unknown: Sequence[str] = ()) -> dict[str, Any]:
            begun = head(benchmark, command=command, commit=args.commit)
            document = {**{name: value for name, value in begun.items() if name not in unknown}, **fields}
            if args.out or self.out:
                named = {**vars(args), "benchmark": benchmark}
                write(document, args.out or results_folder() / self.out.format_map(named))
            return document

        try:
            if str(vars(args).get("device")).startswith("cuda") and not torch.cuda.is_available():
                raise ConfigError("device", "cpu on a machine without a CUDA device", args.device)
            return self.run(args, save)
        except MoelinkError as error:
            print(f"moelink: {error}", file=sys.stderr)
            return 2 if isinstance(error, (ArgumentError, ConfigError)) else 1


def positive(text: str) -> int:
    """Read an option that is a whole number of at least 1."""
    if (value := int(text)) < 1:
        raise ValueError(text)  # argparse names the option and the text
    return value


def add_numbers(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Add an option for each name, a whole number with that default: at least 1, but a seed may be any."""
    for name, value in defaults.items():
        kind = int if name == "seed" else positive
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value)
