"""Every family of transformers whose experts use the experts interface, on two ranks; and the table that says so."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)
if find_spec("transformers.distributed.expert_parallel") is None:
    pytest.skip("the table is that of transformers 5.23, which has a registry", allow_module_level=True)

import transformers

from moelink.integrations.transformers.forms import experts_of, form_of
from moelink.integrations.versions import RELEASES
from moelink.rows.gated import known_activation
from tests.integrations.transformers.transformers_families import build, experts_in, families
from tests.integrations.transformers.transformers_families_table import run, written

FEW = ("gpt_oss", "mixtral", "muse_spark", "nemotron_h")
"""Biases, transposed and clamped; plain; a norm behind; no gate, and rows narrower than the model."""

PARTS = 4
"""In which the full tier runs all families."""

as_tested = pytest.mark.skipif(
    transformers.__version__ != RELEASES["transformers"].tested,
    reason=f"the table is that of transformers {RELEASES['transformers'].tested}",
)


@as_tested
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["few", *range(PARTS)])
def test_families_on_two_ranks_and_the_table_of_the_page(which: str | int, tmp_path: Path) -> None:
    """If the table is not what was found: ``python docs/support/families.py``."""
    page = written()
    if isinstance(which, int):
        names = families()[which::PARTS]
        assert run(names, tmp_path) == {name: page[name] for name in names}
        return
    rows = run(FEW, tmp_path, ways=())  # register has a quick test in test_transformers_ranks.py
    assert rows == {name: replace(page[name], register=rows[name].register) for name in FEW}


@as_tested
def test_the_table_has_every_family() -> None:
    assert list(written()) == list(families())
    assert len(families()) > 60


@as_tested
@pytest.mark.parametrize("which", ["few", "all"])
def test_experts_are_found_by_what_they_declare(which: str) -> None:
    """All of them, and nothing else; with an activation of moelink's own in all but the forms that have none."""
    own = set()
    for name in FEW if which == "few" else families():
        model = build(name)
        found = dict(experts_of(model))
        assert found.keys() == dict(experts_in(model)).keys()
        assert found, name
        forms = [form_of(module) for module in found.values()]
        if any(form.activation is None for form in forms):
            own.add(name)
        assert all(form.activation is None or not form.gated or known_activation(form.activation) for form in forms)
    # The clamp of these has no "+ 1"; a tanh bounds those of inkling2.
    assert own <= {"deepseek_v4", "glm5_next", "hy_v4", "inkling2"}
