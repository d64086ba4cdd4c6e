"""What is public: ``moelink.__all__``, complete, sorted, documented; and the examples in docstrings, which run."""

import ast
import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import moelink
import moelink_bench
from tests.support.paths import ROOT

pytestmark = pytest.mark.quick("each case checks something else, in milliseconds")

# Importing these needs a GPU toolchain, or they are interpreted and tested elsewhere.
NOT_IMPORTED = ("moelink.kernels", "moelink.formats.device", "moelink.__main__", "moelink_bench.__main__")

MODULES = sorted(
    info.name
    for package in (moelink, moelink_bench)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not info.name.startswith(NOT_IMPORTED)
)


def public_names(module: ModuleType) -> set[str]:
    return {name for name, value in vars(module).items() if not name.startswith("_") and not inspect.ismodule(value)}


def test_all_is_sorted_and_complete() -> None:
    assert list(moelink.__all__) == sorted(moelink.__all__)
    assert set(moelink.__all__) == public_names(moelink) - {"annotations"}


def test_every_error_is_public() -> None:
    errors = importlib.import_module("moelink.errors")
    defined = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined <= set(moelink.__all__)
    for name in defined:
        assert name in (errors.__doc__ or ""), f"{name} is missing from the tree in the docstring of errors.py"


@pytest.mark.parametrize("name", moelink.__all__)
def test_public_things_are_documented(name: str) -> None:
    thing = getattr(moelink, name)
    assert (inspect.getdoc(thing) or "").strip(), f"{name} has no docstring"
    if not inspect.isclass(thing):
        return
    for attribute, value in vars(thing).items():
        function = value.fget if isinstance(value, property) else value
        if attribute.startswith("_") or not inspect.isfunction(function):
            continue
        assert inspect.getdoc(getattr(thing, attribute)), f"{name}.{attribute} has no docstring"


@pytest.mark.parametrize("name", moelink.__all__)
def test_public_functions_are_annotated(name: str) -> None:
    thing = getattr(moelink, name)
    if inspect.isfunction(thing):
        signature = inspect.signature(thing)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def test_the_version_is_the_one_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{moelink.__version__}"' in text


@pytest.mark.parametrize("name", ["moelink", *MODULES])
def test_modules_are_documented_and_their_examples_run(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except moelink.UnsupportedError as error:
        if not name.startswith("moelink.integrations."):
            raise
        pytest.skip(f"a framework is not installed here: {error}")  # make test-frameworks and test-engines have them
    assert module.__doc__, f"{name} has no docstring"
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


def test_kernels_are_documented() -> None:
    root = Path(moelink.__file__).parent
    for path in [*root.glob("kernels/**/*.py"), root / "formats" / "device.py"]:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
