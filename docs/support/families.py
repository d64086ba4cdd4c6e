"""Write the table of docs/transformers.md: run a tiny model of every family unsharded and on two ranks.

``python docs/support/families.py``, in the root of the repository. It takes minutes. The test of the table,
tests/integrations/transformers/test_transformers_families.py, runs the same, a few families or (``pytest --full``)
all, and compares.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Run, and write."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    from tests.integrations.transformers.transformers_families import families
    from tests.integrations.transformers.transformers_families_table import run, write

    with tempfile.TemporaryDirectory() as scratch:
        write(run(families(), Path(scratch)))


if __name__ == "__main__":
    main()
