"""Hooks of mkdocs: what GitHub shows and the site does not have by itself.

* Files beside docs/ that are pages of the site (``CONTRIBUTING.md`` and so on, :data:`ROOT_PAGES`) are read from where
  they are. A page of the list that does not exist is left out of the navigation.
* A folder in the navigation (``lab/``) stands for its pages, in the order of their names.
* Diagrams are drawn by the Mermaid that ``make docs`` has put beside the site's packages, on pages that have some. The
  theme would load it from another host. Where it is missing, diagrams stay text.
* Tables of results and the experiments log (:data:`UNSEARCHED`) are left out of the search: figures would fill it.
* Links to files that are no pages (``../src/moelink/errors.py``) lead to the repository.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
MERMAID = Path(sys.prefix) / "mermaid.min.js"
SCRIPT = "javascripts/mermaid.min.js"
ROOT_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
UNSEARCHED = ("results.md", "lab/")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^ *(```|~~~)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write out folders of the navigation, and drop root pages that are not there."""
    docs = Path(config.docs_dir)

    def expand(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            ((title, target),) = entry.items()
            if isinstance(target, list):
                return [{title: [page for child in target for page in expand(child)]}]
            if target.endswith("/"):
                pages = sorted(path.relative_to(docs).as_posix() for path in (docs / target).glob("*.md"))
                first = [page for page in pages if page.endswith(("index.md", "README.md"))]
                return [{title: first + [page for page in pages if page not in first]}] if pages else []
            return expand(target) and [entry]
        return [] if entry in ROOT_PAGES and not (ROOT / entry).exists() else [entry]

    if not MERMAID.exists():
        config.mdx_configs["pymdownx.superfences"]["custom_fences"] = []
    config.nav = [page for entry in config.nav or [] for page in expand(entry)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie beside docs/, and Mermaid."""
    if MERMAID.exists():
        files.append(File.generated(config, SCRIPT, abs_src_path=str(MERMAID)))
    for name in ROOT_PAGES:
        if (ROOT / name).exists():
            page = File.generated(config, name, abs_src_path=str(ROOT / name))
            page.dest_uri = page.dest_uri.lower()
            files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links of GitHub those of the site, and leave pages out of the search."""
    source = page.file.src_uri
    if source.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    folder = ROOT if source in ROOT_PAGES else Path(config.docs_dir) / posixpath.dirname(source)

    def lead(match: re.Match[str]) -> str:
        before, target, anchor, after = match[1], match[2], match[3] or "", match[4]
        path = (folder / target).resolve()
        if re.match(r"[a-z]+:|/", target) or not path.is_relative_to(ROOT):
            return match[0]
        there = path.relative_to(ROOT).as_posix()
        uri = there if there in ROOT_PAGES else there.removeprefix("docs/")
        if (there in ROOT_PAGES or there.startswith("docs/")) and files.get_file_from_path(uri):
            start = posixpath.dirname(source)
            return f"{before}{posixpath.relpath(uri, start or '.')}{anchor}{after}"
        if not path.exists():  # mkdocs says so
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"{before}{str(config.repo_url).rstrip('/')}/{kind}/main/{there}{anchor}{after}"

    lines, fenced = [], False
    for line in markdown.split("\n"):
        if FENCE.match(line):
            fenced = not fenced
        lines.append(line if fenced else LINK.sub(lead, line))
    return "\n".join(lines)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Load Mermaid where there is a diagram."""
    if '<pre class="mermaid">' not in html:
        return html
    return f'{html}\n<script src="{posixpath.relpath(SCRIPT, page.url or ".")}"></script>\n'
