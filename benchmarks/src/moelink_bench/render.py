"""Write the figures of the results into the documents. ``--check`` only compares.

* docs/performance.md, between the markers "benchmark": the comparison on CPUs.
* docs/performance.md, between the markers "comparisons": the comparisons of the presets ``decode`` and ``prefill`` of
  ``moelink bench``, in their newest form, on each number of GPUs.
* README.md, between the markers "speed": three sizes of them on the largest number of GPUs; and "claim": one size.
* docs/performance.md, between the markers "host": host time of calls.
* docs/pytorch.md, between the markers "overhead": what the operator layer costs.
* README.md and docs/performance.md, between the markers "layer": the whole layer, by the preset ``layer``, the newest
  results first and none that another one took the place of (``_before_`` in its name); README.md three cases of one.
* docs/results.md, whole: every result of ``moelink bench`` on GPUs, also that of the preset ``roles``.

What must be said of a result, because something disturbed its run, is in ``benchmarks/remarks.json`` by file. It stands
below the result's tables wherever they are.

    python -m moelink_bench.render
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from moelink.tools.results import BENCHMARK, LAYER_BENCHMARK, METHODS, ROLES_BENCHMARK
from moelink_bench import host
from moelink_bench.comparisons import COLUMNS, HEAD, merged, published_lines, share_lines, summary, table_of
from moelink_bench.document import markdown, repository, results_folder
from moelink_bench.layer import result as tables
from moelink_bench.measure import PHASES
from moelink_bench.roles_result import comparison_lines
from moelink_bench.roles_result import tables as roles_tables
from moelink_bench.script import parser_of

COMMAND = "python -m moelink_bench.render"
SHOWN = (BENCHMARK, LAYER_BENCHMARK, ROLES_BENCHMARK)
"""Benchmarks whose results on GPUs are shown whole."""
README_ROWS = ("1 token, fp8_block128", "128 tokens, fp8_block128", "4096 tokens, fp8_block128")
README_LAYER = "layer_qwen3_2xh200.json"
"""Of the most GPUs for which there is a result."""
README_LAYERS = ("Qwen3-30B-A3B, 1 token", "Qwen3-30B-A3B, 128 tokens", "Qwen3-30B-A3B, 4096 tokens")
README_CONTENDERS = (
    "moelink fp8_block128", "FlashInfer one-sided fp8", "sort + all-to-all fp8", "DeepGEMM products", "DeepGEMM fused",
)  # fmt: skip
"""Those with experts in fp8, so that phones show the table."""
PAIRS = COLUMNS[:3]
"""Comparisons of pairs. Those of parts have a table of their own, so that phones show both."""
COMPARISONS_ARE = (
    "*Like for like* is a pair of dispatch and combine by the contract of FlashInfer's one-sided all-to-all, against "
    "FlashInfer: quantised rows come in, and stay by rank where they arrive. That is its shortest call, which leaves "
    "the ids of rows that no token fills as they were. *As engines call it* is the same with ids that say so, as "
    "moelink's do: vLLM, SGLang and TensorRT-LLM ask for that (`invalid_token_expert_id`), and FlashInfer launches a "
    "kernel for it. It does not count. The *whole operation* is a pair with rows by expert, against FlashInfer with a "
    "permutation and a sum. Like for like and the whole operation count. A *pair, by rank* is one in which moelink "
    "also quantises rows or copies them. The phases alone are parts of pairs, between events inside the graph for "
    "both libraries. Events take time of their own: the two phases of a pair add up to more than the pair."
)
PAIRS_ARE = (
    "the time of this phase between events inside a replayed CUDA graph of dispatches, each followed by its combine. "
    "Events take some microseconds of their own, so it compares with other figures of pairs only."
)


def cpu_table(document: dict[str, Any]) -> str:
    """Return the comparison of ``collective`` on CPUs in Markdown."""
    case, host, versions = document["case"], document["host"], document["versions"]
    lines = ["| | dispatch, ms | combine, ms | both, ms | bytes between ranks |", "|---|---:|---:|---:|---:|"]
    labels = {"baseline": "sort + `all_to_all_single` of top-k copies", "moelink": "moelink, collective transport"}
    for row in document["rows"]:
        times = (row[f"{phase}_ms"] for phase in ("dispatch", "combine", "total"))
        cells = " | ".join(f"{t['median']:.1f} ({t['p20']:.1f} – {t['p80']:.1f})" for t in times)
        lines.append(f"| {labels[row['name']]} | {cells} | {row['total_bytes'] / 1e6:.1f} MB |")
    ratios = f"| ratio | | | **{document['time_ratio']:.2f}** | **{document['bytes_ratio']:.2f}** |"
    said = wrapped(
        f"{case['ranks']} ranks as processes on one CPU machine over gloo, {case['tokens_per_rank']} tokens per rank, "
        f"hidden size {case['hidden_size']}, top-{case['topk']} of {case['num_experts']} experts, bf16. Each time is "
        f"the median over {case['iterations']} iterations of the slowest rank, with the 20th and 80th percentiles in "
        "parentheses. Both results were checked against the unsharded one before timing. "
        f"{host['processor']}, {host['cores']} cores, torch {versions['torch']}, {document['date']}. The table "
        "compares two ways to do the same work on a small machine without a GPU; it says nothing about GPUs."
    )
    return "\n".join([*lines, ratios, "", said])


def gpu_results(benchmark: str = BENCHMARK) -> list[tuple[str, dict[str, Any]]]:
    """Return (file, result) of a benchmark on GPUs by number of ranks, the most first, then file name.

    A result has its ``remark``, "" for none.

    Raises:
        FileNotFoundError: a remark is of a file that is not there, or that no document shows with its remark.
    """
    documents = [(path.name, json.loads(path.read_text())) for path in sorted(results_folder().glob("*.json"))]
    shown = [(name, d) for name, d in documents if d["benchmark"] in SHOWN and d["device"] == "cuda"]
    remarks = json.loads((results_folder().parent / "remarks.json").read_text())
    if lost := remarks.keys() - dict(shown).keys():
        raise FileNotFoundError(f"benchmarks/remarks.json: expected files of benchmarks/results/, got {sorted(lost)}")
    found = [(name, {**d, "remark": remarks.get(name, "")}) for name, d in shown if d["benchmark"] == benchmark]
    return sorted(found, key=lambda entry: -entry[1]["ranks"])


def cell(result: dict[str, Any] | None) -> str:
    """Render median (20th - 80th percentile), us, by the first method that was used, named unless it is "graph"."""
    method = next((name for name in METHODS if result and result.get(name)), None)
    if not result or method is None:
        return ""
    figure = result[method]
    text = f"{figure['median']:.1f} ({figure['p20']:.1f} – {figure['p80']:.1f})"
    return text if method == "graph" else f"{text} {method}"


def speed_summary(documents: list[dict[str, Any]]) -> str:
    """Render README.md's three sizes of the comparisons of decode and prefill; "" without a result that has them."""
    found = compared_on(documents)
    if not found:
        return ""
    most, chosen = found[0]
    head = chosen[0]
    case, versions = head["cases"][0]["case"], head["versions"]
    columns, lines = _comparison_lines(chosen, PAIRS)
    text = (
        "A dispatch and its combine, by tokens per rank. *Like for like*: by FlashInfer's own contract, in which "
        "quantised rows come in and stay by rank where they arrive. *As engines call it*: the same, and FlashInfer "
        "also marks the ids of rows that no token fills. *Whole operation*: rows arrive by expert, against FlashInfer "
        f"with a permutation and a sum. Medians of the slowest rank over replays of CUDA graphs, on {most} × "
        f"{head['devices'][0]}: hidden size {case['hidden_size']}, top-{case['topk']} of {case['num_experts']} "
        f"experts, uniform routing, bf16 combine. torch {versions['torch']}, triton {versions['triton']}, NCCL "
        f"{versions['nccl']}, commit {head['commit'][:7]}, {head['date']}. Of all sizes "
        "([results](docs/results.md), [conditions](docs/performance.md#against-whom)):"
    )
    table = markdown([HEAD, *columns], [line for line in lines if line[0] in README_ROWS], gap=" ")
    notes = [wrapped(f"* {summary(one)}.") for one in merged(chosen)]
    return "\n\n".join([table, wrapped(text), *remarks_on(chosen), "\n".join(notes)])


