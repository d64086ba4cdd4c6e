"""What is public: ``moelink.__all__``, complete, sorted, documented; and the examples in docstrings, which run."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch

import moelink
import moelink_bench
from moelink.formats.registry import BUILTIN
from moelink.names import BuiltInFormat
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


def names_for_type_checkers(module: ModuleType) -> set[str]:
    """The names that the file of a module imports where only type checkers read."""
    (block,) = [node for node in ast.parse(inspect.getsource(module)).body if ast.unparse(node).startswith("if TYPE_")]
    assert isinstance(block, ast.If)
    return {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_all_is_sorted_and_complete() -> None:
    assert list(moelink.__all__) == sorted(moelink.__all__)
    public = {name for name in dir(moelink) if not inspect.ismodule(getattr(moelink, name))} - {"__version__"}
    assert set(moelink.__all__) == public
    modules = set(dir(moelink)) - public - {"__version__"}
    assert names_for_type_checkers(moelink) == public | modules - {"errors", "formats", "integrations"}
    assert set(moelink_bench.__all__) == names_for_type_checkers(moelink_bench)
    assert all(hasattr(moelink_bench, name) for name in moelink_bench.__all__)
    for module in (moelink, moelink_bench):
        assert not hasattr(module, "nothing")


def test_the_help_of_init_has_every_parameter() -> None:
    text, parameters = inspect.getdoc(moelink.init) or "", inspect.signature(moelink.init).parameters
    described = re.findall(r"^    (\w+): ", text.split("Args:")[1].split("Raises:")[0], re.MULTILINE)
    assert sorted(described) == sorted(parameters)
    fields = {each.name: each for each in dataclasses.fields(moelink.EPConfig)}
    assert set(parameters) - {"group", "device", "spare_ranks"} == set(fields) - {"rank", "world_size"}
    for name in set(parameters) & set(fields):
        default = fields[name].default
        assert parameters[name].default == (inspect.Parameter.empty if default is dataclasses.MISSING else default)
        assert parameters[name].annotation == fields[name].type


def test_outputs_are_shown_by_dtype_and_shape() -> None:
    with moelink.init(num_experts=4, topk=2, hidden_size=8, max_tokens_per_rank=3, device="cpu") as ep:
        recv = ep.dispatch(torch.ones(3, 8, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 2], [3, -1]]),
                           host_counts=True)  # fmt: skip
        shown = repr(recv)
        assert "tokens=bfloat16[5, 8], scales=None, row_offsets=int32[5]" in shown
        assert "host_counts=list[4]" in shown
        assert "topk_ids=int64[3, 2]" in repr(recv.handle)
        assert repr(moelink.get_format("mxfp8").quantize(torch.ones(2, 32))) == (
            "Quantized(payload=float8_e4m3fn[2, 32], scales=float8_e8m0fnu[2, 1])"
        )


def test_the_names_of_formats_are_those_of_the_registry() -> None:
    assert list(get_args(BuiltInFormat)) == list(BUILTIN)


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
