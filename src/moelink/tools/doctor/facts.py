"""The facts of a rank. Nothing here talks to another rank, and nothing takes more than a few seconds."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from moelink.tools.common import nccl_version, versions

_QUERY = ("index", "driver_version", "clocks.max.sm", "clocks.sm", "clocks_event_reasons.hw_slowdown")
_SECONDS = 5.0


def facts_of(device: torch.device) -> dict[str, Any]:
    """Return the facts of this process, for JSON.

    ``versions``: of moelink, Python and the packages that must agree. ``host``, ``time``: name of the machine, and its
    clock in seconds since 1970. ``device``: name, free and all bytes of memory, and for CUDA facts of the driver: its
    version, clocks in MHz, whether the hardware slows down, and the numbers of the devices that share NVLink with it.
    ``nvshmem``: whether torch loads it. ``network``: RDMA adapters of the machine. ``variables``: the MOELINK_* and
    NCCL_* variables that are set.
    """
    return {
        "versions": {**versions(), "cuda": torch.version.cuda, "nccl": nccl_version()},
        "host": socket.gethostname(),
        "time": time.time(),
        "device": _device(device),
        "nvshmem": _has_nvshmem(),
        "network": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(("MOELINK_", "NCCL_"))
        },
    }


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"kind": "cpu", "name": platform.machine(), **_host_memory(), "driver": {}}
    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    driver = _driver(str(getattr(properties, "uuid", "")))
    linked = nvlinked(nvidia_smi("topo", "-m"), int(driver["index"])) if driver else []
    return {
        "kind": "cuda", "name": properties.name, "free": free, "total": total, "driver": driver, "nvlinked": linked,
    }  # fmt: skip


def _host_memory() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return {"free": sizes.get("MemAvailable", 0), "total": sizes.get("MemTotal", 0)}


def _driver(uuid: str) -> dict[str, str]:
    """Return the facts of ``nvidia-smi`` on the device; empty if it is not installed or does not answer."""
    if not uuid:
        return {}
    words = nvidia_smi("-i", f"GPU-{uuid.removeprefix('GPU-')}", f"--query-gpu={','.join(_QUERY)}",
                       "--format=csv,noheader,nounits")  # fmt: skip
    values = [word.strip() for word in words.split(",")]
    return dict(zip(_QUERY, values, strict=True)) if len(values) == len(_QUERY) else {}


def nvidia_smi(*arguments: str) -> str:
    """Return the output of ``nvidia-smi``, or "" if it is not installed, fails, or takes too long."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def nvlinked(topology: str, device: int) -> list[int]:
    """Return the devices that share NVLink with ``device``, by ``topology``, the output of ``nvidia-smi topo -m``.

    >>> nvlinked("\\tGPU0\\tGPU1\\tGPU2\\nGPU0\\t X \\tNV18\\tSYS\\nGPU1\\tNV18\\t X \\tSYS\\n", 0)
    [1]
    """
    rows = {cells[0]: cells[1:] for cells in (line.split() for line in topology.splitlines()) if cells}
    return [other for other, cell in enumerate(rows.get(f"GPU{device}", [])) if cell.startswith("NV")]


def _has_nvshmem() -> bool:
    if not torch.cuda.is_available():
        return False
    from moelink.memory.torch_symm import symmetric_memory_module

    return bool(symmetric_memory_module().is_nvshmem_available())
