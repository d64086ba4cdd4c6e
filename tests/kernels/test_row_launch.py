"""Launches of kernels on rows, without a GPU: what the driver gets. Triton's compiler and the driver are played."""

from __future__ import annotations

import ctypes
import gc
import struct
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from moelink.kernels.launch import row_launch as module
from moelink.kernels.launch.direct import Driver
from moelink.kernels.launch.row_launch import Block, RowLauncher

CARD = torch.device("cuda", 0)
MAP = {"swizzle": 3, "elem_size": 1, "elem_type": 9, "block_size": [64, 128], "fp4_padded": False}
SIZES = {"tensordesc": (128, 4, 4, 8, 8), "*": (8,), "i": (4,)}


class PlayedLibrary:
    """libcuda, as far as launches need it. Notes the parameters of launches, and the tensor maps that were encoded."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.launches, self.maps, self.status = sizes, [], [], 0  # type: ignore[var-annotated]
        self.attributes: list[int] = []
        self.cuFuncGetParamInfo = self._info

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:  # noqa: N802
        assert (function.value, extra.value) == (7, None)
        *numbers, stream, _, attributes = struct.unpack("@7IQQI", ctypes.string_at(config, 52))
        self.attributes.append(attributes)
        values = [ctypes.string_at(at, size) for at, size in zip(parameters, self.sizes, strict=True)]
        self.launches.append((numbers[0], numbers[3], numbers[6], stream, values))
        return self.status

    def cuTensorMapEncodeTiled(self, at: Any, *given: Any) -> int:  # noqa: N802
        assert at.value % 64 == 0
        self.maps.append([given[2].value, *[list(each) if hasattr(each, "_length_") else each for each in given]])
        ctypes.memset(at.value, len(self.maps), 128)
        return 0

    def _info(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 13000
        return 0

    def cuGetErrorString(self, status: int, words: Any) -> int:  # noqa: N802
        words._obj.value = b"out of patience"
        return 0


class Kernel:
    """A kernel of Triton; ``kinds`` are those of its arguments."""

    __name__ = "kernel"

    def __init__(self, **kinds: str) -> None:
        self.kinds, self.compiled, self.by_triton = kinds, [], []  # type: ignore[var-annotated]
        self.ptx = ""
        self.params = [SimpleNamespace(name=name, do_not_specialize=True) for name in kinds]
        parts = [
            size for kind in kinds.values() for start, part in SIZES.items() if kind.startswith(start) for size in part
        ]
        self.library = PlayedLibrary([*parts, 8, 8])
        self.metadata = SimpleNamespace(
            num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0, profile_scratch_size=0,
            name="kernel", tensordesc_meta=[MAP for kind in kinds.values() if kind.startswith("tensordesc")],
        )  # fmt: skip

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        self.compiled.append((arguments, options))
        source = SimpleNamespace(signature={**self.kinds, "S": "constexpr"})
        return SimpleNamespace(
            metadata=self.metadata,
            src=source,
            packed_metadata=(4, 1, 96),
            function=7,
            _init_handles=lambda: None,
            asm={"ptx": self.ptx},
        )

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.by_triton.append((grid, arguments, options))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel of rows by descriptor, an address, an integer, and another address."""
    made = Kernel(rows="tensordesc<fp8e4nv[64,128]>", to="*bf16", number="i32", other="*fp32")
    play(made, monkeypatch)
    return made


def play(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cuda_driver", lambda: Driver(kernel.library))
    monkeypatch.setattr(module, "is_interpreted", lambda: False)
    monkeypatch.setattr(module, "settle_cache_key", lambda kernel: kernel)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: 5)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)


def tensors(rows: int = 6) -> tuple[Any, ...]:
    return (
        Block(torch.zeros(rows, 256, dtype=torch.int8), (64, 128)),
        torch.zeros(8, dtype=torch.bfloat16),
        12,
        torch.zeros(4),
    )


def launch(
    launcher: RowLauncher, kernel: Kernel, *arguments: Any, S: str = "S", count: int = 3, **options: Any
) -> None:
    launcher.launch(kernel, arguments, S, count, device=CARD, fused=True, options=options)


def numbers(values: list[bytes]) -> list[int]:
    return [int.from_bytes(value, "little") for value in values]


def test_a_kernel_that_takes_tiles_has_the_counter_behind_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(to="*bf16", number="i32", counter="*i32")
    play(kernel, monkeypatch)
    launcher, counter = RowLauncher(), torch.zeros(4, dtype=torch.int32)
    launcher.tile_counters = SimpleNamespace(of=lambda device: counter)  # type: ignore[assignment]
    to = torch.zeros(8, dtype=torch.bfloat16)
    with launcher.noting() as notes:
        launcher.launch(kernel, (to, 12), "S", 3, device=CARD, fused=True, options={}, counted=True)
    assert numbers(kernel.library.launches[0][4])[:3] == [to.data_ptr(), 12, counter.data_ptr()]
    assert [(note.words, note.counted) for note in notes] == [([to.data_ptr(), 12, counter.data_ptr()], True)]


