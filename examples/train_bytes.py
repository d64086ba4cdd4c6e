"""Train a small byte-level language model with Mixture-of-Experts layers, on one rank and on several.

    python examples/train_bytes.py --ranks 4 --steps 60 --out curves

It learns the bundled text. Each step's batch is cut over the ranks, every rank owns a part of the experts, and the loss
curve is the one-rank run's, the auxiliary loss that balances the experts included.
Written to --out: loss.json, loss.png (both curves), and load-RANK.json of the several ranks, for ``moelink plot``.
The exit status is 1 if the curves differ.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import moelink
from moelink.nn import AuxLossConfig, MoE, add_aux_losses, all_reduce_gradients, save_load
from moelink.testing import run_ranks
from moelink.tools.demo import bundled_text

TOLERANCE = 1e-4
"""Nats. Sums in another order round otherwise in fp32, and training makes small differences larger."""


@dataclass(frozen=True)
class Settings:
    """What is trained. ``batch`` sequences over all ranks."""

    steps: int
    out: str
    batch: int = 8
    length: int = 48
    width: int = 48
    layers: int = 2
    experts: int = 8
    topk: int = 2
    learning_rate: float = 5e-3
    balance: float = 1e-2
    seed: int = 0


class Block(nn.Module):
    """Causal self-attention, then experts."""

    def __init__(self, ep: moelink.Communicator, settings: Settings, seed: int) -> None:
        super().__init__()
        width = settings.width
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        losses = AuxLossConfig(balance=settings.balance, over="all")
        self.moe = MoE(ep, intermediate_size=2 * width, aux_loss=losses, seed=seed, load_steps=settings.steps)

    def forward(self, x: Tensor) -> Tensor:
        sequences, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(sequences, length, 3, 4, width // 4).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.moe(self.norms[1](x))


class Model(nn.Module):
    """Bytes to logits of the next byte."""

    def __init__(self, ep: moelink.Communicator, settings: Settings) -> None:
        super().__init__()
        # One seed on every rank: what is replicated starts alike. Experts have seeds of their own.
        torch.manual_seed(settings.seed)
        self.embedding = nn.Embedding(256, settings.width)
        self.places = nn.Embedding(settings.length, settings.width)
        self.blocks = nn.ModuleList([Block(ep, settings, seed) for seed in range(settings.layers)])
        self.norm, self.head = nn.RMSNorm(settings.width), nn.Linear(settings.width, 256)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes) + self.places.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(text: Tensor, step: int, settings: Settings) -> Tensor:
    """[batch, length + 1] bytes, a function of the step: every rank knows the whole batch and takes its share."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - settings.length - 1, (settings.batch,), generator=generator)
    return text[starts[:, None] + torch.arange(settings.length + 1)]


def train(rank: int, world_size: int, settings: Settings) -> list[float]:
    """One rank: the loss of the whole batch, in nats a byte, at every step."""
    text = torch.frombuffer(bytearray(bundled_text()), dtype=torch.uint8).long()
    share = slice(rank * settings.batch // world_size, (rank + 1) * settings.batch // world_size)
    losses = []
    with moelink.init(
        num_experts=settings.experts, topk=settings.topk, hidden_size=settings.width,
        max_tokens_per_rank=-(-settings.batch // world_size) * settings.length, dispatch_format="fp32",
        combine_dtype=torch.float32, device="cpu",
    ) as ep:  # fmt: skip
        model = Model(ep, settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
        for step in range(settings.steps):
            mine = batch(text, step, settings)[share]
            logits = model(mine[:, :-1])
            # Divided by the number of all tokens, so that the ranks' losses, and gradients, add up to the batch's mean.
            total = settings.batch * settings.length
            loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum") / total
            loss = add_aux_losses(loss, model)
            optimizer.zero_grad()
            loss.backward()
            all_reduce_gradients(model)
            optimizer.step()
            shown = loss.detach()
            if world_size > 1:
                dist.all_reduce(shown)
            losses.append(float(shown))
            if step < settings.steps - 1:
                for block in model.blocks:
                    block.moe.load.next_step()
        if world_size > 1:
            save_load(model, Path(settings.out) / f"load-{rank}.json")
    return losses


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Both loss curves; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (label, losses), style in zip(
        curves.items(), ({"linewidth": 5, "alpha": 0.35}, {"linewidth": 1.2}), strict=True
    ):
        axes.plot(losses, color="#1f77b4", label=label, **style)
    axes.set(xlabel="step", ylabel="loss, nats a byte", title="A byte-level model, trained on one rank and on several")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("train_bytes_out"))
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error("--ranks: two at least, to compare with one")
    arguments.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(steps=arguments.steps, out=str(arguments.out))
    curves = {}
    for ranks in (1, arguments.ranks):
        name = f"{ranks} rank{'s' if ranks > 1 else ''}"
        first, *others = run_ranks(train, ranks, settings, timeout=600)
        assert all(other == first for other in others)
        curves[name] = first
        print(f"{name}: loss {first[0]:.4f} at first, {first[-1]:.4f} at last")
    one, several = curves.values()
    difference = max(abs(a - b) for a, b in zip(one, several, strict=True))
    print(f"largest difference between the curves: {difference:.1e} (allowed {TOLERANCE:.0e})")
    document = {"curves": curves, "largest_difference": difference, "tolerance": TOLERANCE}
    (arguments.out / "loss.json").write_text(json.dumps(document, indent=1) + "\n")
    draw(curves, arguments.out / "loss.png")
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
