"""The oracle: dispatch and combine of all ranks in one process, by plain loops over ranks, tokens and slots.

It judges formats, routing, layouts, transports and kernels, so it shares no code with them: it reads only the plain
fields of an ``EPConfig`` (no derived sizes; it ignores ``rank`` and computes every rank), and its quantisers search
tables of representable values. Slow on purpose; for CPU and CUDA tensors::

    rows = reference_dispatch(config, xs, topk_ids, topk_weights)         # lists: one entry per rank
    ys = [experts(r, rank) for rank, r in enumerate(rows)]
    outs = reference_combine(config, ys, rows, topk_ids)

Outputs are bit-exact in defined rows, those below ``num_rows``.
"""

from __future__ import annotations

from moelink.reference.combine import reference_combine
from moelink.reference.dispatch import ReferenceRows, dequantize_rows, reference_dispatch
from moelink.reference.rounding import reference_dequantize, reference_quantize

__all__ = [
    "ReferenceRows",
    "dequantize_rows",
    "reference_combine",
    "reference_dequantize",
    "reference_dispatch",
    "reference_quantize",
]