def test_the_worked_example_of_the_module(kernel: Kernel) -> None:
    """A descriptor is five parameters, then come the others as the signature has them, and no scratch memory."""
    rows, to, _, other = given = tensors()
    launch(RowLauncher(), kernel, *given)
    ((count, threads, shared, stream, values),) = kernel.library.launches
    assert (count, threads, shared, stream) == (3, 128, 96, 5)
    assert values[0] == b"\1" * 128, "the map that was encoded first"
    assert numbers(values[1:]) == [6, 256, 256, 1, to.data_ptr(), 12, other.data_ptr(), 0, 0]
    at = rows.tensor.data_ptr()
    # Triton's type 9 is the driver's type 8. Sizes have the inner one first, rows are 256 bytes apart, and a load takes
    # 128 x 64.
    ((found, data_type, rank, _, sizes, strides, box, steps, *rest),) = kernel.library.maps
    assert (found, data_type, rank, sizes, strides) == (at, 8, 2, [256, 6], [256])
    assert (box, steps, rest) == ([128, 64], [1, 1], [0, 3, 2, 0])


def test_a_launch_like_the_last_one_is_not_prepared_again(kernel: Kernel) -> None:
    launcher, given = RowLauncher(), tensors()
    for count in (3, 4):
        launch(launcher, kernel, *given, count=count)
    assert [each[0] for each in kernel.library.launches] == [3, 4]
    assert kernel.library.launches[0][1:] == kernel.library.launches[1][1:]
    assert len(kernel.compiled) == len(kernel.library.maps) == 1


def test_what_changes_is_written(kernel: Kernel) -> None:
    """Addresses, numbers, rows: none of them is of the compiled kernel. A map is encoded where it changes."""
    launcher, first, second, more = RowLauncher(), tensors(), tensors(), tensors(9)
    for given in (first, second, (second[0], *first[1:]), (*first[:2], 13, first[3]), more, first):
        launch(launcher, kernel, *given)
        values = kernel.library.launches[-1][-1]
        block, to, number, other = given
        rows = block.tensor.shape[0]
        assert numbers(values[1:8]) == [rows, 256, 256, 1, to.data_ptr(), number, other.data_ptr()]
        assert values[0] == bytes([len(kernel.library.maps)]) * 128
        assert kernel.library.maps[-1][0] == block.tensor.data_ptr()
        assert kernel.library.maps[-1][4] == [256, rows]
    assert len(kernel.compiled) == 1
    assert len(kernel.library.maps) == 5, "the third launch has the rows of the second"


def test_each_kind_is_compiled(kernel: Kernel) -> None:
    """By what Triton specialises for: constants, options, and of tensors dtype and alignment."""
    launcher, (block, to, number, other) = RowLauncher(), tensors()
    wide = Block(torch.zeros(6, 512, dtype=torch.int8), (64, 128))
    kinds: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
        ((block, to, number, other), {}), ((block, to[1:], number, other), {}),
        ((block, to.float(), number, other), {}),
        ((wide, to, number, other), {}), ((Block(block.tensor, (32, 128)), to, number, other), {}),
        ((block, to, number, other), {"S": "other"}), ((block, to, number, other), {"num_warps": 8}),
        ((block, to, number, other), {"num_stages": 8}),
    )  # fmt: skip
    for given, options in kinds * 2:
        launch(launcher, kernel, *given, **options)
    assert len(kernel.compiled) == len(kinds)
    ((first, *_), options) = kernel.compiled[0]
    assert isinstance(first, TensorDescriptor)
    assert options == {"grid": (1,), "S": "S", "enable_fp_fusion": True}
    assert kernel.compiled[6][1]["num_warps"] == 8
    assert not kernel.by_triton


@pytest.mark.parametrize("ptx", ["griddepcontrol.wait;", "ret;"])
def test_a_kernel_that_waits_for_the_launch_before_may_start_beside_it(kernel: Kernel, ptx: str) -> None:
    kernel.ptx = ptx
    launch(RowLauncher(), kernel, *tensors())
    assert kernel.library.attributes == [1 if "wait" in ptx else 0]


