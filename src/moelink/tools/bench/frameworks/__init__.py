"""A framework's own dispatcher against moelink's, in the same layer, with the same weights and inputs, in one run.

    torchrun --nproc-per-node 2 -m moelink.tools.bench.frameworks --framework torchtitan --out FILE
    torchrun --nproc-per-node 2 -m moelink.tools.bench.frameworks --framework megatron --out FILE

Outputs and gradients are compared before anything is timed. Frameworks that moelink's integrations support and that are
not here (transformers, vLLM, SGLang) have no dispatcher between ranks of their own that runs without the framework's
engine; their benchmarks are those of the engine.
"""
