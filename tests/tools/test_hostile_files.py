"""Files of strangers: every command that reads one ends in a message, soon, whatever the file holds.

A message is an error of moelink or of the command line. What it repeats of a file is printable.
"""

from __future__ import annotations

import copy
import json
import random
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from moelink.errors import ConfigError, MoelinkError
from moelink.tools import documents
from moelink.tools.cli.app import app
from moelink.tools.plan import model
from tests.support.paths import ROOT
from tests.tiers import seeds

RESULTS = ROOT / "benchmarks" / "results"
CONSTANTS = Path(model.__file__).parent
COMMANDS = {
    "check": ("plan", "check", "FILE"),
    "check a layer": ("plan", "check", "FILE"),
    "fit": ("plan", "fit", "FILE", "--out", "OUT.json"),
    "fit-experts": ("plan", "fit-experts", "FILE", "--out", "OUT.json"),
    "fit-experts to a layer": ("plan", "fit-experts", "FILE", "--out", "OUT.json"),
    "constants": ("plan", "--ranks", "2", "--constants", "FILE"),
    "expert constants": ("plan", "--ranks", "2", "--expert-constants", "FILE"),
    "plot": ("plot", "FILE", "--out", "OUT.svg"),
    "bench plot": ("bench", "plot", "FILE", "--out", "OUT.svg"),
    "bench plot of a layer": ("bench", "plot", "FILE", "--out", "OUT.svg"),
}
"""What is typed, by the kind of file it reads."""
ODD = (
    None, True, -1, 0, 3, 1.5, 0.001, 1e12, 1e-308, 1e308, float("nan"), float("inf"), 4096, 2**14, 2**20, 2**48, 2**70,
    10**4000, "", "x" * 200, "x" * 3000, "bf16", "zipf",
    "[/red]", "\x1b]0;x\x07", "\ud800", "$\\frac{", "²", [], {}, [[]], [0] * 1000, {"a": 1}, {"\x1b": {"median": 1}},
)  # fmt: skip


ONE = pytest.mark.quick("one case of each command")


def part_of(file: str) -> dict[str, Any]:
    """A result, of its first two cases only."""
    document: dict[str, Any] = json.loads((RESULTS / file).read_text())
    document["cases"] = document["cases"][:2]
    document["rows"] = [row for row in document["rows"] if row["case"] < 2]
    return document


def good(kind: str) -> dict[str, Any]:
    """A document that the command of ``kind`` takes."""
    if "layer" in kind:
        return part_of("layer_1xh200.json")
    if kind == "fit-experts":
        return json.loads((RESULTS / "experts_h200.json").read_text())
    if "constants" in kind:
        return json.loads((CONSTANTS / ("constants.json" if kind == "constants" else "experts.json")).read_text())
    if kind != "plot":
        return part_of("decode_before_2xh200.json")
    layer = {"rank": 0, "world_size": 2, "replicated": False, "tokens_per_expert": [3, 0, 4], "first_step": 5}
    layer |= {"steps": [[1, 0, 2], [2, 0, 2]]}
    layers = [{"name": name, **layer} for name in ("layers.0", "layers.1")]
    return {"schema_version": 1, "kind": "expert_load", "layers": layers}


def say(kind: str, file: Path) -> str:
    """What the command of ``kind`` says of a file; it ends within seconds, in no exception but moelink's."""
    words = {"FILE": str(file), "OUT.json": str(file.parent / "out.json"), "OUT.svg": str(file.parent / "out.svg")}
    start = time.process_time()
    done = CliRunner().invoke(app, [words.get(word, word) for word in COMMANDS[kind]])
    assert time.process_time() - start < 20
    error = done.exception
    if error is not None and not isinstance(error, (SystemExit, MoelinkError)):
        pytest.fail("".join(traceback.format_exception(error)))
    said = done.output + (str(error) if isinstance(error, MoelinkError) else "")
    assert all(letter.isprintable() or letter == "\n" for letter in said)
    return said


def written(folder: Path, content: object) -> Path:
    """A file of this text, these bytes, or this document."""
    path = folder / "file.json"
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (object or list, key or index) of a document."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from places(node[key])


