"""Trains a generative adversarial network: two models and two optimizers in one step of ``Run``.

    python examples/gan.py
    torchrun --nproc-per-node 2 examples/gan.py     # the same batches

Both models learn from the weights before the step; ``step.update(a, b)`` updates both, or neither if the
gradient norm is not finite. The generator learns to draw points of a ring.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal import Run
from shoal.train.config import LoopConfig, RunOutputConfig
from shoal.train.run import Sizes


def network(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, num_outputs))


def told(logits: Tensor, real: bool) -> Tensor:
    """Return the sum of the losses of telling points from real ones."""
    wanted = torch.full_like(logits, float(real))
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/gan"))
    args = parser.parse_args()
    angles = 2 * math.pi * torch.rand(4_096, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))

    settings = RunOutputConfig(log_frequency=50, checkpoint_frequency=100)
    with Run.open(args.run_dir, settings=settings, loop=LoopConfig(seed=1), recipe="gan") as run:
        torch.manual_seed(run.seed)
        generator, critic = network(8, 2), network(2, 1)
        generate, criticize = run.data_parallel(generator), run.data_parallel(critic)
        for_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
        for_critic = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.99))
        run.keep(generator=generator, critic=critic, for_generator=for_generator, for_critic=for_critic)

        for step in run.steps(dataset, Sizes(global_batch_size=128), until=200):
            with step:
                for (real,) in step:
                    fake = generate(torch.randn(len(real), 8, device=real.device))
                    logits = criticize(torch.cat([real, fake.detach()]))
                    loss = told(logits[: len(real)], True) + told(logits[len(real) :], False)
                    step.backward(loss / step.num_samples)
                    critic.requires_grad_(False)  # this loss is the generator's alone
                    loss_of_generator = told(critic(fake), True)
                    step.backward(loss_of_generator / step.num_samples)
                    critic.requires_grad_(True)
                    step.add(step.num_samples, critic_loss=loss, generator_loss=loss_of_generator)
                step.update(for_generator, for_critic)
            if run.due(every=100):
                radii = generator(torch.randn(1_000, 8, device=run.world.device)).norm(dim=1)
                run.evaluation("drawn", {"radius": radii.mean(), "spread": radii.std()}, num_samples=1_000)
        return run.finish(lambda directory: torch.save(generator.state_dict(), directory / "model.pt"))


if __name__ == "__main__":
    sys.exit(main())
