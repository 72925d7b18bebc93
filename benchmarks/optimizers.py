"""Time of a step of LAMB, LARS or NovoGrad, against other libraries.

LAMB on the shapes of ALBERT-base and BERT-base, LARS on ResNet-50's, NovoGrad on Mask R-CNN's. timm's and
pytorch_optimizer's optimizers on the same shapes, weights and gradients, each in its faster form (``foreach``
on or off, measured first); the row's peer is the faster library. In LAMB timm clips the global norm as we
do; pytorch_optimizer clips nothing and does not correct the bias, so it does less. Memory traffic bounds the
step: weights, gradients and two moments (LARS and NovoGrad: one) are read, all but the gradients written, and
pass 2 reads again what has left the caches.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.harness import Benchmark, peer_module, settled_ms
from shoal.optim.lamb import Lamb, parameter_groups
from shoal.optim.lars import Lars
from shoal.optim.novograd import Novograd

_LR = 1e-4


def parameters_like(model: str) -> list[tuple[str, nn.Parameter]]:
    """Return random parameters with gradients, of a transformers or torchvision model's names and shapes."""
    with torch.device("meta"):
        if model == "resnet50":
            shapes = peer_module("torchvision.models").resnet50().named_parameters()
        elif model == "mask_rcnn":
            detection = peer_module("torchvision.models.detection")
            plain = {"weights": None, "weights_backbone": None}
            shapes = detection.maskrcnn_resnet50_fpn(**plain).named_parameters()
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


def faster_form(makes: dict[str, Callable[[], Optimizer]]) -> tuple[Callable[[], float], str]:
    """Return the fastest of some forms and its name, by three steps of each after one to warm up."""
    forms = {name: settled_ms(make().step) for name, make in makes.items()}
    for step in forms.values():
        step()
    medians = {name: statistics.median(step() for _ in range(3)) for name, step in forms.items()}
    best = min(medians, key=medians.__getitem__)
    return forms[best], best


def both(make: Callable[[bool], Optimizer]) -> dict[str, Callable[[], Optimizer]]:
    """Return the two forms of an optimizer that has ``foreach``."""
    return {f"foreach={foreach}": partial(make, foreach) for foreach in (False, True)}


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
            forms=both(make),
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
        add_row(bench, f"{model}, LARS", ours=ours, forms=both(make), library=library, target=2.5)


def compare_novograd(bench: Benchmark, model: str) -> None:
    """Add the rows of NovoGrad; ours corrects the bias, which the others cannot. timm's has one form only."""
    timm_optim, other = peer_module("timm.optim"), peer_module("pytorch_optimizer")
    options: dict[str, Any] = {"lr": _LR, "betas": (0.9, 0.25), "eps": 1e-7}

    def groups() -> list[dict[str, Any]]:
        split = parameter_groups(parameters_like(model), 1.25e-3)
        return [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in split]

    def timm_novograd() -> Optimizer:
        optimizer: Optimizer = timm_optim.NvNovoGrad(groups(), **options)
        return optimizer

    def other_novograd(foreach: bool) -> Optimizer:
        optimizer: Optimizer = other.NovoGrad(groups(), **options, foreach=foreach)
        return optimizer

    for library, forms in (("timm", {"a loop": timm_novograd}), ("pytorch_optimizer", both(other_novograd))):
        ours = Novograd(groups(), **options, bias_correction=True)
        add_row(bench, f"{model}, NovoGrad", ours=ours, forms=forms, library=library, target=2.5)


def add_row(
    bench: Benchmark,
    case: str,
    *,
    ours: Optimizer,
    forms: dict[str, Callable[[], Optimizer]],
    library: str,
    target: float | None,
) -> None:
    num_millions = sum(p.numel() for group in ours.param_groups for p in group["params"]) / 1e6
    name, _, detail = case.partition(", ")
    peer, form = faster_form(forms)
    bench.compare(
        f"{name}, {num_millions:.0f} M parameters, {bench.args.threads} threads" + (detail and f", {detail}"),
        ours=settled_ms(ours.step),
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
    options.add_argument("--only", nargs="+", choices=("lamb", "lars", "novograd"), help="default: all")
    bench = Benchmark("optimizers", options=options)
    torch.set_num_threads(bench.args.threads)
    rows = {
        "lamb": [partial(compare_lamb, bench, model) for model in ("albert-base", "bert-base")],
        "lars": [partial(compare_lars, bench, "resnet50")],
        "novograd": [partial(compare_novograd, bench, "mask_rcnn")],
    }
    for name in bench.args.only or rows:
        for add_rows in rows[name]:
            add_rows()
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
