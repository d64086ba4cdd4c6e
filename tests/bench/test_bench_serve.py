"""The benchmark that serves a tiny model with vLLM, without vLLM: programs of a few lines stand for its processes."""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from moelink.integrations import versions
from moelink_bench import serve
from moelink_bench import serve_processes as processes
from moelink_bench.serve import OFFLINE, SAID, SERVER, Run, as_options, faults_of
from moelink_bench.serve_model import make_tokenizer, save_model
from moelink_bench.serve_processes import EngineError
from moelink_bench.serve_worker import Answer, Task

pytestmark = pytest.mark.quick("seconds, and the engines themselves run in make serve-vllm")

# Both answer a prompt with the ids of its bytes, doubled; the server finds the prompt as the chat template makes it.
RANK = """
import json, os, sys, time
task = json.load(open(sys.argv[1]))
if os.environ["MOELINK_VLLM"] == "1":
    print("INFO experts communicate over moelink", flush=True)
tokens = [[2 * token for token in prompt[: task["new_tokens"]]] for prompt in task["prompts"]]
now = [time.time() + i for i in range(task["rounds"])]
json.dump({"tokens": tokens, "begun": now, "ended": [each + 0.5 for each in now], "smallest_gap": 0.25,
           "same": True}, open(sys.argv[2], "w"))
"""
ADDRESS = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from moelink_bench.serve_model import make_tokenizer
tokenizer = make_tokenizer()
if os.environ["MOELINK_VLLM"] == "1":
    print("INFO experts communicate over moelink", flush=True)
class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        tokens = [2 * token for token in prompt[: body["max_tokens"]]]
        wrong = os.environ.get("WRONG") == "1" and os.environ["MOELINK_VLLM"] == "1"
        self.answer({"choices": [{"token_ids": tokens[::-1] if wrong else tokens}]})
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_the_model_is_the_same_each_time_and_talks_in_bytes(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    assert save_model(tmp_path / "a") == save_model(tmp_path / "b")
    assert torch.equal(torch.random.get_rng_state(), before)
    first, second = (tmp_path / name / "model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"], config["vocab_size"]) == (
        ["Qwen3MoeForCausalLM"], 2, 259
    )  # fmt: skip
    tokenizer = make_tokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a\u20ac"}], return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\na\u20ac<|im_end|>\n"
    assert len(ids) == len("user\n") + 1 + 3 + 2 + 1


def run_of(folder: Path, engine: str, ranks: int, said: str, tokens: list[list[int]]) -> Run:
    log = folder / f"{engine}{ranks}.log"
    log.write_text(said)
    return Run(engine, ranks, tokens, [2.0, 1.0, 4.0], [log])


def test_faults_are_other_tokens_and_experts_that_went_another_way(tmp_path: Path) -> None:
    tokens = [[1, 2], [3, 4]]
    one = run_of(tmp_path, OFFLINE, 1, "nothing", tokens)
    two = run_of(tmp_path, SERVER, 2, f"INFO {SAID}, Settings()", tokens)
    assert faults_of([one, two]) == []
    assert two.row() == {
        "engine": "server", "ranks": 2, "dispatch": "moelink", "new_tokens": 4, "seconds": [2.0, 1.0, 4.0],
        "tokens_per_second": 2.0,
    }  # fmt: skip
    two.tokens = [[1, 2], [3, 5]]
    assert faults_of([one, two]) == [
        "server, 2 ranks: expected the tokens of LLM.generate, 1 rank, got others for requests [1]"
    ]
    two.tokens, two.faults = tokens, ["rounds differ"] * 2
    assert faults_of([one, two]) == ["server, 2 ranks: rounds differ"]
    for run in (one, run_of(tmp_path, SERVER, 2, "nothing", tokens)):
        run.logs[0].write_text(f"INFO {SAID}" if run.ranks == 1 else "nothing")
        assert f"expected {SAID!r} in the logs of 2 ranks alone" in faults_of([run])[0]


