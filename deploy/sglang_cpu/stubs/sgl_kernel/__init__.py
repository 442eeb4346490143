"""Stands in for sgl-kernel, whose wheels are built for CUDA.

SGLang's CPU engine imports these names when it starts; only speculative decoding and moving of cached keys
and values call them. They are listed one by one: SGLang probes for others, and must not find them.
"""

from __future__ import annotations

from collections.abc import Callable

__version__ = "0.0.0"


def _missing(name: str) -> Callable[..., None]:
    def refuse(*arguments: object, **options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not built on this machine")

    refuse.__name__ = name
    return refuse


assign_draft_cache_locs_contiguous_cpu = _missing("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _missing("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _missing("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _missing("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _missing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _missing("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _missing("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _missing("verify_tree_greedy_cpu")
