"""Processes of vLLM on CPUs: ranks of ``LLM.generate``, and a server. All end with the block that started them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from moelink.env import VLLM
from moelink.errors import MoelinkError
from moelink_bench.serve_worker import Answer, Task

HOST, NAME = "127.0.0.1", "tiny"
SERVER = ("-m", "vllm.entrypoints.openai.api_server")
"""The module that ``vllm serve`` runs. The command itself fails with vllm-cpu: it needs a distribution named vllm."""
WORKER = ("-m", "moelink_bench.serve_worker")
ALONE = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of this machine without a proxy."""
GRACE = 20.0
"""Seconds in which a process may end by itself."""


class EngineError(MoelinkError):
    """A process of vLLM ended, or did not answer in time; the message has the end of its log."""


def environment(ranks: int) -> dict[str, str]:
    """Return the variables of a process of vLLM: CPUs without pinned threads, one machine, moelink with two ranks."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"  # of the wheel intel-openmp
    loaded = {"LD_PRELOAD": str(library)} if library.exists() else {}
    return {
        **os.environ, **loaded, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": HOST,
        "GLOO_SOCKET_IFNAME": "lo", VLLM.name: "1" if ranks > 1 else "0",
    }  # fmt: skip


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def started(
    command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None, grace: float = GRACE
) -> Iterator[subprocess.Popen[bytes]]:
    """Start Python with ``command`` in a session of its own, and end all that is in it with this block.

    Args:
        command: arguments of Python.
        log: gets the output of the session.
        variables: the environment; None for that of this process.
        grace: seconds in which the process may end by itself.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command], env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            with suppress(subprocess.TimeoutExpired):
                process.terminate()
                process.wait(grace)
            with suppress(ProcessLookupError):  # it was the last of its session
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def failed(what: str, log: Path) -> EngineError:
    """Return an error that says ``what``, with the end of ``log``."""
    return EngineError(f"engine: {what}; the end of its log:\n" + "\n".join(log.read_text().splitlines()[-30:]))


def generate(tasks: Sequence[Task], folder: Path, seconds: float) -> list[Answer]:
    """Run ``LLM.generate`` on a rank for each task.

    Args:
        tasks: by data-parallel rank; one alone is a process without data parallelism.
        folder: for their files.
        seconds: that all may take.

    Raises:
        EngineError: a rank ended without an answer, or took too long.
    """
    port, until = free_port(), time.monotonic() + seconds
    names = [f"generate_{rank}_of_{len(tasks)}" for rank in range(len(tasks))]
    with ExitStack() as stack:
        processes = []
        for rank, (name, task) in enumerate(zip(names, tasks, strict=True)):
            place = {"SIZE": len(tasks), "RANK": rank, "RANK_LOCAL": rank, "MASTER_IP": HOST, "MASTER_PORT": port}
            own = {f"VLLM_DP_{key}": str(value) for key, value in place.items()} if len(tasks) > 1 else {}
            given, made = folder / f"{name}_task.json", folder / f"{name}.json"
            given.write_text(json.dumps(dataclasses.asdict(task)))
            command = (*WORKER, str(given), str(made))
            variables = {**environment(len(tasks)), **own}
            processes.append(stack.enter_context(started(command, folder / f"{name}.log", variables)))
        while None in (statuses := [process.poll() for process in processes]) or any(statuses):
            for name, status in zip(names, statuses, strict=True):
                if status:
                    raise failed(f"expected an answer of {name}, got exit status {status}", folder / f"{name}.log")
                if status is None and time.monotonic() > until:
                    raise failed(f"expected {name} to end within {seconds:.0f} s", folder / f"{name}.log")
            time.sleep(0.2)
    return [Answer(**json.loads((folder / f"{name}.json").read_text())) for name in names]


@contextmanager
def serving(model: Path, options: Sequence[str], ranks: int, log: Path, seconds: float) -> Iterator[str]:
    """Serve a model as :data:`NAME`; return the server's address once it answers.

    Args:
        model: folder of the checkpoint.
        options: of ``vllm serve``.
        ranks: data-parallel ones.
        log: of all processes of the server.
        seconds: until it answers.

    Raises:
        EngineError: it ended, or took longer.
    """
    port, until = free_port(), time.monotonic() + seconds
    spread = ("--data-parallel-size", str(ranks), "--enable-expert-parallel") if ranks > 1 else ()
    command = (*SERVER, "--model", str(model), "--served-model-name", NAME, "--host", HOST, "--port", str(port))
    with started((*command, *spread, *options), log, environment(ranks)) as process:
        address = f"http://{HOST}:{port}"
        while not _answers(f"{address}/health"):
            if time.monotonic() > until:
                raise failed(f"expected a server within {seconds:.0f} s, got none", log)
            with suppress(subprocess.TimeoutExpired):
                raise failed(f"expected a server, got exit status {process.wait(1.0)}", log)
        yield address


def _answers(address: str) -> bool:
    try:
        with ALONE.open(address, timeout=5) as found:
            return bool(found.status == 200)
    except OSError:
        return False


def chat(address: str, texts: Sequence[str], new_tokens: int, seconds: float) -> list[list[int]]:
    """Send a chat request for each text, all at once. Return the tokens of the answers.

    Raises:
        EngineError: an answer did not come, or was none.
    """

    def ask(text: str) -> list[int]:
        body = {
            "model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": new_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with ALONE.open(request, timeout=seconds) as found:
                answer: dict[str, Any] = json.load(found)
        except urllib.error.HTTPError as error:
            raise EngineError(f"chat: expected an answer, got {error}: {error.read()[:500]!r}") from error
        except OSError as error:
            raise EngineError(f"chat: expected an answer within {seconds:.0f} s, got {error}") from error
        return list(answer["choices"][0]["token_ids"])

    with ThreadPoolExecutor(len(texts)) as users:
        return list(users.map(ask, texts))
