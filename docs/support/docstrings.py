"""An extension of griffe: the markup of the docstrings, which pydoc and editors show as it is, as Markdown.

* roles of reStructuredText (``:class:`Format` ``) become code,
* doctests become code blocks; "Example:" becomes griffe's "Examples:", which knows doctests,
* ``::`` before an indented block becomes a colon,
* ``device, dtype: text`` under Args and Attributes becomes a line for each name,
* shapes one behind another (``[n] [2]``) lose the look of a link,
* simple tables (columns between lines of ``=``) become tables, but those without a heading, which list the files of a
  package, are left out.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?\.?([^`]+)`")
SECTION = re.compile(r"^(Args|Attributes):$")
NAMES = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*)$")
RULE = re.compile(r"^(=+)( +=+)+$")


def to_markdown(text: str) -> str:
    """A docstring as Markdown."""
    text = ROLE.sub(r"`\1`", text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r"\](?= ?\[)", "]\u200b", text)
    return "\n".join(_doctests(_tables(_literals(_names(text.split("\n"))))))


def _names(lines: list[str]) -> list[str]:
    out: list[str] = []
    inside = False
    shared: list[str] = []  # names that are still to get the text being read
    text: list[str] = []

    def flush() -> None:
        for name in shared:
            out.extend([text[0].replace("\0", name), *text[1:]])
        shared.clear()
        text.clear()

    for line in lines:
        indent = len(line) - len(line.lstrip())
        if text and (not line.strip() or indent <= len(text[0]) - len(text[0].lstrip())):
            flush()
        inside = bool(SECTION.match(line)) or (inside and (indent > 0 or not line.strip()))
        match = NAMES.match(line) if inside else None
        if match:
            shared += match[2].split(", ")
            text.append(f"{match[1]}\0{match[3]}")
        elif text:
            text.append(line)
        else:
            out.append(line)
    flush()
    return out


def _literals(lines: list[str]) -> list[str]:
    """``words::`` as ``words:``, and a lone ``::`` as nothing. The indented block behind is code in Markdown, too."""
    out = []
    for line in lines:
        out.append("" if line.strip() == "::" else re.sub(r"(?<=\S)::$", ":", line))
    return out


def _doctests(lines: list[str]) -> list[str]:
    """Fences around ``>>>`` lines and what follows up to an empty line, but not in a section of griffe's."""
    out: list[str] = []
    inside = section = False
    for line in lines:
        section = line == "Examples:" or (section and line[:1] in ("", " "))
        if not section and not inside and line.lstrip().startswith(">>> "):
            indent = line[: len(line) - len(line.lstrip())]
            out += ["", f"{indent}```pycon"]
            inside = True
        elif inside and not line.strip():
            out.append(f"{indent}```")
            inside = False
        out.append(line)
    return [*out, f"{indent}```"] if inside else out


def _tables(lines: list[str]) -> list[str]:
    out: list[str] = []
    at = 0
    while at < len(lines):
        rules = [at] + [i for i in range(at + 1, len(lines)) if lines[i] == lines[at]][:2]
        if not RULE.match(lines[at]) or len(rules) < 2:
            out.append(lines[at])
            at += 1
            continue
        starts = [match.start() for match in re.finditer(r"=+", lines[at])]
        spans = list(zip(starts, [*starts[1:], None], strict=True))
        if len(rules) == 3:
            body = [*lines[rules[0] + 1 : rules[1]], *lines[rules[1] + 1 : rules[2]]]
            rows = [[line[a:b].strip().replace("|", "\\|") for a, b in spans] for line in body]
            rows.insert(1, ["---"] * len(spans))
            out += ["", *(f"| {' | '.join(cells)} |" for cells in rows), ""]
        at = rules[-1] + 1
    return out


class Docstrings(griffe.Extension):
    """Rewrites each docstring once, when its object has been read."""

    def on_object(self, *, obj: griffe.Object, loader: Any, **kwargs: Any) -> None:
        """Of griffe."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
