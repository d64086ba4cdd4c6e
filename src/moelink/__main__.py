"""``python -m moelink``: the same as the command ``moelink``."""

import sys

from moelink.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
