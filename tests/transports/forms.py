"""Make the calls of a :class:`tests.support.setups.Draw`, in each form that calls have, and compare with the oracle.

A form is a function that makes a few exchanges: a dispatch, often with a combine. It returns the case of each exchange
and what the ranks of this process got. One process may drive all ranks, or one of them, so calls take and return lists
with an entry for each of *its* ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import moelink
from moelink import reference
from moelink.transports.base import CombineRequest, DispatchRequest
from tests.contract.contract_ranks import Buffers, combine_all, dispatch_all, params_of, ranks_of
from tests.support.cases import FIELDS, Case, Packed, Result, check_case, used_rows
from tests.support.setups import Draw

Outputs = list[moelink.DispatchOutput]


@dataclass
class Exchange:
    """A dispatch, and perhaps a combine, of every rank of this process."""

    case: Case
    results: list[Result]

    def combined(self, outs: Sequence[torch.Tensor]) -> Exchange:
        """Add what combine returned."""
        pairs = zip(self.results, outs, strict=True)
        return Exchange(self.case, [dataclasses.replace(result, combined=Packed.of(out)) for result, out in pairs])


class Ranks:
    """The ranks of this process: all of them, or one of those that are processes each."""

    def __init__(self, draw: Draw, rank: int | None = None) -> None:
        fields = draw.setup.fields
        self.draw, self.mine = draw, range(draw.ranks) if rank is None else range(rank, rank + 1)
        self.alone = len(self.mine) == 1
        if self.alone:
            self.ep: Any = moelink.init(**fields, device="cpu", timeout=60.0)
        else:
            self.ep = moelink.init_devices(["cpu"] * draw.ranks, **fields)

    def requests(self, case: Case, **options: Any) -> list[DispatchRequest]:
        """What the ranks dispatch. ``options``: the same for all of them."""
        data = [case.data(rank) for rank in self.mine]
        weights = [d.topk_weights if case.travel else None for d in data]
        bounds = [case.max_tokens[rank] if case.max_tokens else None for rank in self.mine]
        return [
            DispatchRequest(d.x, d.topk_ids, w, max_tokens=bound, host_counts=case.exact, **options)
            for d, w, bound in zip(data, weights, bounds, strict=True)
        ]

    def dispatch(self, requests: Sequence[DispatchRequest], *, split: bool = False) -> Outputs:
        """Dispatch, in one call or in two halves."""
        if not self.alone:
            return self.ep._session.call(requests, fused=not split).wait()
        (r,) = requests
        call = self.ep.dispatch_async if split else self.ep.dispatch
        made = call(
            r.x, None if r.routing is not None else r.topk_ids, r.topk_weights, scales=r.scales, routing=r.routing,
            max_tokens=r.max_tokens, host_counts=r.host_counts, out=r.out,
        )  # fmt: skip
        return [made.wait() if split else made]

    def combines(self, case: Case, recvs: Outputs, outs: Sequence[torch.Tensor | None] = ()) -> list[CombineRequest]:
        """What the ranks combine. Experts return NaN where no row came."""
        requests = []
        for rank, recv, out in zip(self.mine, recvs, outs or [None] * len(recvs), strict=True):
            y = case.expert_rows(rank, *recv.src_info.shape[:-1])
            y[~filled(recv)] = torch.nan
            home = case.data(rank).topk_weights if case.weights == "combine" else None
            shared, weigh = case.shared_rows(rank), case.weights != "left"
            requests.append(CombineRequest(y, recv, home, case.reduce, shared=shared, out=out, weigh=weigh))
        return requests

    def combine(self, requests: Sequence[CombineRequest], *, split: bool = False) -> list[torch.Tensor]:
        """Combine, in one call or in two halves."""
        if not self.alone:
            return self.ep._session.call(requests, fused=not split).wait()
        (r,) = requests
        call = self.ep.combine_async if split else self.ep.combine
        made = call(r.y, r.recv, r.topk_weights, reduce=r.reduce, shared=r.shared, out=r.out, weigh=r.weigh)
        return [made.wait() if split else made]


def filled(recv: moelink.DispatchOutput) -> torch.Tensor:
    """Which rows of an output hold a token."""
    size = recv.src_info.shape[-2]
    if recv.src_info.dim() == 2:
        return (recv.src_info[:, 0] >= 0) & (torch.arange(size) < recv.row_offsets[-1])
    return used_rows(recv.num_recv_per_expert if recv.topk_ids is None else recv.num_recv_per_rank, size)


def received(case: Case, recvs: Outputs) -> Exchange:
    """What dispatch returned, as it is now."""
    for recv in recvs:
        assert (recv.rows_in_place is not None) == case.setup.fields["zero_copy"]
        assert recv.host_counts == (recv.num_recv_per_expert.tolist() if case.exact else None)
    return Exchange(case, [Result.received(recv) for recv in recvs])


def sent(ranks: Ranks, case: Case, requests: Sequence[DispatchRequest], *, split: bool = False) -> Exchange:
    """Dispatch and combine."""
    recvs = ranks.dispatch(requests, split=split)
    exchange = received(case, recvs)
    return exchange.combined(ranks.combine(ranks.combines(case, recvs), split=split))


def eager(ranks: Ranks) -> list[Exchange]:
    """One call each, two times: the second meets what the first left behind."""
    cases = [ranks.draw.case(), ranks.draw.case(seed=ranks.draw.seed + 1)]
    return [sent(ranks, case, ranks.requests(case)) for case in cases]


def split(ranks: Ranks) -> list[Exchange]:
    """Two halves each."""
    case = ranks.draw.case()
    return [sent(ranks, case, ranks.requests(case), split=True)]


def over(recvs: Outputs, requests: Sequence[DispatchRequest]) -> list[DispatchRequest]:
    """``requests`` over the routing of ``recvs``."""
    return [
        dataclasses.replace(request, routing=recv, topk_ids=recv.handle.topk_ids, max_tokens=None)
        for request, recv in zip(requests, recvs, strict=True)
    ]


def cached(ranks: Ranks) -> list[Exchange]:
    """Other rows and weights over the routing of an earlier call, and over that of this one."""
    case = ranks.draw.case()
    recvs = ranks.dispatch(ranks.requests(case))
    exchanges = [received(case, recvs)]
    for variant in (1, 2):
        case = ranks.draw.case(variant=variant)
        recvs = ranks.dispatch(over(recvs, ranks.requests(case)))
        exchange = received(case, recvs)
        exchanges.append(exchange.combined(ranks.combine(ranks.combines(case, recvs))))
    return exchanges


def poisoned(recv: moelink.DispatchOutput) -> moelink.DispatchOutput:
    """``recv`` with other bytes in all of its tensors."""
    for name in FIELDS:
        tensor = getattr(recv, name)
        if tensor is not None and tensor.numel():
            tensor.reshape(-1).view(torch.uint8).fill_(0xAA)
    return recv


def in_place(ranks: Ranks) -> list[Exchange]:
    """Into an output of an earlier call, and the result into a tensor."""
    earlier = ranks.draw.case(seed=ranks.draw.seed + 1)
    before = ranks.dispatch(ranks.requests(earlier))
    first = received(earlier, before)
    before = [poisoned(recv) for recv in before]
    case = ranks.draw.case()
    requests = [dataclasses.replace(r, out=recv) for r, recv in zip(ranks.requests(case), before, strict=True)]
    recvs = ranks.dispatch(requests)
    assert [recv.tokens.data_ptr() for recv in recvs] == [recv.tokens.data_ptr() for recv in before]
    exchange = received(case, recvs)
    plain = [torch.full_like(out, torch.nan) for out in ranks.combine(ranks.combines(case, recvs))]
    outs = ranks.combine(ranks.combines(case, recvs, plain))
    assert [out is given for out, given in zip(outs, plain, strict=True)] == [True] * len(outs)
    return [first, exchange.combined(outs)]


def bounded(ranks: Ranks) -> list[Exchange]:
    """With the number of tokens that the ranks have; with one that each has itself, so that rows of others do not fit;
    and over the routing of the latter."""
    counts = tuple(len(ranks.draw.case().data(rank).x) for rank in range(ranks.draw.ranks))
    fits = ranks.draw.case(max_tokens=(max(counts),) * len(counts))
    own = ranks.draw.case(max_tokens=counts)
    again = dataclasses.replace(own, variant=1)
    exchanges = [sent(ranks, fits, ranks.requests(fits))]
    recvs = ranks.dispatch(ranks.requests(own))
    exchanges.append(received(own, recvs))
    return [*exchanges, sent(ranks, again, over(recvs, ranks.requests(again)))]


def exact(ranks: Ranks) -> list[Exchange]:
    """As many rows as come, and the rows of each expert as a list; and over that routing."""
    case = ranks.draw.case(exact=True)
    recvs = ranks.dispatch(ranks.requests(case))
    exchanges = [received(case, recvs)]
    exchanges[0] = exchanges[0].combined(ranks.combine(ranks.combines(case, recvs)))
    again = dataclasses.replace(case, variant=1)
    return [*exchanges, sent(ranks, again, over(recvs, ranks.requests(again)))]


def quantised(ranks: Ranks) -> list[Exchange]:
    """Rows that come in the format already."""
    case = ranks.draw.case()
    rows = [reference.reference_quantize(ranks.draw.fmt, request.x) for request in ranks.requests(case)]
    given = zip(ranks.requests(case), rows, strict=True)
    return [sent(ranks, case, [dataclasses.replace(r, x=x, scales=scales) for r, (x, scales) in given])]


def bound(ranks: Ranks) -> list[Exchange]:
    """Bound to tensors, which hold something else in each call."""
    case = ranks.draw.case()
    (given,) = ranks.requests(case)
    make = ranks.ep.bind(given.x, given.topk_ids, given.topk_weights)
    exchanges: list[Exchange] = []
    y, shared, combine = torch.empty(0), None, None
    for number in range(3):
        case = ranks.draw.case(seed=ranks.draw.seed + number)
        (request,) = ranks.requests(case)
        for name in ("x", "topk_ids", "topk_weights"):
            if getattr(given, name) is not None:
                getattr(given, name).copy_(getattr(request, name))
        recv = make()
        exchange = received(case, [recv])
        (asked,) = ranks.combines(case, [recv])
        if combine is None:
            y, shared = asked.y, asked.shared
            combine = make.combine(y, shared=shared)
        y.copy_(asked.y)
        if shared is not None:
            shared.copy_(asked.shared)
        exchanges.append(exchange.combined([combine()]))
    return exchanges


def quick(ranks: Ranks) -> list[Exchange]:
    """The same call with other tensors, so that all but the first take the fast path."""
    cases = [ranks.draw.case(seed=ranks.draw.seed + number) for number in range(3)]
    return [sent(ranks, case, ranks.requests(case)) for case in cases]


def lanes(ranks: Ranks) -> list[Exchange]:
    """A call in either lane at once, for which the ranks wait in different orders."""
    whole, pair = ranks.ep, [ranks.ep.lane(number) for number in range(2)]
    cases = [ranks.draw.case(seed=ranks.draw.seed + number) for number in range(2)]
    order = (1, 0) if ranks.mine[0] % 2 else (0, 1)

    def both(start: Callable[[int], Any]) -> list[Any]:
        pending = [start(number) for number in range(2)]
        done = {number: pending[number].wait() for number in order}
        return [done[number] for number in range(2)]

    def dispatch(number: int) -> Any:
        (r,) = ranks.requests(cases[number])
        return pair[number].dispatch_async(r.x, r.topk_ids, r.topk_weights)

    recvs = both(dispatch)
    exchanges = [received(case, [recv]) for case, recv in zip(cases, recvs, strict=True)]
    asked = [ranks.combines(case, [recv])[0] for case, recv in zip(cases, recvs, strict=True)]

    def combine(number: int) -> Any:
        r = asked[number]
        return pair[number].combine_async(r.y, r.recv, r.topk_weights, shared=r.shared, weigh=r.weigh)

    outs = both(combine)
    assert whole.lane(0) is whole
    return [exchange.combined([out]) for exchange, out in zip(exchanges, outs, strict=True)]


FORMS: dict[str, Callable[[Ranks], list[Exchange]]] = {
    form.__name__: form
    for form in (eager, split, cached, in_place, bounded, exact, quantised, bound, quick, lanes)
} | {"unreduced": eager}  # fmt: skip


def launchers(draw: Draw) -> list[Exchange]:
    """The launchers of the contract, over buffers of the caller."""
    nodes = {"n_nodes": draw.ranks, "n_gpus_per_node": 1} if draw.wire == "nodes" else {}
    eps = ranks_of(params_of(draw.setup, draw.ranks, **nodes))
    exchanges = []
    for seed in range(2):
        case = draw.case(seed=draw.seed + seed)
        buffers = [Buffers.allocate(ep, rows=draw.rows, weighted=case.travel) for ep in eps]
        dispatch_all(eps, buffers, case)
        outs = combine_all(eps, buffers, case)
        results = [Result(own.fields(), Packed.of(out)) for own, out in zip(buffers, outs, strict=True)]
        exchanges.append(Exchange(case, results))
    for ep in eps:
        ep.close()
    return exchanges


def play(draw: Draw, rank: int | None = None) -> tuple[list[Exchange], bool]:
    """Make the calls of a draw, of all ranks or of one. Returns them, and whether rows were lost."""
    if draw.form == "launchers":
        return launchers(draw), False
    ranks = Ranks(draw, rank)
    with ranks.ep as ep:
        exchanges = FORMS[draw.form](ranks)
        try:
            ep.check()
        except moelink.CapacityError:
            return exchanges, True
    return exchanges, False


def play_all(rank: int, world_size: int, draws: Sequence[Draw]) -> list[Any]:
    """Entry point of a rank: the calls of every draw, or the error that one of them met, which ends it."""
    with filled_memory():
        played: list[Any] = []
        for draw in draws:
            try:
                played.append(play(draw, rank))
            except Exception as error:
                raise AssertionError(f"{draw!r}: {error!r}") from error
        return played


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Torch fills new tensors with NaN, or with the largest integer, so that what is not written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def check(draw: Draw, played: Sequence[tuple[list[Exchange], bool]]) -> None:
    """Compare with the oracle what each process played. Whether rows were lost is told by ``check()``."""
    whole = [exchanges for exchanges, _ in played]
    lost = False
    for parts in zip(*whole, strict=True):
        case, results = parts[0].case, [result for part in parts for result in part.results]
        check_case(case, draw.ranks, results)
        lost |= any(int(result.fields["overflow"].tensor()) for result in results)
    assert draw.form == "launchers" or any(losses for _, losses in played) == lost, "losses that check() tells"