def mutated(document: dict[str, Any], choice: random.Random) -> dict[str, Any]:
    """A document with one or two fields replaced, left out or repeated."""
    document = copy.deepcopy(document)
    for _ in range(choice.randint(1, 2)):
        node, key = choice.choice(list(places(document)))
        what = choice.random()
        if what < 0.2:
            del node[key]
        elif what < 0.3 and isinstance(node, list):
            node[key:key] = [node[key]] * choice.choice((1, 300))
        else:
            node[key] = choice.choice(ODD)
    return document


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
@seeds(7, 600)  # of commands that do not draw
def test_mutated_files_end_in_a_message(seeds: range, tmp_path: Path) -> None:
    sources = {kind: good(kind) for kind in COMMANDS}
    for seed in seeds:
        kind = list(COMMANDS)[seed % len(COMMANDS)]
        say(kind, written(tmp_path, mutated(sources[kind], random.Random(seed))))


@pytest.mark.full(
    "draws and fits, which the tests of each command do in the quick tier; here the sources are proved good"
)
@pytest.mark.parametrize("kind", COMMANDS)
def test_the_files_that_are_mutated_are_good(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "JSON file" not in say(kind, written(tmp_path, good(kind)))


@pytest.mark.parametrize("kind", ("check", "fit", "fit-experts", "constants", "expert constants", "plot", "bench plot"))
def test_every_command_refuses_what_is_no_document(kind: str, tmp_path: Path) -> None:
    assert "recursion depth" in say(kind, written(tmp_path, "[" * 200_000))
    assert "'[1] in file.json'" in say(kind, written(tmp_path, "[1]"))


@pytest.mark.quick("each another kind of file, in milliseconds")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param('{"a":' * 100_000, "recursion depth", id="deep object"),
        pytest.param('{"a": ' + "1" * 5000 + "}", "a number of 5000 digits", id="long number"),
        pytest.param("", "Expecting value", id="empty"),
        pytest.param(b"\xff\xfe\x00", "can't decode", id="no UTF-8"),
        pytest.param('"\ud800"'.encode(errors="surrogatepass"), "can't decode", id="surrogate in UTF-8"),
        pytest.param(" " * (documents.MOST_BYTES + 1), "more than 64 MiB", id="large"),
    ],
)
def test_what_is_no_json_is_refused(text: str | bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"name: expected a file, got .*file.json .*{words}"):
        documents.read(written(tmp_path, text), "name", "a file")


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / ("x" * 1000), Path("/dev/zero")):
        with pytest.raises(ConfigError, match="name: expected a file, got "):
            documents.read(path, "name", "a file")


