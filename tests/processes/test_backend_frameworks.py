"""transformers' Trainer, Accelerate and Lightning train on our backend, to the same weights as on gloo.

What a user does: Lightning takes the name (``DDPStrategy(process_group_backend="shoal")``). Accelerate, and
with it the Trainer, knows only gloo for training on CPUs and refuses another ``ddp_backend``, but it keeps a
group that exists: call ``dist.init_process_group("shoal")`` before them and leave ``ddp_backend`` out.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shoal_workers import ops
from torch import Tensor, nn

import shoal.comm
from forked import fork_process, wait_for

pytestmark = pytest.mark.usefixtures("both_groups_or_native")

SIZE = 2
STEPS = 3


def rows() -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(10, generator=random), "labels": torch.randn(2, generator=random)}
        for _ in range(4 * SIZE * STEPS)
    ]


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.layers(x)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


def transformers_trainer(backend: str, meeting: str, rank: int, folder: Path) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=SIZE)
    arguments = TrainingArguments(
        output_dir=str(folder / backend),
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=0.01,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=Regression(), args=arguments, train_dataset=rows())
    assert trainer.args.world_size == SIZE
    trainer.train()
    return trainer.model


def accelerate_loop(backend: str, meeting: str, rank: int, folder: Path) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=SIZE)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == SIZE
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(rows(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    seen = accelerator.gather_for_metrics(torch.tensor([float(rank)]))
    assert seen.tolist() == [0, 1]
    return accelerator.unwrap_model(model)


def lightning_trainer(backend: str, meeting: str, rank: int, folder: Path) -> nn.Module:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Regression()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = self.model(**batch)["loss"]
            self.log("loss", loss, sync_dist=True)
            self.log("mean loss", loss, on_epoch=True, on_step=True, sync_dist=True)
            self.log("rows", len(batch["x"]) * (index + self.global_rank), on_epoch=True, sync_dist=True)
            self.log("most", self.global_rank, on_epoch=True, sync_dist=True, reduce_fx="max")
            return loss

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            self.log("validation", self.model(**batch)["loss"], sync_dist=True)  # an epoch's mean
            self.log("index", index, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=SIZE,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Module()
    loaders = [torch.utils.data.DataLoader(rows(), batch_size=4) for _ in range(2)]
    trainer.fit(module, *loaders)
    assert trainer.world_size == SIZE
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["most"] == 1
    assert {"loss", "mean loss_epoch", "rows", "validation", "index"} <= metrics.keys()
    path = folder / f"metrics-{rank}.json"
    if backend == "gloo":
        path.write_text(json.dumps(metrics))
    else:
        assert metrics == json.loads(path.read_text()), "the metrics are those of gloo"
    return module.model


Train = Callable[[str, str, int, Path], nn.Module]


def _launch(train: Train, module: str, port: int, folder: Path) -> None:
    """Import the framework once, then fork the workers."""
    warnings.simplefilter("ignore")
    importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_worker, args=(train, rank, port, folder)) for rank in range(SIZE)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(max(abs(worker.exitcode or 0) for worker in workers))


def _worker(train: Train, rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    shoal.comm.register()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(SIZE),
        LOCAL_WORLD_SIZE=str(SIZE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        TORCHELASTIC_RUN_ID="test",  # how Lightning knows that its workers have been started for it
        ACCELERATE_USE_CPU="true",
    )
    found = {}
    for backend in ("gloo", "shoal"):
        model = train(backend, f"file://{folder}/{backend}-meeting", rank, folder)
        assert dist.get_backend() == backend
        if backend == "shoal":
            assert ops("all_reduce") >= STEPS
        found[backend] = {name: value.clone() for name, value in model.state_dict().items()}
        dist.destroy_process_group()
    fresh = Regression().state_dict()
    for name, value in found["gloo"].items():
        assert torch.equal(found["shoal"][name], value), name
        assert not torch.equal(fresh[name], value), f"{name} was not trained"
    (folder / f"done{rank}").touch()


@pytest.mark.parametrize(
    ("train", "module"),
    [
        (transformers_trainer, "transformers.trainer"),
        (accelerate_loop, "accelerate"),
        (lightning_trainer, "lightning.pytorch"),
    ],
    ids=["Trainer", "Accelerate", "Lightning"],
)
def test_frameworks_train_as_on_gloo(tmp_path: Path, train: Train, module: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert wait_for([fork_process(_launch, train, module, port, tmp_path)], 240) == [0]
    assert all((tmp_path / f"done{rank}").exists() for rank in range(SIZE))
