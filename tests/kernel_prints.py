"""Fingerprints of the kernels inside a node: whether a change of the source is one of the kernels.

``python kernel_prints.py`` prints a line for every form of the GPU matrix: a hash of its intermediate form (TTIR) for
sm_90, and its name. Two trees that print the same have the same kernels, whatever was moved or renamed in between, so
that GPU runs of one speak for the other. Run without TRITON_INTERPRET.

    git stash; python kernel_prints.py > before; git stash pop; python kernel_prints.py | diff before -
"""

from __future__ import annotations

import hashlib

from triton._C.libtriton import ir
from triton.compiler import make_backend

from aot import source_of
from aot_forms import NODES, TARGET, forms
from ttir_text import nameless


def main() -> None:
    """Print all of them."""
    backend = make_backend(TARGET)
    options = backend.parse_options({"num_warps": 8, "enable_fp_fusion": False})
    for name, kernel, spec, pointers in forms():
        if name.startswith(NODES):
            continue
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        source = source_of(kernel, spec, pointers)
        codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        module = source.make_ir(TARGET, options, codegen, modules, context)
        text = nameless(str(backend.make_ttir(module, {}, options, TARGET.arch)))
        print(hashlib.sha1(text.encode()).hexdigest()[:16], name, flush=True)


if __name__ == "__main__":
    main()
