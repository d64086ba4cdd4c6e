"""``moelink doctor``: look at the machines of a job before it starts, on all ranks, in seconds.

=============  ========================================================================================================
``board``        how ranks tell one another what they found, over the launcher's store alone
``facts``      what a rank knows of itself: versions, device, clocks, memory, NVSHMEM, network
``pairs``      whether pairs of ranks reach one another, over which link, with what latency and bandwidth
``formats``    a dispatch and a combine in each format, compared with the format's twin
``diagnosis``  what is wrong, where, and what to do about it
``run``        the steps of an examination, in order
=============  ========================================================================================================
"""

from moelink.tools.doctor.diagnosis import Examination, Problem, diagnose
from moelink.tools.doctor.run import examine, run_doctor

__all__ = ["Examination", "Problem", "diagnose", "examine", "run_doctor"]
