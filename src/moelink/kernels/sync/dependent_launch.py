"""Let a launch take its place on the device while the launch before it ends (programmatic dependent launch).

Between the end of one kernel and the first instruction of the next in its stream the device does nothing for more than
a microsecond. A kernel that is launched as dependent may start earlier: as soon as every CTA of the kernel before it
has ended or has allowed it (:func:`allow_next_launch`). It must then wait (:func:`wait_for_previous_launch`) before it
touches memory that an earlier launch may still write or read. The hardware ends that wait once the kernel before has
ended as a whole and its stores are visible.

Why nothing changes for the protocol: the wait is the first thing that a CTA does (``kernels.launch.roles``), and
all else follows it. So whatever relies on stream order, such as counts of calls and credit, finds what it found without
this. A kernel of another library that is launched as dependent waits in the same way; one that is not starts when this
one has ended. The launcher gives the attribute only to kernels that wait (``kernels.launch.direct``).

Why no wait gets longer: CTAs of the next launch hold places on the SMs while they wait, which something else might
need. So a CTA allows them only after its last wait for another rank, or at its end. When all CTAs have, this launch
waits for no rank any more. It ends whatever the device runs besides, and so does the next launch's wait.

Kernels on rows (:mod:`moelink.rows`) wait for no rank, so they allow the next launch as soon as they go on
(:func:`follow_previous_launch`). The next launch's wait is for their end, which follows their own wait: what it finds
is what stream order promises, however many such launches follow one another. The activation allows it before its own
wait: its CTAs have begun by then, so all of the launch before it allowed them, and this argument holds as well. A
product may read weights and ``row_offsets`` before its wait (:mod:`moelink.rows.grouped_gluon`).

Example: CTA 0 sends and ends, CTA 1 sees the last message and then unpacks it. The next launch starts when CTA 0 has
ended and CTA 1 has seen the message. Its CTAs go on when CTA 1 has ended.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_previous_launch(S: tl.constexpr):
    """Wait until the launch before this one in the stream has ended and its stores are visible."""
    if S.DEPENDENT_LAUNCH:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit
def allow_next_launch(S: tl.constexpr):
    """Allow the next launch in the stream to start, as far as this CTA is concerned."""
    if S.DEPENDENT_LAUNCH:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit
def follow_previous_launch(S: tl.constexpr):
    """Wait for the launch before this one, and let the next one take its place: of kernels that wait for nothing
    else."""
    wait_for_previous_launch(S)
    allow_next_launch(S)
