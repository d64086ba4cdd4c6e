"""Compiles the kernel that chooses experts for a GPU that is not there, with the sizes of a few models.

``python -m tests.rows.choose_aot sm_90`` needs TRITON_INTERPRET unset. No spills; rows are read in wide words; on
NVIDIA one instruction reduces a warp.
"""

import sys

from moelink_testing import lowered
from tests.rows.row_forms import launches_of, run_choose, run_choose_gradient

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