def claim(documents: list[dict[str, Any]]) -> str:
    """Render README.md's claim, both comparisons that count in the second of its rows; "" if one was not made."""
    for most, chosen in compared_on(documents)[:1]:
        _, lines = _comparison_lines(chosen, ("whole operation", "like for like"))
        row = next((line for line in lines if line[0] == README_ROWS[1]), [])
        if len(row) < 3 or "–" in row:
            return ""
        whole, like, case = row[1].split(), row[2].split(), chosen[0]["cases"][0]["case"]
        return wrapped(
            f"On {most} × {chosen[0]['devices'][0]}, a dispatch and its combine of {row[0].partition(',')[0]} per rank "
            f"take **{whole[0]} µs**. FlashInfer's one-sided all-to-all, with the permutation and the sum that experts "
            f"need, takes {whole[2]} µs. By FlashInfer's own contract, without these, moelink takes {like[0]} µs and "
            f"FlashInfer {like[2]} µs. (Hidden size {case['hidden_size']}, top-{case['topk']} of {case['num_experts']} "
            f"experts, uniform routing, {case['format']} dispatch, CUDA graphs, {chosen[0]['date']}; [other "
            "sizes](#results).)"
        )
    return ""


def newest(documents: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the newest results of decode and prefill, decode first, by number of GPUs, the most first."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for each in sorted(documents, key=lambda each: str(each["date"])):
        if each["preset"] in ("decode", "prefill"):
            found[each["ranks"], each["preset"]] = each
    numbers = sorted({ranks for ranks, _ in found}, reverse=True)
    return [(number, [found[key] for key in sorted(found) if key[0] == number]) for number in numbers]


def compared_on(documents: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the same of results that have comparisons."""
    return newest([each for each in documents if "speed_gate" in each])


def comparison_sections(documents: list[dict[str, Any]]) -> str:
    """Render the comparisons of each number of GPUs; what was published of others follows the first."""
    parts: list[str] = []
    for number, chosen in compared_on(documents):
        shown = [{**each, "published": each["published"] if not parts else []} for each in chosen]
        parts += [f"**{number} GPU{'s' * (number != 1)}**", comparison_section(shown)]
    return "\n\n".join(parts)


def comparison_section(documents: list[dict[str, Any]]) -> str:
    """Render the comparisons with FlashInfer of results, what was published of others, and remarks on the results; ""
    where there is nothing of it."""
    remarks = remarks_on(documents)
    documents = [document for document in documents if "speed_gate" in document]
    tables = [_comparison_lines(documents, names) for names in (PAIRS, COLUMNS[len(PAIRS) :])]
    parts = [markdown([HEAD, *columns], lines, gap=" ") for columns, lines in tables if lines]
    if parts:
        ran = dict.fromkeys(
            f"{each['ranks']} × {each['devices'][0]}, commit {each['commit'][:7]}, {each['date']}" for each in documents
        )
        parts.append(wrapped(f"{COMPARISONS_ARE} {'; '.join(ran)}."))
    notes = [summary(one) for one in merged(documents)] if documents else []
    notes += [line for document in documents for line in published_lines(document["published"])]
    parts += remarks
    parts.append("\n".join(wrapped(f"* {note}.") for note in dict.fromkeys(notes)))
    return "\n\n".join(part for part in parts if part)


def _comparison_lines(documents: list[dict[str, Any]], columns: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return those of ``columns`` that a document has, and the lines that have a figure there, with a cell for each."""
    tables = [table_of(document) for document in documents]
    used = [name for name in columns if any(name in heads for heads, _ in tables)]
    rows = [dict(zip(heads, row, strict=True)) for heads, lines in tables for row in lines]
    cells = [[row[HEAD], *(row.get(name, "–") for name in used)] for row in rows]
    return used, [line for line in cells if set(line[1:]) - {"–"}]


def layer_summary(documents: list[dict[str, Any]]) -> str:
    """Render what README.md and docs/performance.md show of the layer; "" without a result."""
    return "\n\n".join(part for document in documents for part in _layer_parts(document, spread=False))


def with_cases(document: dict[str, Any], labels: Sequence[str], contenders: Sequence[str] = ()) -> dict[str, Any]:
    """Return a result of the layer with the cases of these labels alone, and ``contenders`` if any are named."""
    kept = [index for index, case in enumerate(document["cases"]) if case["label"] in labels]
    named = contenders or [row["contender"] for row in document["rows"]]
    rows = [
        {**row, "case": kept.index(row["case"])}
        for row in document["rows"]
        if row["case"] in kept and row["contender"] in named
    ]
    return {**document, "cases": [document["cases"][index] for index in kept], "rows": rows}


def _layer_parts(document: dict[str, Any], *, spread: bool) -> list[str]:
    times, setting = tables.times_table(document, spread=spread), wrapped(tables.setting_text(document))
    return [times, setting, *remarks_on([document])]


def layer_section(document: dict[str, Any]) -> str:
    """Render one result of the layer in Markdown, whole."""
    parts = _layer_parts(document, spread=True)
    parts += ["\n".join(wrapped(f"* {note}") for note in tables.note_lines(document))]
    split = tables.parts_table(document)
    if split:
        parts += ["Medians of the parts, between events inside a replayed graph:", split]
    parts += [
        wrapped(f"`{document['command']}`. {document['method']}."),
        wrapped(f"Verdicts by this rule: {document['rule']}."),
    ]
    parts += ["\n".join(f"* {verdict['text']}" for verdict in document["verdicts"])]
    return "\n\n".join(parts)


def roles_section(document: dict[str, Any]) -> str:
    """Render one result of the preset ``roles`` in Markdown, whole."""
    parts = []
    for title, heads, lines in roles_tables(document):
        parts += [f"{title}, µs of one rank (share of the bandwidth):", markdown(heads, lines, text=0)]
    versions, speed = document["versions"], document["bandwidth"]["gb_per_s"]
    ran = (
        f"`{document['command']}` on one {document['devices'][0]}, torch {versions['torch']}, triton "
        f"{versions['triton']}, commit {document['commit'][:7]}, {document['date']}. Bandwidth of this run: "
        f"{speed:.0f} GB/s ({document['bandwidth']['method']}). {document['method']}. Memory: "
        f"{document['memory_rule']}."
    )
    notes = "\n".join(wrapped(f"* {line}.") for line in comparison_lines(document))
    return "\n\n".join([*parts, wrapped(ran), *remarks_on([document]), notes])


def remarks_on(documents: list[dict[str, Any]]) -> list[str]:
    """Return the remarks on results, those that there are."""
    return [wrapped(document["remark"]) for document in documents if document.get("remark")]


def wrapped(text: str) -> str:
    """``text`` in lines of at most 120 characters, those of a list item indented."""
    indent = "  " if text.startswith("* ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def leaving_out(documents: list[dict[str, Any]]) -> list[str]:
    """Return sentences that say what contenders leave out and which of them did not run."""
    rows = [(document["cases"][row["case"]], row) for document in documents for row in document["rows"]]
    texts = [
        f"{row['contender']} leaves out part of the work: {row['leaves_out']}." for _, row in rows if row["leaves_out"]
    ]
    texts += [
        f"{row['contender']} did not run with {case['label']}: {row['reason']}." for case, row in rows if row["reason"]
    ]
    return list(dict.fromkeys(texts))


def speed_table(document: dict[str, Any]) -> str:
    """Render one result of ``moelink bench`` in Markdown, whole."""
    versions, ceiling = document["versions"], document["ceiling"]["gb_per_s"]
    limit = f"{ceiling:.0f} GB/s out of each GPU" if ceiling else "not measured"
    lines = []
    for row in (row for row in document["rows"] if not row["reason"]):
        phases, label = row["phases"], document["cases"][row["case"]]["label"]
        shares = [phases.get(phase, {}).get("share_of_ceiling") for phase in PHASES[:2]]
        share = " / ".join("" if value is None else f"{100 * value:.0f} %" for value in shares)
        lines.append([label, row["contender"], *(cell(phases.get(phase)) for phase in PHASES), share])
    case = document["cases"][0]["case"]
    ran = (
        f"`{document['command']}` on {document['ranks']} × {document['devices'][0]}: hidden size "
        f"{case['hidden_size']}, top-{case['topk']} of {case['num_experts']} experts, bf16 combine, torch "
        f"{versions['torch']}, triton {versions['triton']}, commit {document['commit'][:7]}, {document['date']}. "
        f"All-to-all ceiling of this run: {limit}."
    )
    columns = ("case", "contender", *(f"{phase}, µs" for phase in PHASES), "share of the link speed")
    heads, shares = share_lines(document)
    parts = [
        markdown(columns, lines, text=2), wrapped(ran),
        "\n".join(wrapped(f"* {note}") for note in leaving_out([document])), comparison_section([document]),
        f"{markdown(heads, shares, gap=' ')}\n\n{wrapped(document['sm_share_rule'])}" if shares else "",
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


LAYER_PICTURE = "![Time of the layer by contender and part](layer.png)"
NO_RESULT = "No result is in `benchmarks/results/` yet."

LEGEND = (
    "* A figure is the median over samples of the slowest rank, in microseconds, with the 20th and 80th percentiles in "
    "parentheses.",
    "* Times come from CUDA-graph replay. *eager* marks calls that were made one by one and timed by the host. *pairs* "
    f"marks {PAIRS_ARE}",
    "* Before anything was timed, all moelink transports had to return the same bits.",
    "* *Share of the link speed* is given for dispatch / combine. It is the time that the busiest link needs for its "
    "bytes at the all-to-all ceiling, divided by the time taken. The ceiling is measured in the same run, with plain "
    "stores.",
)


def page(
    documents: list[tuple[str, dict[str, Any]]],
    layers: list[tuple[str, dict[str, Any]]] | None = None,
    roles: list[tuple[str, dict[str, Any]]] | None = None,
) -> str:
    """Render docs/results.md from every (file, result): ``layers`` those of the layer, ``roles`` those of roles."""
    parts = [
        "# Benchmark results on GPUs",
        wrapped(
            "This page shows every result of `moelink bench` on GPUs. It is generated from the JSON files in "
            "`benchmarks/results/`; each section names its file. [Performance](performance.md) explains the figures."
        ),
        "![Latency over tokens per rank, and share of the all-to-all ceiling](speed.png)",
        "How to read the tables:",
        "\n".join(wrapped(line) for line in LEGEND),
    ]
    for name, document in documents:
        parts += [f"## {document['preset']}, {document['ranks']} ranks", f"`benchmarks/results/{name}`"]
        parts += [speed_table(document)]
        verdicts = [entry["text"] for entry in document["verdicts"]]
        if verdicts:
            rule = f"Verdicts by this rule: {document['rule']}."
            parts.append("\n".join([wrapped(rule), "", *(f"* {text}" for text in verdicts)]))
    for name, document in layers or []:
        ranks = f"{document['ranks']} rank{'s' * (document['ranks'] != 1)}"
        parts += [f"## {document['preset']}, {ranks}", f"`benchmarks/results/{name}`", layer_section(document)]
    for name, document in roles or []:
        parts += [f"## {document['preset']}, one GPU", f"`benchmarks/results/{name}`", roles_section(document)]
    return "\n\n".join(parts) + "\n"


def between(text: str, name: str, content: str) -> str:
    """Return ``text`` with the part between the markers of ``name`` replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    inner = f"\n{content}\n" if content else "\n"
    return f"{before}{begin}{inner}{end}{after}"


def rendered() -> dict[Path, str]:
    """Return each document as it should be."""
    root, results = repository(), gpu_results()
    readme, guide, performance = root / "README.md", root / "docs" / "pytorch.md", root / "docs" / "performance.md"

    def result(name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((results_folder() / name).read_text())
        return document

    layers = gpu_results(LAYER_BENCHMARK)
    latest = sorted(
        (document for name, document in layers if "_before_" not in name), key=itemgetter("date"), reverse=True
    )
    picture = f"{LAYER_PICTURE}\n\n" if (root / "docs" / "layer.png").exists() else ""
    measured = [document for _, document in results]
    start = between(between(readme.read_text(), "speed", speed_summary(measured)), "claim", claim(measured))
    speed = between(performance.read_text(), "benchmark", cpu_table(result("collective_vs_topk.json")))
    compared = comparison_sections(measured)
    times = "\n\n".join(
        text if text.startswith("|") else wrapped(text) for text in host.host_summary(host.results(host.HOST_BENCHMARK))
    )
    costs = "\n\n".join(wrapped(host.overhead_of(each)) for _, each in host.results(host.OPERATORS_BENCHMARK))
    speed = between(speed, "host", times)
    return {
        readme: between(
            start, "layer", layer_summary([with_cases(dict(layers)[README_LAYER], README_LAYERS, README_CONTENDERS)])
        ),
        performance: between(
            between(speed, "comparisons", compared or NO_RESULT),
            "layer",
            picture + (layer_summary(latest) or NO_RESULT),
        ),
        guide: between(guide.read_text(), "overhead", costs),
        root / "docs" / "results.md": page(results, layers, gpu_results(ROLES_BENCHMARK)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the documents, or say whether they are up to date. ``arguments`` stand for those of the process."""
    parser = parser_of("render", (__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a document is stale")
    check = parser.parse_args(arguments).check
    stale = {path: text for path, text in rendered().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if check:
            print(f"{path.name} is stale; run: {COMMAND}", file=sys.stderr)
        else:
            path.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