@pytest.mark.parametrize(
    ("kind", "path", "value", "words"),
    [
        ("check", "ranks", 10**12, "ranks in [1, 4096] as ranks"),
        ("check", "cases", {}, "a list of one or more as cases"),
        ("check", "rows.0", 7, "an object as rows[0]"),
        ("check", "rows.0.case", 1.5, "with the index of a case in [0, 1048576] as rows[0].case"),
        ("check", "rows.0.case", 2, "rows of its 2 cases, got 'case 2 in file.json'"),
        ("check", "cases.1.case.num_experts", 255, "cases of one num_experts and topk"),
        ("check", "schema_version", True, "1 as schema_version, got 'True"),
        ("check", "gate", [], "a run whose correctness gate passed as gate"),
        (
            "fit",
            "rows.4.phases.dispatch.graph",
            {},
            "as rows[4].phases.dispatch.graph.median, got 'nothing in file.json'",
        ),
        pytest.param("fit", "devices.0", None, "as devices[0], got 'None in file.json'", marks=ONE),
        ("fit", "cases.0.case.distribution", "\x1b[2J", r"'\\x1b[2J'"),
        ("check a layer", "rows.0.parts", {"\x1b": {"median": 1}}, r"'\\x1b'"),
        pytest.param(
            "check a layer", "rows.0.parts", {"route": {"median": 1}}, "layers with parts route, product 1", marks=ONE
        ),
        ("check a layer", "cases.0.shape", 5, "an object as cases[0].shape"),
        ("fit-experts", "rows.0.load", "9" * 5000, "rows an expert, or few, one, mixed or room"),
        pytest.param("fit-experts", "rows.0.load", "²", "rows an expert, or few, one, mixed or room", marks=ONE),
        ("fit-experts", "shape.experts", 10**12, "experts in [1, 16384] as shape.experts"),
        ("constants", "phases", [], "an object as phases"),
        (
            "constants",
            "phases.combine.per_peer_us",
            None,
            "microseconds in [0, 1000000000000] as phases.combine.per_peer",
        ),
        ("constants", "machine", "a\x07", r"'a\\x07'"),
        pytest.param("expert constants", "formats.bf16", [], "an object as formats.bf16", marks=ONE),
        ("expert constants", "formats", {"\ud800": {}}, "as a name in formats"),
        pytest.param("plot", "layers.0.world_size", 10**9, "ranks in [1, 4096] as layers[0].world_size", marks=ONE),
        ("plot", "layers.0.tokens_per_expert", "3", "a list of one or more as layers[0].tokens_per_expert"),
        ("plot", "layers.1.steps.1", [1, 2], "steps of 3 experts, got [2, 3]"),
        ("plot", "layers.0.name", "$\\frac{", "printable characters without $ as layers[0].name"),
        pytest.param("bench plot", "cases.0.wire_us", None, "an object as cases[0].wire_us", marks=ONE),
        ("bench plot of a layer", "parts.0", "another", "as parts[0], got \"'another' in file.json\""),
    ],
)
def test_what_has_another_form_is_named(kind: str, path: str, value: object, words: str, tmp_path: Path) -> None:
    document: Any = good(kind)
    *parents, last = (int(word) if word.isdigit() else word for word in path.split("."))
    node = document
    for parent in parents:
        node = node[parent]
    node[last] = value
    assert words in say(kind, written(tmp_path, document))


def test_texts_of_files_are_printed_as_they_stand(tmp_path: Path) -> None:
    """They are no markup; and a name of a file that cannot be printed is escaped."""
    document = good("check a layer")
    for case in document["cases"]:
        case["label"] = "[/x] :x:"
    path = written(tmp_path, document).rename(tmp_path / "[b]\x1b.json")
    said = say("check a layer", path)
    assert "[/x] :x:" in said
    assert r"[b]\x1b.json" in said


def test_results_may_have_any_name(tmp_path: Path) -> None:
    path = written(tmp_path, good("fit")).rename(tmp_path / f"$[x]{60 * chr(27)}.json")
    assert "largest error" in say("fit", path)
    assert r"$[x]\x1b" in say("constants", tmp_path / "out.json")


def test_many_panels_are_not_drawn(tmp_path: Path) -> None:
    document = good("bench plot of a layer")
    shapes = [{**document["cases"][0], "shape": {"model": f"model {number}"}} for number in range(1000)]
    document["cases"] = shapes
    assert "1000 x 1 panels are more than 64" in say("bench plot of a layer", written(tmp_path, document))


def test_a_form_says_what_and_where() -> None:
    form = {"a": documents.Maybe([{"b": documents.US}]), "c?": documents.FLAG, "d": {"*": documents.TEXT}}
    for value in (
        {"a": None, "d": {}},
        {"a": [{"b": 1}, {"b": 0.5, "more": []}], "c": True, "d": {"x": "", "y": "µs"}},
    ):
        documents.check(value, form, "name", "a file", "x")
    for value, place in (
        ([], "an object, got"),
        ({"a": []}, "a list of one or more as a, got"),
        ({"a": [{"b": 1}, {"b": True}]}, r"as a\[1\].b, got 'True"),
        ({"a": None, "c": None}, "true or false as c, got 'None"),
        ({"a": None, "d": {"x": "\n"}}, "as d.x, got"),
        ({"a": None, "d": {"\n": ""}}, "as a name in d, got"),
    ):
        with pytest.raises(ConfigError, match=place):
            documents.check(value, form, "name", "a file", "x")
