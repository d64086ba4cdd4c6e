"""Make interpreted kernels fast in a process that imports this module: the fork server does, for all ranks."""

import os
from importlib.util import find_spec

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    from moelink_testing.interpreter import speed_up

    speed_up()
