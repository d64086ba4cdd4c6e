"""Combine, home role: what is added to a token's sum before it is rounded, and where the result goes.

Example: a token's rows sum to 1.5, the shared expert gives 0.25, ``shared=`` 2 and a bias 1: 4.75 is stored.
"""

import triton
import triton.language as tl

from moelink.kernels.numeric import only, round_to


@triton.jit
def copy_shared_expert_outputs(total, y, y_rows, token, c, shared_begin, shared_end, S: tl.constexpr):
    """Add the fused shared expert's row of this token: row token - shared_begin of the own expert outputs."""
    row = token - shared_begin
    keep = (row >= 0) & (token < shared_end) & (row < y_rows)
    return total + tl.load(y + row.to(tl.int64) * S.H + c, mask=only(keep, c < S.H), other=0.0).to(S.ACC)


@triton.jit
def finish(total, out, shared, epilogue, epilogue_tensors, token, c, S: tl.constexpr):
    """Add what belongs before the rounding, and store row ``token`` (or let the epilogue do it)."""
    at = tl.cast(token, tl.int64) * S.H + c
    if S.ADD_SHARED:
        total += tl.load(shared + at, mask=c < S.H, other=0.0).to(S.ACC)
    if S.EPILOGUE == "bias":
        total += tl.load(epilogue + c, mask=c < S.H, other=0.0).to(S.ACC)
    elif S.EPILOGUE == "residual":
        total += tl.load(epilogue + at, mask=c < S.H, other=0.0).to(S.ACC)
    if S.HOOK is not None:
        rows = tl.full([1, 1], 0, tl.int64) + token
        S.HOOK(epilogue_tensors, rows, c.to(tl.int64)[None, :], total[None, :], (c < S.H)[None, :])
    else:
        tl.store(out + at, round_to(total, S.OUT, S.NATIVE), mask=c < S.H)
