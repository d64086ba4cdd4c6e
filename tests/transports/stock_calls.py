"""Make small calls of two ranks in this process, and compare what each dispatch and combine returns with the oracle.

    python -m tests.transports.stock_calls nvfp4-masked-symmetric nvfp4-masked-collective

prints a line of JSON for each call: its name, and the traceback of its failure or "". ``CALLS`` has a call for every
format, layout and transport, one through the contract's launchers for every format, and those of ``cases.features``.
``test_stock_calls.py`` runs this program in processes whose Triton the tests have not changed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
import traceback
from collections.abc import Callable
from types import FunctionType

import torch
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import moelink
from moelink.formats import get_format
from tests.contract import contract_ranks
from tests.support.cases import FORMATS, Case, Result, Setup, check_case, features

RANKS = 2
LAYOUTS = ("expert", "masked", "rank")
TRANSPORTS = ("symmetric", "collective")


def case_of(fmt: str, **options: object) -> Case:
    """Return a case with the smallest rows that the format allows, and one or two tokens a rank."""
    sizes = {"hidden_size": get_format(fmt).group, "max_tokens_per_rank": 2, **options}
    return Case(Setup(fmt, tuple(sizes.items()), num_experts=3, topk=2), "uniform", small=True)


def call_devices(case: Case, transport: str) -> None:
    """Make the calls of a case over ``moelink.init_devices``."""
    datas = [case.data(rank) for rank in range(RANKS)]
    with moelink.init_devices(["cpu"] * RANKS, **case.setup.fields, transport=transport) as ep:
        weights = [d.topk_weights for d in datas]
        recvs = ep.dispatch([d.x for d in datas], [d.topk_ids for d in datas], weights if case.travel else None)
        outs = ep.combine(
            [case.expert_rows(rank, *recv.tokens.shape[:-1]) for rank, recv in enumerate(recvs)],
            recvs,
            weights if case.weights == "combine" else None,
            reduce=case.reduce,
            shared=[case.shared_rows(rank) for rank in range(RANKS)] if case.shared else None,
            weigh=case.weights != "left",
        )
        if case.setup.fields.get("capacity") is None:  # with one, rows may be dropped
            ep.check()
        results = [Result.of(recv, out) for recv, out in zip(recvs, outs, strict=True)]
    check_case(case, RANKS, results)


def call_form(fmt: str, layout: str, transport: str) -> None:
    """Make the calls of a format and layout over a transport."""
    call_devices(case_of(fmt, layout=layout), transport)


def call_launchers(fmt: str) -> None:
    """Make the calls of a format through the contract's launchers."""
    case = case_of(fmt)
    contract_ranks.run(contract_ranks.ranks_of(contract_ranks.params_of(case.setup, RANKS)), case)


FORMS = list(itertools.product(FORMATS, LAYOUTS, TRANSPORTS))
OPTIONS = [dataclasses.replace(case, small=True) for case in features()]
CALLS: dict[str, Callable[[], None]] = {
    **{"-".join(form): functools.partial(call_form, *form) for form in FORMS},
    **{f"{fmt}-launchers": functools.partial(call_launchers, fmt) for fmt in FORMATS},
    **{f"options-{case.id}": functools.partial(call_devices, case, "symmetric") for case in OPTIONS},
}


def check_stock() -> None:
    """Raise AssertionError if a function of Triton's interpreter comes from ``moelink_testing``."""
    owners = (interpreter, core, core.tensor, core.tuple, core.block_type, TritonSemantic)
    functions = [value for owner in owners for value in vars(owner).values() if isinstance(value, FunctionType)]
    assert interpreter._patch_lang in functions
    replaced = {each.__name__ for each in functions if "moelink_testing" in each.__code__.co_filename}
    assert not replaced, (
        f"expected Triton's own functions, got those of moelink_testing in place of some: {sorted(replaced)}"
    )


def main(names: list[str]) -> None:
    """Make the calls of these names."""
    torch.set_num_threads(1)
    for name in names:
        try:
            CALLS[name]()
            failure = ""
        except Exception:  # noqa: BLE001 - the next call is made all the same
            failure = traceback.format_exc()
        print(json.dumps({"call": name, "failure": failure}), flush=True)
    check_stock()


if __name__ == "__main__":
    main(sys.argv[1:])
