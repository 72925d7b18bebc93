"""Trains a network to read noisy digits of seven segments, which are drawn from their index."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.decide.batch import plan_batch
from shoal.env.worker import WorkerEnv
from shoal.recipes import DryRun, Row, Sample, Use
from shoal.recipes.using import EvaluateConfig, PredictConfig
from shoal.train.config import (
    DistributedConfig,
    RunOutputConfig,
    TrainConfig,
    load_toml,
    required,
    settings_lines,
)
from shoal.train.run_dir import CONFIG_FILE

if TYPE_CHECKING:
    from torch import Tensor, nn

PRESETS = ("tiny", "wide")
IMMUTABLE = ("model", "train.seed", "train.global_batch_size")
SEGMENTS = (0x77, 0x24, 0x5D, 0x6D, 0x2E, 0x6B, 0x7B, 0x25, 0x7F, 0x6F)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    hidden_size: int = 64
    """Width of its layer."""


@dataclass(frozen=True, kw_only=True)
class DigitsConfig:
    """All settings."""

    unit: ClassVar[str] = "digits"
    scores: ClassVar[dict[str, tuple[str, ...]]] = {"validation": ("accuracy",)}

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunOutputConfig = field(default_factory=RunOutputConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


class Digits(Sequence["tuple[Tensor, Tensor]"]):
    """Segments ``[7]`` and the digit."""

    def __init__(self, first: int, count: int) -> None:
        self.indices = range(first, first + count)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> "tuple[Tensor, Tensor]":  # type: ignore[override]
        import torch

        number = self.indices[index]
        lit = torch.tensor([(SEGMENTS[number % 10] >> bit) & 1 for bit in range(7)])
        noise = torch.randn(7, generator=torch.Generator().manual_seed(number))
        return lit + 0.3 * noise, torch.tensor(number % 10)


def main(config: DigitsConfig, worker: WorkerEnv | None = None) -> int:
    """Train, evaluate and write the weights."""
    import torch
    import torch.nn.functional as F

    from shoal.train.run import Run

    with Run.open(config=config, recipe="digits", immutable=IMMUTABLE, worker=worker) as run:
        torch.manual_seed(run.seed)
        model = new_model(config).to(run.world.device)
        ddp = run.data_parallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.keep(model=model, optimizer=optimizer)
        for step in run.steps(Digits(0, 1_000), config.train, until=config.train.total_steps):
            with step:
                for segments, digits in step:
                    loss = F.cross_entropy(ddp(segments), digits, reduction="sum")
                    step.backward(loss / step.num_samples)
                step.update(optimizer)
            if run.due(config.train.total_steps, evaluation=True):
                held_out = Digits(1_000, 200)
                segments, digits = (torch.stack(each) for each in zip(*held_out, strict=True))
                with torch.inference_mode():
                    right = (model(segments).argmax(1) == digits).float().mean().item()
                run.evaluation("validation", {"accuracy": right}, num_samples=len(held_out))
        return run.finish(lambda folder: torch.save(model.state_dict(), folder / "model.pt"))


def new_model(config: DigitsConfig) -> "nn.Module":
    """Return the network."""
    from torch import nn

    width = config.model.hidden_size
    return nn.Sequential(nn.Linear(7, width), nn.ReLU(), nn.Linear(width, 10))


def check(config: DigitsConfig, num_workers: int, dry_run: DryRun | None) -> list[str]:
    """Return the lines of a dry run."""
    return [*settings_lines(config), f"batch        {plan_batch(config.train, num_workers, unit='digits')}"]


def sample(config: DigitsConfig) -> Sample:
    """Return two digits and the network."""
    import torch

    with torch.device("meta"):
        model, segments = new_model(config), torch.empty(2, 7)
    return Sample(
        model=model,
        inputs={"segments": segments},
        loss=lambda model, inputs: model(inputs["segments"]).sum(),
        num_samples=2,
    )


def trial(config: DigitsConfig, folder: Path) -> DigitsConfig:
    """Return the settings unchanged: the data is synthetic."""
    return config


class Reading(Use):
    """Reads digits from files; a line has seven segments and, for scores, the digit."""

    Predict, Evaluate = PredictConfig, EvaluateConfig

    def read_model(self) -> None:
        from shoal.train.checkpoint import load_model

        source = self.find(self.settings.model)
        sizes = load_toml(required(source.run) / CONFIG_FILE)["model"]
        self.model = new_model(DigitsConfig(model=ModelConfig(**sizes)))
        load_model(required(source.checkpoint), self.model)

    def read(self, inputs: tuple[Path, ...]) -> list[list[list[float]]]:
        lines = (file.read_text().splitlines() for file in inputs)
        return [[[float(number) for number in line.split()] for line in each] for each in lines]

    def describe(self, data: list[list[float]]) -> str:
        return f"digits       {len(data)}"

    def outputs(self, data: list[list[float]]) -> list[int] | None:
        import torch

        with torch.inference_mode():
            read = self.model(torch.tensor([line[:7] for line in data])).argmax(1).tolist()
        return read if self.world.is_main else None

    def rows(self, data: list[list[float]], outputs: list[int]) -> Iterator[Row]:
        return ({"digit": digit} for digit in outputs)

    def check_evaluation(self, inputs: tuple[Path, ...]) -> list[str]:
        return [self.describe(each) for each in self.read(inputs)]

    def labelled(self, inputs: tuple[Path, ...]) -> list[list[list[float]]]:
        return self.read(inputs)

    def scores(self, data: list[list[float]], outputs: list[int]) -> str:
        right = sum(digit == line[7] for digit, line in zip(outputs, data, strict=True))
        return f"accuracy {right / len(data)}"


use = Reading
