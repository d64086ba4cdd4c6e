"""What callers do now and then: hooks that raise, results asked for too late or twice, modes that come and go."""

import dataclasses
import re

import pytest
import torch

import moelink
from moelink import epilogues
from moelink.control.group import plain_device
from moelink.output import OutputShape
from moelink.testing import assert_bitwise_equal, rank_data, run_ranks
from tests.support.patience import join, meet

SIZES = {"num_experts": 6, "topk": 2, "hidden_size": 32, "max_tokens_per_rank": 4}
TRANSPORTS = ["collective", "symmetric"]


def data(rank, hidden_size=32):
    return rank_data(seed=5, rank=rank, num_tokens=3, hidden_size=hidden_size, num_experts=6, topk=2)


def raising(*_):
    raise ZeroDivisionError("a user's mistake")


def broken_hooks(rank, world_size, transport):
    """Rank 1's hooks raise or return what does not fit; its peers hear of each, and the next call works."""
    found = []
    fields = {**SIZES, "hidden_size": 64, "dispatch_format": "nvfp4"}
    with moelink.init(**fields, transport=transport, timeout=60) as ep:
        d = data(rank, 64)
        broken = [
            {"input_scale": moelink.Hook(None, raising)},
            {"input_scale": moelink.Hook(None, lambda _: torch.ones(2))},
            {"topk_weights": moelink.Hook(None, raising)},
            {"topk_weights": moelink.Hook(None, lambda tensors, token, slot: torch.ones(3, 3))},
        ]
        fitting = {
            "input_scale": moelink.Hook(None, lambda _: torch.ones(1)),
            "topk_weights": moelink.Hook(None, lambda tensors, token, slot: torch.ones(3, 2)),
        }
        for arguments in broken:
            given = arguments if rank == 1 else {name: fitting[name] for name in arguments}
            try:
                ep.dispatch(d.x, d.topk_ids, **given)
                ep.check()
                found.append("nothing")
            except (ZeroDivisionError, moelink.MoelinkError) as error:
                found.append(f"{type(error).__name__}: {error}")
            recv = ep.dispatch(d.x, d.topk_ids)
            assert int(recv.num_recv_tokens) == sum(
                int(((data(peer, 64).topk_ids // 3) == rank).sum()) for peer in range(world_size)
            )
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_hooks_that_break_are_refused_on_all_ranks(transport):
    first, second = run_ranks(broken_hooks, 2, transport, timeout=120)
    assert [words.split(":")[0] for words in second] == ["ZeroDivisionError", "ArgumentError"] * 2
    assert "input_scale: expected a hook that returns one element, got shape [2]" in second[1]
    assert "broadcast to [3, 2], got shape [3, 3]" in second[3]
    assert all("rank 1 refused its arguments in dispatch" in words for words in first), first


def refused_over_an_operators_output(rank, world_size, transport):
    """Rank 1 passes what is refused over an output that an operator returned; rank 0 hears so, and calls go on."""
    found = []
    with moelink.init(**SIZES, transport=transport, timeout=60) as ep:
        d = data(rank)
        recv = ep.dispatch(d.x.clone().requires_grad_(), d.topk_ids)
        x, y = (d.x[:2], recv.tokens.detach()[:1]) if rank == 1 else (d.x, recv.tokens.detach())
        for call in (lambda: ep.dispatch(x, None, routing=recv), lambda: ep.combine(y, recv)):
            with torch.no_grad():
                try:
                    call()
                    found.append("nothing")
                except Exception as error:  # noqa: BLE001 - which one it is is what this is about
                    found.append(f"{type(error).__name__}: {error}")
                out = ep.combine(recv.tokens, recv)
            assert_bitwise_equal(out, (d.x.float() * 2).to(out.dtype))
    return found


@pytest.mark.quick("only the symmetric transport asks what the earlier call brought")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_refused_over_an_operators_output_is_told(transport):
    first, second = run_ranks(refused_over_an_operators_output, 2, transport, timeout=120)
    assert [words.split(" expected")[0] for words in second] == ["ArgumentError: x:", "ArgumentError: y:"]
    assert all(words.startswith("PeerAbortedError: rank 0: rank 1 refused its arguments") for words in first), first


def failing_format(rank, world_size):
    """Rank 1 fails between the headers and the rows: it says so, and makes no calls any more that could be mistaken."""
    found = []
    with join(**SIZES, transport="collective") as ep:
        d = data(rank)
        if rank == 1:
            object.__setattr__(ep.config, "__class__", type("Broken", (type(ep.config),), {"format": property(broken)}))
        for _ in range(2):
            try:
                ep.dispatch(d.x, d.topk_ids)
                found.append("nothing")
            except (ZeroDivisionError, moelink.MoelinkError) as error:
                found.append(f"{type(error).__name__}: {error}")
        meet()
    return found


def broken(config):
    fmt = moelink.get_format(config.dispatch_format)
    copy = object.__new__(type(fmt))
    copy.__dict__.update(fmt.__dict__)
    object.__setattr__(copy, "quantize", raising)
    return copy


def test_a_rank_that_fails_after_its_header_ends_the_communicator_and_is_named():
    first, second = run_ranks(failing_format, 2, timeout=120)
    assert second[0] == "ZeroDivisionError: a user's mistake"
    assert all(words.startswith("PeerLeftError") and "rank 1" in words for words in first), first
    assert second[1].startswith("PeerLeftError"), second


def failing_epilogue(rank, world_size):
    """Rank 1 fails once all rows are home: its peers have theirs, and the next call is as it should be."""
    with moelink.init(**SIZES, transport="collective", timeout=60) as ep:
        d = data(rank)
        recv = ep.dispatch(d.x, d.topk_ids)
        out = torch.zeros(3, 32, dtype=torch.bfloat16)
        if rank == 1:
            with pytest.raises(ZeroDivisionError):
                ep.combine(recv.tokens, recv, epilogue=moelink.Hook(None, raising, (out,)))
        else:
            ep.combine(recv.tokens, recv)
        return ep.combine(recv.tokens, recv)


def test_a_rank_that_fails_at_home_fails_alone():
    for rank, out in enumerate(run_ranks(failing_epilogue, 2, timeout=120)):
        assert_bitwise_equal(out, (data(rank).x.float() * 2).to(out.dtype))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_result_asked_for_after_close_is_an_error(transport, phase):
    d = data(0)
    ep = moelink.init(**SIZES, transport=transport)
    recv = ep.dispatch(d.x, d.topk_ids)
    early = ep.dispatch_async(d.x, d.topk_ids)
    rows = early.wait().tokens
    pending = ep.dispatch_async(d.x, d.topk_ids) if phase == "dispatch" else ep.combine_async(recv.tokens, recv)
    ep.close()
    with pytest.raises(moelink.ClosedError, match=f"^{phase}: the communicator is closed"):
        pending.wait()
    assert early.wait().tokens is rows, "what was there before stays"


def test_a_look_at_a_result_before_wait_says_to_wait():
    d = data(0)
    with moelink.init(**SIZES) as ep, moelink.init_devices(["cpu"], **SIZES) as devices:
        dispatched = [ep.dispatch_async(d.x, d.topk_ids), devices.dispatch_async([d.x], [d.topk_ids])]
        (recv, recvs) = (each.wait() for each in dispatched)
        combined = [ep.combine_async(recv.tokens, recv), devices.combine_async([recvs[0].tokens], recvs)]
        for pending in dispatched + combined:
            for name in ("tokens", "shape"):
                with pytest.raises(AttributeError, match=f"^{name}: .*call wait"):
                    getattr(pending, name)
                assert not hasattr(pending, name)
            pending.wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_mismatched_call_fails_whenever_it_is_waited_for_and_so_does_the_next(transport):
    xs, ids, weights = zip(*((d.x, d.topk_ids, d.topk_weights) for d in map(data, range(3))), strict=True)
    with moelink.init_devices(["cpu"] * 3, **SIZES, transport=transport) as ep:
        started = []

        def call():
            started.append(ep.dispatch_async(xs, ids, [*weights[:2], None]))
            started[0].wait()

        with pytest.raises(moelink.ProtocolError) as first:
            call()
        assert len(started) == (transport == "symmetric"), "collective ranks of one process are all there at once"
        for pending in started:
            with pytest.raises(moelink.ProtocolError, match=re.escape(str(first.value))):
                pending.wait()
        with pytest.raises(moelink.ProtocolError, match=re.escape(str(first.value))):
            ep.dispatch(xs, ids, weights)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_inference_mode_may_come_and_go(transport):
    d = data(0)

    def call(ep):
        recv = ep.dispatch(d.x, d.topk_ids, d.topk_weights)
        return ep.combine(recv.tokens, recv)

    with torch.inference_mode():
        ep = moelink.init(**SIZES, transport=transport)
        inside = call(ep)
    with ep:
        assert_bitwise_equal(call(ep), inside)
        x = d.x.clone().requires_grad_()
        recv = ep.dispatch(x, d.topk_ids, d.topk_weights)
        ep.combine(recv.tokens, recv).sum().backward()
        assert x.grad is not None
        with torch.inference_mode():
            assert_bitwise_equal(call(ep), inside)


def sums_in_turn(rank, world_size, transport):
    """The sums of calls in inference mode and out of it, into tensors that were made in the same mode."""
    d, sums = data(rank), []
    with moelink.init(**SIZES, transport=transport, timeout=60) as ep:
        for inside in (True, False, True):
            with torch.inference_mode(inside):
                recv = ep.dispatch(d.x, d.topk_ids, d.topk_weights)
                out = torch.empty_like(d.x)
                assert ep.combine(recv.tokens, recv, out=out).is_inference() == inside
                sums.append(out.float().tolist())
    return sums


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_are_written_to_tensors_of_inference_mode(transport):
    """Collective calls of a group run on a thread of their own, which has a mode of its own."""
    for first, *others in run_ranks(sums_in_turn, 2, transport, timeout=120):
        assert others == [first, first]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ready_epilogues_are_refused_where_their_tensors_do_not_fit(transport):
    d = data(0)
    rows = torch.zeros(8, 32)
    with moelink.init(**SIZES, transport=transport) as ep:
        recv = ep.dispatch(d.x, d.topk_ids)
        scales, payload = torch.zeros(8, 1, dtype=torch.uint8), torch.zeros(8, 32, dtype=torch.uint8)
        wrong = {
            "out": epilogues.cast(torch.zeros(8, 16)),
            "tensor": epilogues.residual(rows[:2], rows),
            "scales_out": epilogues.block_quantize(
                "mxfp8", payload[:2].view(torch.float8_e4m3fn), scales[:2].view(torch.float8_e8m0fnu)
            ),
        }
        for name, hook in wrong.items():
            with pytest.raises(moelink.ArgumentError, match=rf"^epilogue\.{name}: expected at least 3 rows of "):
                ep.combine(recv.tokens, recv, epilogue=hook, out=rows)
        want = ep.combine(recv.tokens, recv, epilogue=epilogues.cast(rows))
        assert_bitwise_equal(want[:3].bfloat16(), ep.combine(recv.tokens, recv))


def test_devices_are_named_as_tensors_there_name_them():
    assert plain_device("cpu:0") == plain_device(torch.device("cpu", 3)) == torch.device("cpu")
    d = data(0)
    with moelink.init(**SIZES, device="cpu:0") as ep:
        assert ep.dispatch(d.x, d.topk_ids).tokens.device == ep.device
    with moelink.init_devices(["cpu:0", "cpu"], **SIZES) as ep:
        with pytest.raises(moelink.ArgumentError, match="topk_weights: expected a list of 2 entries, .*, got Hook"):
            ep.dispatch([d.x] * 2, [d.topk_ids] * 2, moelink.Hook(None, raising))
        with pytest.raises(moelink.ArgumentError, match="x: expected a list of 2 entries, .*, got 1 entries"):
            ep.dispatch([d.x], [d.topk_ids] * 2)


BAD_INIT = {
    "device": {"device": "nowhere"},
    "timeout": {"timeout": "soon"},
    "dispatch_format": {"dispatch_format": ["bf16"]},
}


def bad_init(rank, world_size):
    found = []
    for fields in BAD_INIT.values():
        try:
            moelink.init(**{**SIZES, "timeout": 60, **(fields if rank == 1 else {})}).close()
            found.append("nothing")
        except moelink.MoelinkError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_what_one_rank_passes_wrongly_to_init_its_peers_hear_of():
    first, second = run_ranks(bad_init, 2, timeout=120)
    for name, here, there in zip(BAD_INIT, second, first, strict=True):
        assert here.startswith(f"ConfigError: {name}: expected "), here
        assert there.startswith("PeerAbortedError: rank 0: rank 1 refused its arguments in init"), there


@pytest.mark.quick("each case checks something else, in milliseconds")
@pytest.mark.parametrize("fmt", ["bf16", "fp8_block128", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("more", [{}, {"capacity": 3}, {"num_experts": 200}], ids=str)
def test_a_memory_report_counts_all_that_a_dispatch_returns(fmt, layout, more):
    fields = {**SIZES, "hidden_size": 256, "dispatch_format": fmt, "layout": layout, **more}
    config = moelink.EPConfig(**fields)
    made = OutputShape.of(config, rows=config.row_capacity, weighted=True)
    returned = sum(blank.dtype.itemsize * torch.Size(blank.shape).numel() for _, blank in made.present)
    results = 1 if layout == "rank" else config.topk  # of a combine with reduce=False
    counted = config.memory_report().outputs - 4 * results * config.combine_row_bytes
    assert 0 <= counted - returned <= 4 * 2 * config.num_groups
    assert dataclasses.replace(config, max_tokens_per_rank=8).memory_report().outputs > config.memory_report().outputs


def elsewhere(rank, world_size, transport):
    """Everything on the CPU, as told, while tensors without a device are made where there is no memory."""
    d = data(rank)
    torch.set_default_device("meta")
    outs = []
    for fields in ({}, {"layout": "rank"}, {"dispatch_format": "mxfp8"}, {"fused_shared_expert": True}):
        with moelink.init(**SIZES, **fields, transport=transport, device="cpu", timeout=60) as ep:
            x = d.x.clone().requires_grad_(fields == {})
            recv = ep.dispatch(x, d.topk_ids, d.topk_weights)
            y = torch.ones(len(recv.tokens), 32, device="cpu", dtype=torch.bfloat16) * recv.tokens.float().mean()
            out = ep.combine(y.bfloat16(), recv)
            if x.requires_grad:
                out.sum().backward()
                assert x.grad.device.type == "cpu"
            ep.check()
            assert ep.dispatch(d.x, d.topk_ids, host_counts=True).tokens.device.type == "cpu"
            outs.append(out.shape)
    torch.set_default_device("cpu")
    return outs


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_default_device_elsewhere_changes_nothing(transport):
    for outs in run_ranks(elsewhere, 2, transport, timeout=200):
        assert [tuple(shape) for shape in outs] == [(3, 32)] * 4
