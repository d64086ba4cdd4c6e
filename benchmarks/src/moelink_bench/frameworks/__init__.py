"""A framework's own dispatcher against moelink's, in the same layer, with the same weights and inputs, in one run.

    torchrun --nproc-per-node 2 -m moelink_bench.frameworks --framework torchtitan --out FILE
    torchrun --nproc-per-node 2 -m moelink_bench.frameworks --framework megatron --out FILE
    torchrun --nproc-per-node 2 -m moelink_bench.frameworks --framework vllm --out FILE
    torchrun --nproc-per-node 2 -m moelink_bench.frameworks --framework sglang --out FILE

Outputs are compared before anything is timed, and gradients with torchtitan and Megatron, which train. transformers has
no dispatcher between ranks of its own.
"""