def test_no_tensor_is_kept(kernel: Kernel) -> None:
    launcher, given = RowLauncher(), list(tensors())
    kept = [
        weakref.ref(each.tensor if isinstance(each, Block) else each) for each in given if not isinstance(each, int)
    ]
    launch(launcher, kernel, *given)
    kernel.compiled.clear()
    del given
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_triton_launches_for_hooks_and_interpreter_and_tensors_without_memory(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, given = RowLauncher(), tensors()
    launch(launcher, kernel, *given)
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
        launch(launcher, kernel, *given)
    with monkeypatch.context() as patch:
        patch.setattr(module, "is_interpreted", lambda: True)
        launch(launcher, kernel, *given)
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        launch(launcher, kernel, *given)
    launch(launcher, kernel, *given[:2], 1 << 31, given[3])
    with FakeTensorMode() as fakes:
        launch(launcher, kernel, *given[:3], fakes.from_tensor(given[3]))
    assert len(kernel.library.launches) == 1
    assert [grid for grid, _, _ in kernel.by_triton] == [(3,)] * 5
    _, arguments, options = kernel.by_triton[0]
    assert (type(arguments[0]), *arguments[1:]) == (TensorDescriptor, *given[1:])
    assert options == {"S": "S", "enable_fp_fusion": True}


def test_other_parameters_are_left_to_triton(kernel: Kernel) -> None:
    kernel.library.sizes[3] = 4
    launcher = RowLauncher()
    with pytest.warns(UserWarning, match="parameters of kernel: expected the sizes"):
        launch(launcher, kernel, *tensors())
    launch(launcher, kernel, *tensors())
    assert len(kernel.by_triton) == 2
    assert len(kernel.compiled) == 1
    assert not kernel.library.launches


@pytest.mark.parametrize("change", [
    {"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 8},
], ids=str)  # fmt: skip
def test_kernels_of_another_kind_are_left_to_triton(kernel: Kernel, change: dict[str, Any]) -> None:
    vars(kernel.metadata).update(change)
    launch(RowLauncher(), kernel, *tensors())
    assert len(kernel.by_triton) == 1


@pytest.mark.quick("milliseconds, and each field decides alone")
@pytest.mark.parametrize("found", [
    None, [{**MAP, "mode": "tiled"}], [{**MAP, "fp4_padded": True}], [{**MAP, "is_im2col": True}],
], ids=str)  # fmt: skip
def test_other_descriptors_are_left_to_triton(kernel: Kernel, found: Any) -> None:
    kernel.metadata.tensordesc_meta = found
    with pytest.warns(UserWarning, match="tensor descriptors: expected the fields"):
        launch(RowLauncher(), kernel, *tensors())
    assert len(kernel.by_triton) == 1


def test_descriptors_of_later_releases_are_known(kernel: Kernel) -> None:
    kernel.metadata.tensordesc_meta = [{**MAP, "is_im2col": False}]  # from Triton 3.8 on
    launch(RowLauncher(), kernel, *tensors())
    assert len(kernel.library.launches) == 1


def test_a_number_that_is_specialised_is_refused(kernel: Kernel) -> None:
    """The kernel of a number that is 16 may be wrong for 17."""
    kernel.params[2].do_not_specialize = False
    with pytest.raises(AssertionError, match="kernel: name number in do_not_specialize"):
        launch(RowLauncher(), kernel, *tensors())


def test_the_drivers_error_is_raised_and_the_next_launch_is_complete(kernel: Kernel) -> None:
    launcher, given = RowLauncher(), tensors()
    kernel.library.status = 719
    with pytest.raises(RuntimeError, match="launch: expected the CUDA driver to succeed, got error 719: out of pat"):
        launch(launcher, kernel, *given)
    kernel.library.status = 0
    launch(launcher, kernel, *given)
    assert kernel.library.launches[0] == kernel.library.launches[1]


def test_a_map_that_failed_is_encoded_again(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, given, other = RowLauncher(), tensors(), tensors()
    launch(launcher, kernel, *given)
    (prepared,) = launcher._prepared.values()
    ((_, made),) = prepared._maps  # type: ignore[union-attr]
    monkeypatch.setattr(made._driver, "encode_map", lambda *_: 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled"):
            launch(launcher, kernel, *other)


def test_a_launch_goes_to_the_device_of_its_tensors(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its current stream, by a kernel that was loaded there."""
    launcher, given, current = RowLauncher(), tensors(), [0]

    @contextmanager
    def device(index: int) -> Any:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    active = SimpleNamespace(get_current_stream=lambda index: (10 + index) * (index == current[0]))
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    for index in (0, 1, 0, 1):
        launcher.launch(kernel, given, "S", 1, device=torch.device("cuda", index), fused=False, options={})
    assert [each[3] for each in kernel.library.launches] == [10, 11, 10, 11]
    assert len(kernel.compiled) == 2
