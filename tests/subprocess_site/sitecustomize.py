"""Python runs this file as each process starts that tests start, because ``conftest.py`` puts its folder on PYTHONPATH.

It gives commands, examples and the code of pages the faster interpreter of kernels that tests have
(``fast_interpreter.py``), as soon as they load Triton. A process that does not is left as it is.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


class _Hook:
    """Finds Triton, once, and runs ``fast_interpreter.py`` after it."""

    @classmethod
    def find_spec(cls, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != "triton":
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        load = spec.loader.exec_module

        def load_both(module: object) -> None:
            load(module)
            if "tests.support.fast_interpreter" in sys.modules:  # which is loading Triton
                return
            file = Path(__file__).parent.parent / "support" / "fast_interpreter.py"
            fast = importlib.util.spec_from_file_location("tests.support.fast_interpreter", file)
            sys.modules["tests.support.fast_interpreter"] = importlib.util.module_from_spec(fast)
            fast.loader.exec_module(sys.modules["tests.support.fast_interpreter"])

        spec.loader.exec_module = load_both
        return spec


sys.meta_path.insert(0, _Hook)
