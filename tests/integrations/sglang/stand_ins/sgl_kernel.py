"""Names that SGLang imports from its compiled kernels on a CPU, for which PyPI has no build.

They copy and assign cache slots, and verify drafts, in speculative decoding. Greedy decoding calls none of them, and a
call raises.
"""

from typing import Any, NoReturn


def assign_req_to_token_pool_cpu(*args: Any) -> NoReturn:
    raise NotImplementedError("a kernel of SGLang for CPUs, which PyPI does not have")


assign_draft_cache_locs_contiguous_cpu = assign_extend_cache_locs_cpu = assign_req_to_token_pool_cpu
build_tree_kernel_efficient_cpu = verify_tree_greedy_cpu = assign_req_to_token_pool_cpu
copy_all_layer_kv_cache_cpu = assign_req_to_token_pool_cpu
fill_accept_out_cache_loc_cpu = fill_bonus_tokens_cpu = assign_req_to_token_pool_cpu
