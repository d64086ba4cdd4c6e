"""The contract's compile-time parameters, by its names, and the configuration that they amount to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moelink.arith import is_integer
from moelink.config import EPConfig
from moelink.errors import ConfigError, UnsupportedError
from moelink.formats import format_names
from moelink.memory.workspace import Workspace

FORMAT_NAMES = {"BF16": "bf16", "BlockwiseFP8": "fp8_block128", "NVFP4": "nvfp4", "MXFP4": "mxfp4"}
"""The contract's names of formats. Registered names of this package are accepted beside them."""

_OWN_NAMES = {"max_tokens_per_rank": "max_token_per_rank"}
"""The contract's names of fields that ``EPConfig`` may refuse under its own, and EPParams does not check itself."""


@dataclass(frozen=True, kw_only=True)
class EPParams:
    """Parameters of ``ep_init`` and of every launcher. The same on every rank.

    Example: 8 GPUs of one node, 256 experts, the arithmetic of the contract (every row travels, one rounding at home):

        >>> params = EPParams(dispatch_fmt_str="BlockwiseFP8", hidden_size=7168, top_k=8, n_experts=256,
        ...                   max_token_per_rank=128, n_gpus_per_node=8)
        >>> params.config(0).dispatch_format, params.n_ranks, params.max_recv_tokens
        ('fp8_block128', 8, 8288)

    Attributes:
        dispatch_fmt_str: "BF16", "BlockwiseFP8", "NVFP4", "MXFP4", or a registered format name.
        hidden_size: elements of a row.
        top_k: expert ids per token.
        n_experts: routed experts of all ``n_gpus_per_node * n_nodes`` ranks; at least 1, not necessarily a multiple of
            the ranks.
        max_token_per_rank: most tokens that one rank dispatches.
        n_gpus_per_node, n_nodes: ranks are their product, numbered node by node. With ``skip_a2a`` that is
            ``allreduce_world_size``, or 1: then ``n_experts`` counts the experts of each single rank.
        combine_dtype: of expert outputs, of rows on the way home, and of the result.
        fused_shared_expert: group 0 of the output is the rank's own tokens.
        skip_a2a: activations are replicated; each rank keeps the rows of its own experts, and nothing travels.
        allreduce_world_size: with ``skip_a2a``, the ranks among which experts and shared rows are divided, and whose
            results are added. Ids stay global: in [0, :attr:`num_experts`).
        use_shmem: puts to ranks of other nodes. None means where there are any. False is refused where there are, and
            True where there are none: nothing would travel by a put.
        pre_reduce: sum a token's rows on the expert's rank before they travel. The contract has False.
        lamport: let sums of small calls travel without flags (``kernels.sync.lamport_slots``), as a communicator's do,
            where all sums of a call find room. That is faster, but ``EPCombineKernel`` does not describe where such
            sums are, and its phases are refused. Only with ``pre_reduce``, on one node, without ``skip_a2a``.
        expert_alignment: group sizes are rounded up to a multiple of it.
        n_sms: SMs that launches keep to, or None for all of the device (on a CPU 2 CTAs, of the phases).
        timeout: seconds after which a wait gives up.
    """

    dispatch_fmt_str: str
    hidden_size: int
    top_k: int
    n_experts: int
    max_token_per_rank: int
    n_gpus_per_node: int
    n_nodes: int = 1
    combine_dtype: torch.dtype = torch.bfloat16
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    allreduce_world_size: int = 1
    use_shmem: bool | None = None
    pre_reduce: bool = False
    lamport: bool = False
    expert_alignment: int = 1
    n_sms: int | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        known = (*FORMAT_NAMES, *format_names())
        if self.dispatch_fmt_str not in known:
            raise ConfigError("dispatch_fmt_str", f"one of {', '.join(map(repr, known))}", self.dispatch_fmt_str)
        for name in ("fused_shared_expert", "skip_a2a", "pre_reduce", "lamport"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, "True or False", getattr(self, name))
        if self.use_shmem is not None and not isinstance(self.use_shmem, bool):
            raise ConfigError("use_shmem", "True, False or None", self.use_shmem)
        for name in ("hidden_size", "top_k", "n_experts", "max_token_per_rank", "n_gpus_per_node", "n_nodes",
                     "allreduce_world_size", "expert_alignment", "n_sms"):  # fmt: skip
            value, least = getattr(self, name), 0 if name == "max_token_per_rank" else 1
            if (value is not None or name != "n_sms") and not is_integer(value, least):
                raise ConfigError(name, f"an integer >= {least}", value)
        if self.allreduce_world_size > 1 and not self.skip_a2a:
            raise ConfigError("allreduce_world_size", "1 without skip_a2a", self.allreduce_world_size)
        if self.skip_a2a and self._named_ranks not in (1, self.allreduce_world_size):
            raise ConfigError(
                "allreduce_world_size",
                f"n_gpus_per_node * n_nodes = {self._named_ranks} with skip_a2a (n_experts then counts the experts of "
                "them all), or n_gpus_per_node = n_nodes = 1 (n_experts then counts those of one rank)",
                self.allreduce_world_size,
            )
        if self.use_shmem and (self.skip_a2a or self.n_nodes == 1):
            alone = "with skip_a2a, where nothing travels" if self.skip_a2a else "with n_nodes=1, where no row is put"
            raise ConfigError("use_shmem", f"None or False {alone}", self.use_shmem)
        if self.lamport and (self.skip_a2a or self.n_nodes > 1 or not self.pre_reduce):
            expected = "False without pre_reduce, with skip_a2a and between nodes, where no sums travel without flags"
            raise ConfigError("lamport", expected, True)
        if self.use_shmem is False and self.n_nodes > 1 and not self.skip_a2a:
            raise UnsupportedError(
                f"n_nodes={self.n_nodes}, use_shmem=False: expected puts (use_shmem) to reach ranks of other nodes, "
                "got none; leave use_shmem out, or use moelink.init(transport='collective')"
            )
        try:
            self.config(0)
        except ConfigError as error:
            raise ConfigError(_OWN_NAMES.get(error.field, error.field), error.expected, error.got) from None

    @property
    def n_ranks(self) -> int:
        """Ranks among which the experts are divided."""
        return self.allreduce_world_size if self.skip_a2a else self._named_ranks

    @property
    def _named_ranks(self) -> int:
        """Ranks whose experts ``n_experts`` counts."""
        return self.n_gpus_per_node * self.n_nodes

    @property
    def num_experts(self) -> int:
        """Routed experts of the whole model. Ids are in [0, num_experts)."""
        return self.n_experts * (self.n_ranks // self._named_ranks)

    @property
    def workspace(self) -> Workspace:
        """Regions of a rank's block."""
        return Workspace(self.config(0), lamport=self.lamport)

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that every rank must bring to ``ep_init``."""
        return self.workspace.nbytes

    @property
    def max_recv_tokens(self) -> int:
        """Rows that an output needs at worst if the ids of each token are distinct, padding and shared rows included.

        A token then has at most min(top_k, local experts) rows on a rank: Tmax x min(E, R x k) routed rows where the
        ranks own equally many experts. ``config(rank).max_rows`` is the worst case of repeated ids, which
        ``TokenHandler.allocate`` makes room for by itself.
        """
        config = self.config(0)
        repeated = max(0, config.topk - config.num_local_experts)
        return config.max_rows - config.max_recv_tokens * repeated

    def config(self, rank: int) -> EPConfig:
        """The same settings under this package's names."""
        return EPConfig(
            num_experts=self.num_experts,
            topk=self.top_k,
            hidden_size=self.hidden_size,
            max_tokens_per_rank=self.max_token_per_rank,
            dispatch_format=FORMAT_NAMES.get(self.dispatch_fmt_str, self.dispatch_fmt_str),
            combine_dtype=self.combine_dtype,
            expert_alignment=self.expert_alignment,
            pre_reduce=self.pre_reduce,
            fused_shared_expert=self.fused_shared_expert,
            mode="allreduce" if self.skip_a2a else "alltoall",
            transport="symmetric",
            ranks_per_node=self.n_gpus_per_node if self.n_nodes > 1 and not self.skip_a2a else None,
            num_sms=self.n_sms,
            timeout=self.timeout,
            world_size=self.n_ranks,
            rank=rank,
        )
