"""The demonstration as a library: its layer against nested loops, its bounds, its judgement, and whole runs."""

import dataclasses
import math

import pytest
import torch

import moelink
from moelink.tools.demo import FORMATS, DemoConfig, DemoReport, LayerConfig, bundled_text, run_demo
from moelink.tools.demo.layer import Routing, allowed_rounding, embed, make_expert, route, unsharded_layer
from moelink.tools.demo.ranks import RankOutput
from moelink.tools.demo.run import Truth, judge

LAYER = LayerConfig(num_experts=7, topk=3, hidden_size=128, intermediate_size=24, seed=5)
TEXT = bundled_text()[2000:2040]


def test_the_layer_equals_nested_loops() -> None:
    x = embed(TEXT[:9], LAYER)
    routing = route(x, LAYER)
    result = unsharded_layer(x, routing, LAYER)
    for token in range(9):
        out = torch.zeros(LAYER.hidden_size, dtype=torch.float64)
        magnitude = torch.zeros_like(out)
        for slot in range(LAYER.topk):
            expert = make_expert(int(routing.topk_ids[token, slot]), LAYER)
            row = x[token].double()
            gate, up = row @ expert.gate, row @ expert.up
            y = (gate / (1 + torch.exp(-gate)) * up) @ expert.down
            out += routing.topk_weights[token, slot] * y
            magnitude += routing.topk_weights[token, slot] * y.abs()
        torch.testing.assert_close(result.out[token], out, rtol=0, atol=1e-12)
        torch.testing.assert_close(result.magnitude[token], magnitude, rtol=0, atol=1e-12)


def test_routing_is_normalised_and_distinct() -> None:
    routing = route(embed(TEXT, LAYER), LAYER)
    torch.testing.assert_close(routing.topk_weights.sum(-1), torch.ones(len(TEXT), dtype=torch.float64))
    assert all(len(set(row)) == LAYER.topk for row in routing.topk_ids.tolist())


def test_equal_bytes_after_different_bytes_differ() -> None:
    x = embed(b"abcb", LAYER)
    assert not torch.equal(x[1], x[3])
    assert torch.equal(embed(b"xab", LAYER)[2], x[1])
    assert embed(b"", LAYER).shape == (0, LAYER.hidden_size)


def test_a_rank_embeds_its_share_like_everybody_else() -> None:
    config = DemoConfig(ranks=3, tokens_per_rank=16, layer=LAYER)
    parts = [embed(TEXT, LAYER)[config.share(rank, len(TEXT))] for rank in range(3)]
    assert [len(part) for part in parts] == [16, 16, 8]
    assert torch.equal(torch.cat(parts), embed(TEXT, LAYER))


def parts_of(truth: Truth, name: str) -> tuple[torch.Tensor, list[RankOutput]]:
    """What the ranks would deliver if nothing were rounded on the way home."""
    fmt = moelink.get_format(name)
    config = truth.config.ep_config(name)
    rows = fmt.quantize(truth.x.to(config.combine_dtype))
    routing = Routing(truth.routing.topk_ids, truth.routing.topk_weights.to(config.weight_dtype))
    out = unsharded_layer(fmt.dequantize(rows.payload, rows.scales), routing, LAYER).out
    return out, [RankOutput(out.numpy(), 100, 50, "collective")]


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("name", FORMATS)
def test_the_judgement_accepts_one_rounding_and_refuses_more_than_three(name: str) -> None:
    truth = Truth.compute(DemoConfig(ranks=2, tokens_per_rank=20, formats=(name,), layer=LAYER), TEXT)
    out, parts = parts_of(truth, name)
    assert judge(name, out, parts, truth).rounding_error == 0
    config = truth.config.ep_config(name)
    rounded = judge(name, out.to(config.combine_dtype).double(), parts, truth)
    assert rounded.passed
    # One element, off by four roundings of its own sum.
    spoiled = out.clone()
    exact = unsharded_layer(truth.x, truth.routing, LAYER)
    allowed = allowed_rounding(
        exact, topk=3, ranks=2, combine_dtype=config.combine_dtype, accumulate_dtype=config.accumulate_dtype
    )
    spoiled[7, 11] += 1.5 * allowed[7].max()
    assert not judge(name, spoiled, parts, truth).passed


def test_the_judgement_refuses_nan_and_wrong_rows() -> None:
    truth = Truth.compute(DemoConfig(ranks=2, tokens_per_rank=20, formats=("bf16",), layer=LAYER), TEXT)
    out, parts = parts_of(truth, "bf16")
    spoiled = out.clone()
    spoiled[0, 0] = math.nan
    assert not judge("bf16", spoiled, parts, truth).passed
    assert not judge("bf16", out.roll(1, 0), parts, truth).passed
    assert not judge("bf16", torch.zeros_like(out), parts, truth).passed


