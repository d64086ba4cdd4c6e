"""Add the other terms of a token's result to its sum, and store it: the last step of combine's home role.

These are the row of the fused shared expert, ``shared=``, and the epilogue's tensor. An epilogue's hook stores in place
of this.

Example: a token's rows sum to 1.5, the shared expert gives 0.25, ``shared=`` 2 and a bias 1: 4.75 is stored.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only, round_to


@triton.jit
def shared_expert_output(y, numbers, token, c, S: tl.constexpr):
    """Load the fused shared expert's row of this token: row token - shared_begin of this rank's own expert outputs, or
    zeros where it has none."""
    row = token - numbers.shared_begin
    keep = (row >= 0) & (token < numbers.shared_end) & (row < numbers.y_rows)
    return tl.load(y + row.to(tl.int64) * S.HIDDEN_SIZE + c, mask=only(keep, c < S.HIDDEN_SIZE), other=0.0)


@triton.jit
def finish(total, outputs, inputs, token, c, numbers, S: tl.constexpr):
    """Add the fused shared expert's row, ``shared=`` and the epilogue's tensor, and store row ``token``, or call the
    epilogue's hook, which stores it."""
    if S.FUSED_SHARED_EXPERT:
        total += shared_expert_output(inputs.y, numbers, token, c, S).to(S.SUM_DTYPE)
    at = tl.cast(token, tl.int64) * S.HIDDEN_SIZE + c
    if S.HAS_SHARED:
        total += tl.load(inputs.shared + at, mask=c < S.HIDDEN_SIZE, other=0.0).to(S.SUM_DTYPE)
    if S.EPILOGUE == "bias":
        total += tl.load(inputs.epilogue + c, mask=c < S.HIDDEN_SIZE, other=0.0).to(S.SUM_DTYPE)
    elif S.EPILOGUE == "residual":
        total += tl.load(inputs.epilogue + at, mask=c < S.HIDDEN_SIZE, other=0.0).to(S.SUM_DTYPE)
    if S.HOOK is not None:
        rows = tl.full([1, 1], 0, tl.int64) + token
        S.HOOK(outputs.epilogue_tensors, rows, c.to(tl.int64)[None, :], total[None, :], (c < S.HIDDEN_SIZE)[None, :])
    else:
        tl.store(outputs.out + at, round_to(total, S.OUT_DTYPE, S.NATIVE_CASTS), mask=c < S.HIDDEN_SIZE)
