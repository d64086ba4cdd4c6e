"""Python runs this file as each process starts that tests start, because ``conftest.py`` puts its folder on PYTHONPATH.

It gives commands, examples and the code of pages the faster interpreter of kernels that tests have
(``moelink_testing.interpreter``), as soon as they load Triton. A process that does not is left as it is.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder


class _Hook:
    """Finds Triton, once, and makes its interpreter faster when it is loaded."""

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
            importlib.import_module("moelink_testing.interpreter").speed_up()

        spec.loader.exec_module = load_both
        return spec


sys.meta_path.insert(0, _Hook)
