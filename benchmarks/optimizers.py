"""How long does a step of LAMB (ALBERT-base, BERT-base) or LARS (ResNet-50) take, against other libraries?

timm's and pytorch_optimizer's optimizers on the same shapes, weights and gradients, each in its faster form
(``foreach`` on or off, measured first); the row's peer is the faster library. timm clips the global norm as
we do; pytorch_optimizer clips nothing and does not correct the bias, so it does less. Memory traffic bounds
the step: weights, gradients and two moments are read, three of them written, and pass 2 reads three again
where they have left the caches. LARS has one moment; its rows have no target yet.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.harness import Benchmark, peer_module
from shoal.optim.lamb import Lamb, parameter_groups
from shoal.optim.lars import Lars

_SETTLE_S = 0.01
"""The threads of torch's last operation spin for some milliseconds; neither side starts among them."""
_LR = 1e-4


def parameters_like(model: str) -> list[tuple[str, nn.Parameter]]:
    """Return random parameters with gradients, of a transformers or torchvision model's names and shapes."""
    with torch.device("meta"):
        if model == "resnet50":
            shapes = peer_module("torchvision.models").resnet50().named_parameters()
        elif model == "albert-base":
            transformers = peer_module("transformers")
            config = transformers.AlbertConfig(
                hidden_size=768, num_attention_heads=12, intermediate_size=3072, embedding_size=128
            )
            shapes = transformers.AlbertForPreTraining(config).named_parameters()
        else:
            transformers = peer_module("transformers")
            shapes = transformers.BertForPreTraining(transformers.BertConfig()).named_parameters()
    named = [(name, nn.Parameter(torch.randn(meta.shape) * 0.02)) for name, meta in shapes]
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return named


def settled_ms(optimizer: Optimizer) -> Callable[[], float]:
    def measure() -> float:
        time.sleep(_SETTLE_S)
        begin_s = time.perf_counter()
        optimizer.step()
        return (time.perf_counter() - begin_s) * 1e3

    return measure


def faster_form(make: Callable[[bool], Optimizer]) -> tuple[Callable[[], float], str]:
    """Return the faster of ``foreach`` on and off, by three steps of each after one to warm up."""
    forms = {f"foreach={foreach}": settled_ms(make(foreach)) for foreach in (False, True)}
    for step in forms.values():
        step()
    medians = {name: statistics.median(step() for _ in range(3)) for name, step in forms.items()}
    best = min(medians, key=medians.__getitem__)
    return forms[best], best


def compare_lamb(bench: Benchmark, model: str) -> None:
    """Add the rows of LAMB on the shapes of ``model``."""
    timm_optim, other = peer_module("timm.optim"), peer_module("pytorch_optimizer")
    named = parameters_like(model)

    def timm_lamb(foreach: bool) -> Optimizer:
        groups = parameter_groups(named, 0.01)
        optimizer: Optimizer = timm_optim.Lamb(groups, lr=_LR, max_grad_norm=1.0, foreach=foreach)
        return optimizer

    def other_lamb(foreach: bool) -> Optimizer:
        groups = parameter_groups(named, 0.01)
        optimizer: Optimizer = other.Lamb(groups, lr=_LR, weight_decouple=False, foreach=foreach)
        return optimizer

    # timm's clips the global norm in its step, which reads all gradients once more; the other does not
    for library, make, max_norm in (
        ("timm", timm_lamb, 1.0),
        ("pytorch_optimizer", other_lamb, None),
    ):
        add_row(
            bench,
            model + (", clipped" if max_norm else ""),
            ours=Lamb(parameter_groups(named, 0.01), lr=_LR, max_grad_norm=max_norm),
            make=make,
            library=library,
            target=2.5,
        )


def compare_lars(bench: Benchmark, model: str) -> None:
    """Add the rows of LARS; each side has its own parameters, since pytorch_optimizer changes gradients."""
    timm_optim, other = peer_module("timm.optim"), peer_module("pytorch_optimizer")

    def groups() -> list[dict[str, Any]]:
        return parameter_groups(parameters_like(model), 5e-5)

    def timm_lars(foreach: bool) -> Optimizer:
        optimizer: Optimizer = timm_optim.Lars(groups(), lr=_LR, momentum=0.9, foreach=foreach)
        return optimizer

    def other_lars(foreach: bool) -> Optimizer:
        optimizer: Optimizer = other.LARS(groups(), lr=_LR, momentum=0.9, foreach=foreach)
        return optimizer

    for library, make in (("timm", timm_lars), ("pytorch_optimizer", other_lars)):
        ours = Lars(groups(), lr=_LR, momentum=0.9)
        add_row(bench, f"{model}, LARS", ours=ours, make=make, library=library, target=None)


def add_row(
    bench: Benchmark,
    case: str,
    *,
    ours: Optimizer,
    make: Callable[[bool], Optimizer],
    library: str,
    target: float | None,
) -> None:
    num_millions = sum(p.numel() for group in ours.param_groups for p in group["params"]) / 1e6
    name, _, detail = case.partition(", ")
    peer, form = faster_form(make)
    bench.compare(
        f"{name}, {num_millions:.0f} M parameters, {bench.args.threads} threads" + (detail and f", {detail}"),
        ours=settled_ms(ours),
        peer=peer,
        peer_name=f"{library}, {form}",
        target=target,
        repetitions=8,
        quick_repetitions=3,
        warmup=2,
    )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of all sides")
    bench = Benchmark("optimizers", options=options)
    torch.set_num_threads(bench.args.threads)
    for model in ("albert-base", "bert-base"):
        compare_lamb(bench, model)
    compare_lars(bench, "resnet50")
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
