"""The files around the package agree: versions, pins, names of hooks."""

from __future__ import annotations

import re
import subprocess

import pytest

import moelink
from tests.support.paths import ROOT


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def test_one_version() -> None:
    version = moelink.__version__
    for name in ("pyproject.toml", "testing/pyproject.toml", "benchmarks/pyproject.toml"):
        assert re.search(rf'^version = "{re.escape(version)}"$', text_of(name), re.MULTILINE), name
    assert re.search(rf"^version: {re.escape(version)}$", text_of("CITATION.cff"), re.MULTILINE)
    newest = re.search(
        r"^## \[(?!Unreleased)([^]]+)\] - (unreleased|\d{4}-\d\d-\d\d)$", text_of("CHANGELOG.md"), re.MULTILINE
    )
    assert newest is not None
    assert newest[1] == version


def test_what_locks_the_requirements_is_pinned_itself() -> None:
    installs = re.findall(r"build/lock/bin/pip install (.*)", text_of("Makefile"))
    assert installs == ["--quiet -c constraints.txt uv"]
    assert re.search(r"^uv==[\d.]+$", text_of("constraints.txt"), re.MULTILINE)


def test_tests_that_constraints_name_exist() -> None:
    for name in ("constraints.txt", "constraints-cuda.txt"):
        for path in re.findall(r"tests/[\w/]+\.py", text_of(name)):
            assert (ROOT / path).is_file(), f"{name} names {path}, which does not exist"


def test_hooks_have_the_versions_of_the_constraints() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", text_of("constraints.txt"), re.MULTILINE))
    hooks = re.findall(r"additional_dependencies: \[(.*)\]", text_of(".pre-commit-config.yaml"))
    assert hooks
    for hook in hooks:
        name, _, version = hook.partition("==")
        assert pins[name] == version, f"{name}: expected the pin of constraints.txt, {pins[name]}, got {version}"


def locked(name: str) -> dict[str, int]:
    """How many hashes each package of a file in requirements/ has, at each of its versions."""
    entries = re.split(r"^(?=[a-z])", text_of(f"requirements/{name}.txt"), flags=re.MULTILINE)[1:]
    pins = [re.match(r"([a-z0-9._-]+)==[\w.]+( ; .*)? \\$", entry, re.MULTILINE) for entry in entries]
    assert all(pins), "every entry is a version with hashes"
    return {
        pin[1]: len(re.findall("--hash=sha256:[0-9a-f]{64}", entry)) for pin, entry in zip(pins, entries, strict=True)
    }


@pytest.mark.quick("each is a file of its own")
@pytest.mark.parametrize("name", ["dev", "build", "docs"])
def test_what_is_installed_is_pinned_by_hash(name: str) -> None:
    hashes = locked(name)
    assert all(hashes.values()), hashes
    group = text_of("pyproject.toml").split(f"\n{name} = [")[1].split("]")[0]
    wanted = {found.lower().replace("_", "-") for found in re.findall(r'"([\w-]+)', group)}
    assert wanted
    assert wanted <= hashes.keys()


def test_actions_are_pinned_by_commit() -> None:
    used = [line for path in (ROOT / ".github" / "workflows").glob("*.yml") for line in path.read_text().splitlines()]
    used = [line for line in used if "uses:" in line]
    assert used
    for line in used:
        assert re.search(r"uses: [\w/-]+@[0-9a-f]{40}  # v[\d.]+$", line), line


SUBJECTS = {
    "formats: add int8 with a scale per 64 elements": True,
    "kernels/sync: wait for the credit first\n\nIt was overwritten.": True,
    "Merge branch 'formats'": True,
    'Revert "formats: add int8"': True,
    "formats: " + "x" * 63: True,
    "formats: " + "x" * 64: False,
    "Add int8": False,
    "formats:add int8": False,
    "\nformats: add int8": False,
}


@pytest.mark.parametrize("message", SUBJECTS, ids=range(len(SUBJECTS)))
@pytest.mark.quick("a message takes no time, and each has its own rule")
def test_the_rule_of_commit_subjects(message: str) -> None:
    (pattern,) = re.findall(r"entry: '(\\A.*)'", text_of(".pre-commit-config.yaml"))
    assert bool(re.search(pattern, message, re.MULTILINE | re.DOTALL)) == SUBJECTS[message]


def test_issue_forms_ask_what_moelink_env_says() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]-*.yml"))
    assert len(forms) == 4
    for form in forms[:3]:
        assert "moelink env --full --json" in form.read_text(), form.name


def test_one_address() -> None:
    """The repository is named alike everywhere."""
    names = subprocess.run(
        ["git", "ls-files", "*.md", "*.yml", "*.cff", "*.toml"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    found = {
        address
        for name in names
        for address in re.findall(r"https://github\.com/[\w.-]+/moelink\b", text_of(name), re.IGNORECASE)
    }
    assert found == {"https://github.com/moelink/moelink"}
