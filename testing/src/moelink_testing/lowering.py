"""Compile kernels for GPUs that are not there, and read the instructions that touch memory.

An interpreter cannot say whether a barrier stands before a release, at which scope a flag is released, or how wide a
row is copied. PTX can: :func:`lowered` compiles a kernel for a target on a machine without a GPU.

Kernels that a process interprets it cannot compile, so :func:`lowered` starts another one for those, which takes one or
two seconds. To lower many forms, write a script, and run it without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction

Until = Literal["ir", "ttir", "assembly"]

_MEMORY = re.compile(r"^\s*(?:@!?%?\w+ )?((?:ld|st|atom|red|bar|fence|membar)\b[\w.:]*)", re.M)
_HINT = re.compile(r"\.(?:cs|L[12]::\w+)\b")
_GCN = re.compile(r"^\s*((?:global|buffer|scratch|flat)_[a-z_0-9]+)", re.M)
_INSTRUCTION = re.compile(r"^\s+(?:@!?%?\w+ )?[a-z][\w.:]*.*;", re.M)
_AMD_STACK = re.compile(r"\.private_segment_fixed_size: (\d+)")
_WAIT = "griddepcontrol.wait"


def lowered(
    kernel: Any,
    arguments: Mapping[str, Any],
    constants: Mapping[str, Any] | None = None,
    *,
    target: str = "sm_90",
    until: Until = "assembly",
    aligned: int = 16,
    timeout: float = 300.0,
    **options: Any,
) -> Lowered:
    """Compile a kernel for a GPU that is not there.

    Args:
        kernel: a function under ``@triton.jit``, at the top of a module.
        arguments: Triton's name of the type of each argument that is no constant: ``"*fp32"`` for a pointer to float32,
            ``"i32"`` for a number. A tuple argument has a tuple of names, a NamedTuple one of its class.
        constants: value of each ``tl.constexpr`` argument.
        target: ``"sm_90"``, ``"sm_100"``, ... of NVIDIA, or ``"gfx942"``, ... of AMD.
        until: "assembly" for everything; "ttir" ends after the first passes over Triton's own intermediate form, with
            all functions in line; "ir" before them. Both take a fraction of the time.
        aligned: bytes by which all pointers are divisible.
        timeout: seconds that another process may take, where this one interprets kernels.
        options: of the compiler, such as ``num_warps=8``. ``enable_fp_fusion`` is True if it is not given, as in Triton
            up to 3.9; later releases have another default.

    Raises:
        ValueError: ``target`` is none, or the arguments and constants are not those of the kernel.
        TypeError: ``kernel`` is no kernel; or it is interpreted and in ``__main__``, where no other process finds it.
        RuntimeError: the other process could not compile the kernel; the message has what it printed.
        Exception: what Triton's compiler says.

    Example: ``send`` of ``talk.py`` in the README stores a row of 1024 and exchanges a flag.

    >>> from talk import send
    >>> form = lowered(send, {"data": "*fp32", "flag": "*i32"}, {"N": 1024}, target="sm_90")
    >>> form.memory[-4:]
    ['st.global.v4.b32', 'st.global.v4.b32', 'bar.sync', 'atom.global.sys.relaxed.exch.b32']
    >>> form.unguarded, form.stack
    (0, 0)
    """
    architecture = _target(target)
    options = {"enable_fp_fusion": True, **options}
    if isinstance(kernel, InterpretedFunction):
        given = (
            dict(arguments),
            dict(constants or {}),
            {"target": target, "until": until, "aligned": aligned, **options},
        )
        return _lowered_elsewhere(kernel, given, timeout)
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"kernel: expected a function under @triton.jit, got {type(kernel).__name__}")
    made = source(kernel, arguments, constants or {}, aligned)
    if until == "assembly":
        binary = triton.compile(made, target=architecture, options=options)
        asm = {stage: code for stage, code in binary.asm.items() if isinstance(code, str | bytes)}
        return Lowered(target, asm, binary.metadata.shared)
    return Lowered(target, {until: _traced(made, architecture, options, passes=until == "ttir")})


@dataclass(frozen=True)
class Lowered:
    """What the compiler has made of a kernel.

    Attributes:
        target: the GPU.
        asm: text of each stage that was reached: "ir", or "ttir", or "ttir", "ttgir", "llir" and "ptx" ("amdgcn" of
            AMD); and bytes of the binary, "cubin" (or "hsaco").
        shared: bytes of shared memory that a program takes; 0 where the form has no assembly.
    """

    target: str
    asm: Mapping[str, Any]
    shared: int = 0

    @property
    def ttir(self) -> str:
        """Triton's intermediate form, with all functions in line."""
        return self._text("ttir")

    @property
    def assembly(self) -> str:
        """PTX, or AMD's assembly."""
        return self._text("amdgcn" if self.target.startswith("gfx") else "ptx")

    @property
    def memory(self) -> list[str]:
        """The instructions that load, store, change atomically, fence or wait at a barrier, in their order.

        What PTX says of caches is left out: ``ld.global.cs.v4.b32`` is ``ld.global.v4.b32``.
        """
        return _GCN.findall(self.assembly) if self.target.startswith("gfx") else memory_instructions(self.assembly)

    @property
    def counts(self) -> Counter[str]:
        """How often each of :attr:`memory` occurs."""
        return Counter(self.memory)

    @property
    def cache_hints(self) -> Counter[str]:
        """How many loads ("ld") and stores ("st") say which cache they are for, by the first two letters."""
        return Counter(op[:2] for op in _MEMORY.findall(self.assembly) if _HINT.search(op))

    @property
    def unguarded(self) -> int:
        """:func:`unguarded_releases` of :attr:`memory`."""
        return unguarded_releases(self.memory)

    @property
    def local(self) -> int:
        """Loads and stores of memory that each thread has for itself: tables, and what AMD's compiler spills."""
        return sum("local" in op or op.startswith("scratch") for op in self.memory)

    @property
    def stack(self) -> int:
        """Bytes of stack that a thread has, into which registers are spilled."""
        found = _AMD_STACK.search(self.assembly)
        return stack_of(self.asm["cubin"]) if found is None else int(found[1])

    @property
    def instructions(self) -> int:
        """All instructions of the assembly."""
        return len(_INSTRUCTION.findall(self.assembly))

    @property
    def before_the_wait(self) -> int:
        """Memory instructions before a dependent launch waits for the launch before it; -1 if it does not wait."""
        entry = self.assembly[self.assembly.index(".entry") :]
        wait = entry.find(_WAIT)
        return -1 if wait < 0 else sum("param" not in op for op in _MEMORY.findall(entry[:wait]))

    def _text(self, stage: str) -> str:
        if stage not in self.asm:
            raise ValueError(f"until: expected a form lowered as far as {stage}, got one with {', '.join(self.asm)}")
        text: str = self.asm[stage]
        return text


