"""Run modules of the tests in processes that compile kernels. Triton reads ``TRITON_INTERPRET`` when it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.programs import Program, compiler


def run_compiled(module: str, *arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module arguments`` without ``TRITON_INTERPRET``, and return what ``subprocess.run`` does.

    Args:
        module: a module of the tests, such as ``"tests.kernels.aot"``.
        timeout: seconds.

    Raises:
        subprocess.TimeoutExpired: it had not ended after ``timeout``.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / name for name in ("out", "err")]
        program = Program(["-m", module, *arguments], environment, str(ROOT), *map(str, files))
        [status] = compiler().run([program], timeout)
        said = [file.read_text() for file in files]
    if status is None:
        raise subprocess.TimeoutExpired(program.command, timeout, *said)
    return subprocess.CompletedProcess(program.command, status, *said)


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
