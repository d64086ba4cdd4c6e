"""One of two ranks on either end of a slow link. It says on standard output, in JSON, what it met, and obeys the test.

``python slow_link_rank.py RANK``, with torchrun's variables set. After each line it prints it waits for one on standard
input, so that the test can change the link in between.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

import moelink
from moelink.testing import assert_bitwise_equal, rank_data
from tests.support.patience import be_patient, hurry

TIMEOUT = 60.0
"""Seconds, of which a busy machine does not need so many for what takes milliseconds."""
HURRIED = 2.0
"""Seconds of a call that needs more than six, whatever else the machine does."""
FIELDS = {"num_experts": 4, "topk": 2, "hidden_size": 2048, "max_tokens_per_rank": 128, "timeout": TIMEOUT}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)
    sys.stdin.readline()


def call(ep: moelink.Communicator, rank: int, tokens: int) -> None:
    d = rank_data(seed=1, rank=rank, num_tokens=tokens, hidden_size=2048, num_experts=4, topk=2)
    recv = ep.dispatch(d.x, d.topk_ids)
    assert_bitwise_equal(ep.combine(recv.tokens, recv), (d.x.float() * 2 + 0.0).bfloat16(), f"{tokens} tokens")


def main(rank: int) -> None:
    torch.set_num_threads(1)
    be_patient()
    ep = moelink.init(**FIELDS, transport="collective")
    call(ep, rank, 128)
    say(state="ready")
    start = time.monotonic()
    call(ep, rank, 4)  # 35 KB and headers: slower, and exact
    say(state="slow", took=time.monotonic() - start)
    hurry(ep, HURRIED)
    try:
        start = time.monotonic()
        call(ep, rank, 128)
        say(state="no error")
    except moelink.PeerTimeoutError as error:
        took = time.monotonic() - start
        say(state="late", took=took, peer=error.peer, phase=error.phase, call=error.call, text=str(error))
    new = ep.recover([0, 1])
    call(new, rank, 128)
    new.close()
    say(state="recovered")
    os._exit(0)  # the default group of before is of no interest


if __name__ == "__main__":
    main(int(sys.argv[1]))