def test_arguments_as_options_of_a_server() -> None:
    assert as_options({"seed": 0, "enforce_eager": True, "enable_lora": False}) == [
        "--seed", "0", "--enforce-eager", "--no-enable-lora"
    ]  # fmt: skip


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_all_processes_of_a_session_end_with_the_block(tmp_path: Path) -> None:
    """One that ignores its parent's end as well, as workers of an engine may."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    parent = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {child!r}])"
    log = tmp_path / "log"
    with processes.started(("-c", f"{parent}; print(child.pid, flush=True); child.wait()"), log, os.environ) as process:
        until = time.monotonic() + 60
        while not log.read_text().endswith("\n") and time.monotonic() < until:
            time.sleep(0.05)
        below = int(log.read_text())
        assert lives(below)
    until = time.monotonic() + 60
    while lives(below) and time.monotonic() < until:
        time.sleep(0.05)
    assert not lives(below)
    assert process.returncode is not None


def test_ranks_know_their_places_and_the_fault_of_one_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = """
import json, os, sys
names = ("SIZE", "RANK", "RANK_LOCAL")
place = [int(os.environ.get("VLLM_DP_" + name, -1)) for name in names] + [int(os.environ["MOELINK_VLLM"])]
answer = {"tokens": [place], "begun": [0.0], "ended": [1.0], "smallest_gap": 1.0, "same": True}
json.dump(answer, open(sys.argv[2], "w"))
"""
    monkeypatch.setattr(processes, "WORKER", ("-c", places))
    task = Task({}, [[1]], 4, 1)
    assert [each.tokens for each in processes.generate([task], tmp_path, 60)] == [[[-1, -1, -1, 0]]]
    both = processes.generate([task, task], tmp_path, 60)
    assert both[0] == Answer([[2, 0, 0, 1]], [0.0], [1.0], 1.0, True)
    assert both[1].tokens == [[2, 1, 1, 1]]

    broken = "import os, time; time.sleep(600) if os.environ['VLLM_DP_RANK'] == '0' else 1 / 0"
    monkeypatch.setattr(processes, "WORKER", ("-c", broken))
    with pytest.raises(EngineError, match=r"generate_1_of_2, got exit status 1; (.*\n)+ZeroDivisionError"):
        processes.generate([task, task], tmp_path, 60)
    monkeypatch.setattr(processes, "WORKER", ("-c", "import time; time.sleep(600)"))
    with pytest.raises(EngineError, match="expected generate_0_of_1 to end within 1 s"):
        processes.generate([task], tmp_path, 1)


def test_a_server_that_does_not_come_up_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def come_up(seconds: float) -> AbstractContextManager[str]:
        return processes.serving(tmp_path, [], 1, tmp_path / "log", seconds)

    monkeypatch.setattr(processes, "SERVER", ("-c", "raise SystemExit('no room')"))
    with (
        pytest.raises(EngineError, match=r"expected a server, got exit status 1; the end of its log:\nno room"),
        come_up(60),
    ):
        pass
    monkeypatch.setattr(processes, "SERVER", ("-c", "import time; time.sleep(600)"))
    with pytest.raises(EngineError, match="expected a server within 1 s, got none"), come_up(1):
        pass
    with pytest.raises(EngineError, match="chat: expected an answer within 5 s"):
        processes.chat(f"http://127.0.0.1:{processes.free_port()}", ["a"], 1, 5)


@pytest.mark.parametrize("wrong", ["0", "1"])
def test_the_whole_script(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "version", lambda package: "0.32.0")
    monkeypatch.setattr(processes, "WORKER", ("-c", RANK))
    monkeypatch.setattr(processes, "SERVER", ("-c", ADDRESS))
    monkeypatch.setenv("WRONG", wrong)
    out = tmp_path / "serve.json"
    words = ["--requests", "3", "--new-tokens", "5", "--rounds", "2", "--out", str(out), "--commit", "abc"]
    assert serve.main(words) == int(wrong)
    document: dict[str, Any] = json.loads(out.read_text())
    assert (document["benchmark"], document["ranks"], document["case"]["new_tokens"]) == ("serve", 2, 5)
    assert document["framework"] == {"package": "vllm", "release": "0.32.0"}
    assert document["gate"]["passed"] == (wrong == "0")
    if wrong == "1":
        assert document["gate"]["fault"] == (
            "server, 2 ranks: expected the tokens of LLM.generate, 1 rank, got others for requests [0, 1, 2]"
        )
        assert "rows" not in document
        return
    assert [(row["engine"], row["ranks"], row["dispatch"]) for row in document["rows"]] == [
        (OFFLINE, 1, None), (OFFLINE, 2, "moelink"), (SERVER, 1, None), (SERVER, 2, "moelink")
    ]  # fmt: skip
    assert all(row["new_tokens"] == 15 and len(row["seconds"]) == 2 for row in document["rows"])
    assert document["rows"][0]["tokens_per_second"] == 30.0
    assert document["gate"]["smallest_gap"] == 0.25
    assert "all tokens equal" in capsys.readouterr().out


def test_a_number_of_requests_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--requests", "9"]) == 2
    assert "requests: expected 1 to 8, got 9" in capsys.readouterr().err
