"""Compiles a router's kernels for a GPU that is not there, with the sizes of a few models: logits, choice, gradient.

``python -m tests.rows.choose_aot sm_90`` needs TRITON_INTERPRET unset. No spills; rows are read in wide words; on
NVIDIA one instruction reduces a warp, and tensor cores multiply.
"""

import re
import sys

from moelink_testing import lowered
from tests.rows.row_forms import launches_of, run_choose, run_choose_gradient, run_wide_product

MODELS = {
    "DeepSeek-V3": {"experts": 256, "topk": 8, "scoring": "sigmoid", "groups": 8, "score": "top2", "bias": True},
    "Qwen3": {"experts": 128, "topk": 8, "scoring": "softmax", "groups": 1, "score": "max", "bias": False},
    "Mixtral": {"experts": 8, "topk": 2, "scoring": "softmax", "groups": 1, "score": "max", "bias": False},
}

if __name__ == "__main__":
    target = sys.argv[1]
    for name, row in MODELS.items():
        ((kernel, spec),) = launches_of(run_choose, {**row, "gpu": target, "renormalize": True})
        form = lowered(kernel, spec.types, spec.constants, target=target, **spec.options)
        assert not form.stack, f"{target} {name}: {form.stack} bytes of local memory"
        if target.startswith("sm"):
            assert "ld.global.v4.b32" in form.assembly, f"{target} {name}: narrow loads"
            assert name == "Mixtral" or "redux.sync" in form.assembly, f"{target} {name}: reductions by shuffles"
            assert "bar.sync" not in form.assembly or name != "Mixtral", f"{target} {name}: barriers"
        for renormalize in (True, False):
            ((kernel, spec),) = launches_of(run_choose_gradient, {**row, "gpu": target, "renormalize": renormalize})
            form = lowered(kernel, spec.types, spec.constants, target=target, **spec.options)
            assert not form.stack, f"{target} {name}: {form.stack} bytes of local memory for gradients"
    for rows, sizes in ((3, (128, 2048)), (36, (256, 7168)), (128, (60, 2880))):
        ((kernel, spec),) = launches_of(run_wide_product, {"rows": rows, "sizes": sizes, "gpu": target})
        form = lowered(kernel, spec.types, spec.constants, target=target, **spec.options)
        if target.startswith("sm"):
            assert not form.stack, f"{target} {rows} rows, {sizes}: {form.stack} bytes of local memory"
            assert "ld.global" not in form.assembly, f"{target} {rows} rows, {sizes}: loads that are waited for"
            copies = set(re.findall(r"cp\.async\.c[ag].*, (\S+), \S+;", form.assembly))
            assert copies == {"0x10"}, f"{target} {rows} rows, {sizes}: narrow copies {copies}"
            assert "mma.sync.aligned.m16n8k16" in form.assembly, f"{target} {rows} rows, {sizes}: no tensor cores"
