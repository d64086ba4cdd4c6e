"""Draw the picture of the README from ``docs/demo.json``, the output of ``moelink demo --json`` (see Makefile)."""

import json
from pathlib import Path

from moelink.tools.plots.maps import draw_demo

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    draw_demo(json.loads((HERE / "demo.json").read_text()), HERE / "demo.png")
