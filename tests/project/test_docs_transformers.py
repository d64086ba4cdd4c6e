"""The example of docs/transformers.md, on one rank and under torchrun. The page itself: test_docs.py."""

from __future__ import annotations

import os
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import ROOT

if find_spec("transformers") is None:
    pytest.skip("the extra 'transformers' is not installed", allow_module_level=True)

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.integrations.transformers.transformers_models import VOCABULARY, build
from tests.support.commands import run_python

EXAMPLE = ROOT / "examples" / "transformers_generate.py"


def run_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def run_with_torchrun(ranks: int) -> list[str]:
    done = run_python(EXAMPLE, ranks=ranks, environment=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.full("integrations/transformers has the same model on ranks")
def test_the_example_says_the_same_on_one_rank_and_on_two(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = run_here(capsys, monkeypatch), run_with_torchrun(2)
    assert one[0] == "1 ranks, 8 of 8 experts on this one"
    assert two[0] == "2 ranks, 4 of 8 experts on this one"
    assert one[1:] == two[1:]
    assert one[1].startswith("Alice was beginning to get very tired -> b")


def test_the_example_with_a_checkpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    said = run_here(capsys, monkeypatch, "--model", str(tmp_path), "--prompt", "w5 w9 w2", "--new-tokens", "3")
    assert re.fullmatch(r"read \d+ tensors, left 0 to other ranks", said[1])
    assert re.fullmatch(r"w5 w9 w2 -> w\d+ w\d+ w\d+", said[2])
