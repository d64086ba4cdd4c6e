"""``moelink doctor``: look at the machines of a job before it starts, on all ranks, in seconds.

=============  ========================================================================================================
``board``      exchanges of findings, over the launcher's store alone
``facts``      the facts of a rank: versions, device, clocks, memory, NVSHMEM, network
``pairs``      the connection of each pair of ranks: its link, latency and bandwidth
``formats``    a dispatch and a combine in each format, compared with the format's twin
``diagnosis``  the problems, with advice
``run``        the steps of an examination, in order
=============  ========================================================================================================
"""

from moelink.tools.doctor.diagnosis import Examination, Problem, diagnose
from moelink.tools.doctor.run import examine, run_doctor

__all__ = ["Examination", "Problem", "diagnose", "examine", "run_doctor"]
