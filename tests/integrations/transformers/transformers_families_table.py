"""The table of docs/transformers.md: every family, run unsharded and on two ranks, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from moelink.testing import run_ranks
from tests.integrations.transformers.transformers_families import BATCH, Truth, build, model_class, truth
from tests.integrations.transformers.transformers_families_ranks import WAYS, Answers, Said, everything, without_moelink
from tests.integrations.transformers.transformers_models import tensors_of
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "transformers.md"
BEGIN, END = "<!-- families: begin (python docs/support/families.py) -->", "<!-- families: end -->"
COLUMNS = ("family", "forward", "generate", "backward", "save and load", "register")

# Sums of a few dozen terms in another order. Measured over all families: below 1e-6 for outputs and, relative to the
# largest element of a gradient, 2e-5; the rounding of gradients that cancel is measured against all gradients.
OUTPUTS, GRADIENTS, CANCELLED = 1e-5, 1e-4, 1e-6


@dataclass(frozen=True)
class Row:
    """Of the table: "yes", or the reason why not."""

    family: str
    forward: str
    generate: str
    backward: str
    saved: str
    register: str


def run(names: Iterable[str], scratch: Path, *, ways: Sequence[str] = WAYS) -> dict[str, Row]:
    """The rows of these families, by name; the column ``register`` from ``ways`` alone.

    Raises:
        AssertionError: a model over ranks says other than unsharded, naming the families.
    """
    transformers.logging.disable_progress_bar()
    folders, truths = {}, {}
    for name in names:
        build(name).save_pretrained(scratch / name)
        folders[name], truths[name] = str(scratch / name), truth(name, scratch / name)
    said = run_ranks(everything, BATCH, folders, str(scratch / "saved"), tuple(ways), timeout=1800)
    fail = [(name, way) for name, right in truths.items() for way in ways if _wrong_registered(name, way, right, said)]
    own = run_ranks(without_moelink, BATCH, folders, fail, timeout=600) if fail else []
    rows, problems = {}, []
    for name, right in truths.items():
        try:
            column = _register(name, right, ways, fail, own)
            rows[name] = _row(name, right, [one[name].answers for one in said], scratch, column)
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    assert not problems, "\n".join(problems)
    return rows


def _row(name: str, right: Truth, answers: list[Answers | str], scratch: Path, ways: str) -> Row:
    errors = [answer for answer in answers if isinstance(answer, str)]
    if errors and all(error.startswith("UnsupportedError: ") for error in errors):
        reason = errors[0].removeprefix("UnsupportedError: ").splitlines()[0]
        return Row(name, reason, reason, reason, reason, ways)
    assert not errors, errors[0]
    assert off_by(right.without_experts, right.output) > 1e-2, "the experts do not matter"
    generates = "yes" if right.continuation is not None else f"`{model_class(name).__name__}` does not"
    for rank, answer in enumerate(answers):
        assert isinstance(answer, Answers)
        assert off_by(answer.replicated, right.output) < OUTPUTS, f"rank {rank}: output, same batch"
        assert off_by(answer.sharded, right.output[rank : rank + 1]) < OUTPUTS, f"rank {rank}: output, its own batch"
        if right.continuation is not None:
            assert answer.continuation is not None
            assert torch.equal(answer.continuation, right.continuation), f"rank {rank}: generated tokens"
        for mode, gradients in answer.gradients.items():
            _check_gradients(right, answer, gradients, f"rank {rank}, {mode}")
    was, now = tensors_of(scratch / name), tensors_of(scratch / "saved" / name)
    assert was.keys() == now.keys(), sorted(was.keys() ^ now.keys())
    assert all(torch.equal(was[tensor], now[tensor]) for tensor in was), "what was saved is not what was loaded"
    return Row(name, "yes", generates, "yes", "yes", ways)


def _check_gradients(right: Truth, answer: Answers, got: Mapping[str, Tensor], what: str) -> None:
    assert got.keys() == right.gradients.keys(), f"{what}: {sorted(got.keys() ^ right.gradients.keys())}"
    most = max(float(value.abs().max()) for value in right.gradients.values())
    for name, value in got.items():
        want = right.gradients[name]
        bound = GRADIENTS * float(want.abs().max()) + CANCELLED * most
        if name.rpartition(".")[0] in right.experts:
            want = want[answer.first : answer.first + answer.count]
        assert value.shape == want.shape, f"{what}: {name}"
        assert float((value - want).abs().max()) <= bound, f"{what}: gradient of {name}"


def _wrong_registered(name: str, way: str, right: Truth, said: list[dict[str, Said]]) -> bool:
    return any(_wrong(one[name].registered[way], way, rank, right) for rank, one in enumerate(said))


def _wrong(got: Tensor | str, way: str, rank: int, right: Truth) -> bool:
    want = right.output[rank : rank + 1] if way == "FSDP" else right.output
    return isinstance(got, str) or off_by(got, want) >= OUTPUTS


def _register(
    name: str,
    right: Truth,
    ways: Sequence[str],
    fail: list[tuple[str, str]],
    own: list[dict[tuple[str, str], Tensor | str]],
) -> str:
    """The column ``register``. A way may fail only where transformers' own implementation fails, too."""
    for way in ways:
        if (name, way) in fail:
            alike = all(_wrong(one[name, way], way, rank, right) for rank, one in enumerate(own))
            assert alike, f"register, {way}: fails where transformers' own implementation does not"
    good = [way for way in ways if (name, way) not in fail]
    return ", ".join(good) if good else "neither, as with transformers' own"


def off_by(got: Tensor, want: Tensor) -> float:
    """The largest difference relative to the largest value wanted."""
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


def text(rows: Mapping[str, Row]) -> str:
    """The table in Markdown, without its markers."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(astuple(row) for _, row in sorted(rows.items()))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def written() -> dict[str, Row]:
    """The rows of the table that the page has."""
    between = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line.strip("| ").split(" | ") for line in between.strip().splitlines()[2:]]
    return {line[0]: Row(*line) for line in lines}


def write(rows: Mapping[str, Row]) -> None:
    """Put the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{text(rows)}\n{END}{after}")
