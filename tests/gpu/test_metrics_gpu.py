"""Scrapes beside calls on a GPU: replays of a graph count, and a scrape ends no capture. Run by hand: ``-m gpu``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from prometheus_client import CollectorRegistry

import moelink
from moelink.metrics import Collector
from tests.gpu.gpu_compile import warmup_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA devices"),
]
SHAPE = {"num_experts": 32, "topk": 8, "hidden_size": 7168, "max_tokens_per_rank": 4}


@pytest.mark.kernels(of=lambda: warmup_kernels(SHAPE, 1))
def test_replays_count_and_scrapes_end_no_capture():
    registry = CollectorRegistry()
    device = torch.cuda.device_count() - 1
    with (
        moelink.init(**SHAPE, device=f"cuda:{device}", transport="symmetric") as ep,
        ThreadPoolExecutor(max_workers=1) as scraper,
        torch.cuda.device(device),
    ):
        registry.register(Collector(ep))

        def scraped(name, **labels):
            labels = {"communicator": "0", "rank": "0", "lane": "0", **labels}
            return scraper.submit(registry.get_sample_value, f"moelink_{name}", labels).result()

        x = torch.randn(4, 7168, device=ep.device).bfloat16()
        ids = torch.stack([torch.randperm(32)[:8] for _ in range(4)]).to(ep.device)
        ep.warmup()
        recv = ep.dispatch(x, ids)
        ep.combine(recv.tokens, recv)
        ep.check()
        assert scraped("calls_total", phase="combine") == 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recv = ep.dispatch(x, ids)
            assert scraped("dispatch_rows") == 32
            out = ep.combine(recv.tokens, recv)
        ids[3:] = -1
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert scraped("calls_total", phase="combine") == 4
        assert (scraped("dispatch_tokens"), scraped("dispatch_rows")) == (4, 24)
        assert not out[3:].any()
        assert scraped("awaited", phase="dispatch", peer="0") == 0
        torch.cuda._sleep(1_000_000_000)  # about half a second, for which no scrape waits
        assert scraped("calls_total", phase="combine") == 4
        assert not torch.cuda.current_stream().query()
        ep.check()
