"""Run modules of the tests in processes that compile kernels. Triton reads ``TRITON_INTERPRET`` when it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def run_compiled(module: str, *arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module arguments`` without ``TRITON_INTERPRET``, and return what ``subprocess.run`` does.

    Args:
        module: a module of the tests, such as ``"tests.kernels.aot"``.
        timeout: seconds.

    Raises:
        subprocess.TimeoutExpired: it had not ended after ``timeout``.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT), str(ROOT / "testing/src"), *filter(None, [env.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout)


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in ``folder``, on its own sources where it has some, and return what ``subprocess.run`` does."""
    root = folder if (folder / "src").is_dir() else ROOT
    paths = [str(root / "src"), str(root / "testing/src"), os.environ.get("PYTHONPATH", "")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env={**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