def test_the_bound_on_roundings_is_tight_to_a_small_factor() -> None:
    """Rounding once moves some element by more than a quarter of a third of the bound: it is no blank cheque."""
    truth = Truth.compute(DemoConfig(ranks=2, tokens_per_rank=20, formats=("bf16",), layer=LAYER), TEXT)
    out, parts = parts_of(truth, "bf16")
    assert judge("bf16", out.bfloat16().double(), parts, truth).rounding_error > 1 / 12


def test_copies_are_counted_by_hand() -> None:
    truth = Truth.compute(DemoConfig(ranks=2, tokens_per_rank=20, formats=("bf16",), layer=LAYER), TEXT)
    copies = messages = 0
    for token, ids in enumerate(truth.routing.topk_ids.tolist()):
        owners = [0 if expert < 4 else 1 for expert in ids]  # 7 experts: the first rank owns 4
        away = [owner for owner in owners if owner != token // 20]
        copies += len(away)
        messages += len(set(away))
    assert (truth.remote_copies, truth.remote_messages) == (copies, messages)
    assert sum(map(sum, truth.tokens_by_rank_and_expert)) == len(TEXT) * LAYER.topk


def check_bytes(report: DemoReport) -> None:
    hidden = report.config.layer.hidden_size
    for result in report.formats:
        itemsize = getattr(torch, result.combine_dtype).itemsize
        assert result.copies_dispatch_bytes == report.remote_copies * result.bytes_per_token
        assert result.copies_combine_bytes == report.remote_copies * hidden * itemsize
        # One message per (token, remote rank): the row, and at most 16 bytes of padding for each of its five parts.
        assert result.dispatch_bytes >= report.remote_messages * result.bytes_per_token
        overhead = 4 + (4 + 8) * report.config.layer.topk + 5 * 16
        assert result.dispatch_bytes <= report.remote_messages * (result.bytes_per_token + overhead)
        assert result.combine_bytes >= report.remote_messages * hidden * itemsize
        assert result.combine_bytes <= report.remote_messages * (hidden * itemsize + 32)


def test_every_format_equals_the_unsharded_layer() -> None:
    """Experts that do not divide by the ranks, a rank with fewer tokens, a rank with none."""
    steps: list[str] = []
    config = DemoConfig(ranks=4, tokens_per_rank=15, layer=LAYER)
    report = run_demo(config, TEXT, steps.append)
    assert report.num_tokens == 40
    assert [sum(row) // LAYER.topk for row in report.tokens_by_rank_and_expert] == [15, 15, 10, 0]
    assert [result.format for result in report.formats] == list(FORMATS)
    for result in report.formats:
        assert result.rounding_error <= 1, result
        assert result.tolerance_error <= 1, result
    assert report.passed
    assert report.expert_owners == (0, 0, 1, 1, 2, 2, 3)
    check_bytes(report)
    assert any("starting 4 ranks" in step for step in steps)


def test_one_rank_sends_nothing() -> None:
    config = DemoConfig(ranks=1, tokens_per_rank=40, formats=("fp8_block128",), layer=LAYER)
    report = run_demo(config, TEXT)
    assert report.passed
    (result,) = report.formats
    assert (result.dispatch_bytes, result.combine_bytes, report.remote_copies) == (0, 0, 0)
    assert result.wire_ratio == 1


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 0},
        {"tokens_per_rank": 0},
        {"formats": ("no_such_format",)},
        {"formats": ("fp8_block128",), "layer": dataclasses.replace(LAYER, hidden_size=96)},
        {"device": "abacus"},
        {"transport": "pigeon"},
    ],
)
def test_bad_settings_are_refused_before_anything_starts(changes: dict[str, object]) -> None:
    with pytest.raises(moelink.ConfigError):
        DemoConfig(**changes)


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(moelink.ConfigError, match="text"):
        run_demo(DemoConfig(layer=LAYER), b"")


def test_the_bundled_text_is_what_its_notice_says() -> None:
    from hashlib import sha256
    from importlib.resources import files

    notice = files("moelink.tools.demo").joinpath("data", "NOTICE").read_text()
    assert "public domain" in notice
    assert sha256(bundled_text()).hexdigest() in notice
    assert f"{len(bundled_text())} bytes" in notice
    assert bundled_text().isascii()


def test_a_launcher_must_have_started_the_ranks_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    config = DemoConfig(ranks=2, layer=LAYER)
    assert config.ranks_here == 2
    with pytest.raises(moelink.ConfigError, match="ranks: expected the launcher's WORLD_SIZE 3, got 2"):
        run_demo(config, TEXT)