def memory_instructions(ptx: str) -> list[str]:
    """Return :attr:`Lowered.memory` of PTX, which may be a piece of it."""
    return [_HINT.sub("", op) for op in _MEMORY.findall(ptx)]


def unguarded_releases(memory: Sequence[str]) -> int:
    """Count the releasing exchanges before which no barrier stands, or a store to global memory after the barrier.

    The threads of a program store for themselves, and one of them releases. Without ``tl.debug_barrier()`` right before
    the release, it speaks for the stores of its own thread alone.

    Example: ``["st.global.b32", "bar.sync", "atom.global.sys.release.exch.b32"]`` has 0; without the barrier 1.
    """
    count = 0
    for i, op in enumerate(memory):
        if ".release" not in op or "exch" not in op:
            continue
        before = memory[:i][::-1]
        barrier = next((j for j, other in enumerate(before) if other.startswith("bar")), None)
        count += barrier is None or any(other.startswith("st.global") for other in before[:barrier])
    return count


def stack_of(cubin: bytes) -> int:
    """Return the bytes of stack that a thread of an NVIDIA binary has, which is where registers are spilled to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return sum(int(size) for size in re.findall(r"STACK:(\d+)", done.stdout))


def _target(name: str) -> GPUTarget:
    nvidia = re.fullmatch(r"sm_(\d+)", name)
    if nvidia:
        return GPUTarget("cuda", int(nvidia[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]+", name):
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    raise ValueError(f"target: expected sm_ and a number, or gfx and a number, got {name!r}")


def source(
    kernel: JITFunction[Any], arguments: Mapping[str, Any], constants: Mapping[str, Any], aligned: int = 16
) -> Any:
    """Return what Triton compiles for :func:`lowered`: types in the order of parameters, and which are divisible."""
    from triton.compiler import ASTSource

    names = kernel.arg_names
    if set(names) != arguments.keys() | constants.keys() or arguments.keys() & constants.keys():
        raise ValueError(
            f"{kernel.__name__}: expected each of {', '.join(names)} in arguments or in constants, got arguments "
            f"{', '.join(arguments)} and constants {', '.join(constants)}"
        )
    signature = {name: arguments.get(name, "constexpr") for name in names}
    divisible = {
        place: [["tt.divisibility", aligned]]
        for index, name in enumerate(names)
        for place, kind in _leaves(signature[name], (index,))
        if kind.startswith("*")
    }
    return ASTSource(kernel, signature, dict(constants), divisible)


def _leaves(kind: Any, place: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    """The names of types in a tuple of tuples, each with its place."""
    if isinstance(kind, str):
        yield place, kind
        return
    for index, part in enumerate(kind):
        yield from _leaves(part, (*place, index))


def _traced(made: Any, target: GPUTarget, options: Mapping[str, Any], *, passes: bool) -> str:
    """Triton's intermediate form, after the first passes if ``passes``."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend = make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(dict(options))
    codegen, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = made.make_ir(target, parsed, codegen, modules, context)
    if passes:
        stages: dict[str, Any] = {}
        backend.add_stages(stages, parsed, made.language)
        module = stages["ttir"](module, {})
    return str(module)


def _lowered_elsewhere(kernel: InterpretedFunction[Any], given: tuple[Any, ...], timeout: float) -> Lowered:
    """Compile ``kernel`` in a process that does not interpret kernels, which finds it by the name of its module."""
    module, name = kernel.fn.__module__, kernel.fn.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise TypeError(
            f"kernel: expected one at the top of a module, got {module}.{name}, which this process interprets; move "
            "it, or run the program without TRITON_INTERPRET"
        )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "request"), Path(folder, "answer")
        request.write_bytes(pickle.dumps((module, name, *given)))
        code = "import sys; from moelink_testing.lowering import _answer; _answer(*sys.argv[1:])"
        command = [sys.executable, "-c", code, str(request), str(answer)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        if done.returncode != 0:
            raise RuntimeError(f"{module}.{name}: expected it to compile, got {(done.stdout + done.stderr)[-4000:]}")
        form: Lowered = pickle.loads(answer.read_bytes())
    return form


def _answer(request: str, answer: str) -> None:
    """What the other process does."""
    module, name, arguments, constants, options = pickle.loads(Path(request).read_bytes())
    form = lowered(getattr(importlib.import_module(module), name), arguments, constants, **options)
    Path(answer).write_bytes(pickle.dumps(form))
