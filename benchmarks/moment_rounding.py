"""Drift of Adam with moments in bfloat16 against float32, by the way of rounding.

    python -m benchmarks.moment_rounding

Gradients are noise around a slope, and shrink a hundredfold over the run, as those of a policy that
settles. After 4,000 steps: the error of the second moment, and how far the weights have moved away
from those of float32, as a share of how far those moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.trainer.megatron import device

STEPS = 4000
NUMEL = 1 << 14
LR = 1e-6
WAYS = {
    "float32": (None, None),
    "both to nearest": ("nearest", "nearest"),
    "both stochastic": ("stochastic", "stochastic"),
    "exp_avg to nearest, exp_avg_sq stochastic": ("nearest", "stochastic"),
    "exp_avg stochastic, exp_avg_sq in float32": ("stochastic", None),
}


def rounded(values: Tensor, way: str | None, generator: torch.Generator) -> Tensor:
    from slime.trainer.megatron.streamed import round_stochastically

    if way is None:
        return values
    if way == "nearest":
        return values.bfloat16().float()
    return round_stochastically(values, generator).float()


def train(ways: tuple[str | None, str | None]) -> tuple[Tensor, Tensor]:
    """Return (the weights' path, the second moment) after all steps."""
    gradients = torch.Generator().manual_seed(1)
    noise = torch.Generator().manual_seed(2)
    slope = 0.3 * torch.randn(NUMEL, generator=gradients)
    weights = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = torch.optim.AdamW([weights], lr=LR, weight_decay=0.0, fused=True)
    for step in range(STEPS):
        scale = 1e-3 * 0.01 ** (step / STEPS)
        weights.grad = scale * (slope + torch.randn(NUMEL, generator=gradients))
        optimizer.step()
        state = optimizer.state[weights]
        for name, way in zip(("exp_avg", "exp_avg_sq"), ways, strict=True):
            state[name].copy_(rounded(state[name], way, noise))
    return weights.detach(), optimizer.state[weights]["exp_avg_sq"]


def main() -> None:
    device.install()  # before anything imports megatron
    exact, moment = train(WAYS["float32"])
    print(f"{'moments in bfloat16':44} {'second moment':>14} {'weights':>10}")
    for name, ways in WAYS.items():
        path, second = train(ways)
        error = (second / moment).log().abs().mean().exp() - 1
        print(f"{name:44} {float(error):14.2%} {float((path - exact).norm() / exact.norm()):10.2%}")


if __name__ == "__main__":
    main()
