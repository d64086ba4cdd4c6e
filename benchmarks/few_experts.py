"""The layer with the experts in one launch, in turns with three launches; one GPU or more. few_experts.py OUT
PYTHONPATH=src:.:testing/src:benchmarks/src:benchmarks python3 benchmarks/few_experts.py out.json"""
import functools, json, statistics, sys, time
import torch
BEGIN = time.monotonic()
QWEN, DEEPSEEK = "qwen3-30b-a3b", "deepseek-v3"
TOKENS = {QWEN: (1, 8, 32, 128), DEEPSEEK: (1, 8)}
VARIANTS = {"three": None, "one 4w s4 x2": (4, 4, 2), "one 4w s4 x3": (4, 4, 3), "one 4w s4 x1": (4, 4, 1),
            "one 8w s4 x2": (8, 4, 2), "one 4w s6 x2": (4, 6, 2), "three again": None}
COUNTERS = {}


def apply(variant):
    from moelink.kernels.launch.row_launch import row_launcher
    from moelink.nn import placed_experts as module
    from moelink.rows import experts_kernel

    how = VARIANTS[variant]
    module._plain = getattr(module, "_plain", module._compute)
    row_launcher().replays._known.clear()

    def compute(codes, scales, row_offsets, gate_up, gate_up_scales, down, down_scales, backend, clamp, dtype):
        rows, groups = codes.shape[0], gate_up.shape[0]
        between = codes.new_empty(rows, gate_up.shape[1], dtype=dtype)
        inner = torch.empty(rows, down.shape[2], dtype=torch.uint8, device=codes.device)
        inner_scales = torch.empty(down.shape[2] // 128, rows, device=codes.device)
        out = codes.new_empty(rows, down.shape[1], dtype=dtype)
        size = experts_kernel.counters_for(rows, groups)
        if size not in COUNTERS:
            COUNTERS[size] = torch.zeros(size, dtype=torch.int32, device=codes.device)
        experts_kernel.launch(codes, scales, row_offsets, (gate_up, gate_up_scales), (down, down_scales),
                              (between, inner, inner_scales), COUNTERS[size], out, tuple(clamp) or None,
                              num_warps=how[0], num_stages=how[1], per_sm=how[2])
        return (out,), (between, inner, inner_scales)

    module._compute = module._plain if how is None else compute


def rank_main(rank, world_size, case):
    from moelink_bench.contenders import compile_calls
    from moelink_bench.layer.contenders import MoelinkLayer
    from moelink_bench.layer.data import make_inputs, make_weights
    from moelink_bench.layer.plan import SHAPES, LayerCase
    from moelink_bench.presets import Settings
    from moelink_bench.ranks import joined
    from moelink_bench.timing import Turns, capture, host_barrier, in_turns

    told = {"layer": {}, "same": {}, "seconds": {}}
    with joined(rank, "cuda", flush_bytes=120_000_000) as clock, torch.no_grad():
        device, shape = clock.device, SHAPES[case]
        begin = time.monotonic()
        weights = make_weights(shape, seed=0, rank=rank, world_size=world_size, device=device)
        layer = MoelinkLayer(shape, weights, fmt="fp8_block128", max_tokens=4096, device=device, timeout=60.0)
        compile_calls(layer.ep)
        host_barrier()
        for tokens in TOKENS[case]:
            given = make_inputs(LayerCase(name=case, shape=shape, tokens=tokens), Settings(calls=8), rank=rank, device=device)
            graphs, want = {}, None
            for name in VARIANTS:
                apply(name)
                calls = [functools.partial(layer.layer, each) for each in given]
                got = [call() for call in calls]
                torch.cuda.synchronize(device)
                host_barrier()
                captured = capture(calls, device)
                captured.replay()
                torch.cuda.synchronize(device)
                host_barrier()
                want = got if want is None else want
                far = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, want))
                told["same"][f"{tokens} {name}"] = far if all(map(torch.equal, captured.results, got)) else 99.0
                graphs[name] = captured
            taken = in_turns({name: graph.replay for name, graph in graphs.items()}, clock, Turns(turns=15, samples=1, dropped=2))
            told["layer"][tokens] = {name: [us / len(given) for us in each] for name, each in taken.items()}
            graphs.clear()
        layer.check()
        assert not any(bool(each.any()) for each in COUNTERS.values())
        told["seconds"]["end"] = round(time.monotonic() - begin, 1)
        layer.close()
    return told


def main():
    from moelink.testing import run_ranks

    document = {"cases": {}}
    for case in TOKENS:
        found = run_ranks(rank_main, torch.cuda.device_count(), case, timeout=150.0)
        document["cases"][case] = found
        json.dump(document, open(sys.argv[1], "w"), indent=1)
        print(f"{case}: {found[0]['seconds']}, {time.monotonic() - BEGIN:.0f} s", flush=True)
        for tokens in TOKENS[case]:
            line = []
            for name in VARIANTS:
                worst = [max(pair) for pair in zip(*[each["layer"][tokens][name] for each in found])]
                far = max(each["same"][f"{tokens} {name}"] for each in found)
                line.append(f"{name} {statistics.median(worst):.1f}{'' if far == 0 else f' ({far:.1g})'}")
            print(f"  {tokens:4}", *line, sep="; ", flush=True)


if __name__ == "__main__":
    import few_experts

    few_experts.main()
