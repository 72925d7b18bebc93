"""How long does a LAMB step take on the shapes of ALBERT-base and BERT-base, against other libraries?

timm's and pytorch_optimizer's LAMB on the same shapes, weights and gradients, each in its faster form
(``foreach`` on or off, measured first); the row's peer is the faster library. timm clips the global norm as
we do; pytorch_optimizer clips nothing and does not correct the bias, so it does less. Memory traffic bounds
the step: weights, gradients and two moments are read, three of them written, and pass 2 reads three again
where they have left the caches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.harness import Benchmark, peer_module
from shoal.optim.lamb import Lamb, parameter_groups

_SETTLE_S = 0.01
"""The threads of torch's last operation spin for some milliseconds; neither side starts among them."""
_LR = 1e-4


def parameters_like(model: str) -> list[tuple[str, nn.Parameter]]:
    """Return random parameters with gradients, of the names and shapes of a transformers model."""
    transformers = peer_module("transformers")
    with torch.device("meta"):
        if model == "albert-base":
            config = transformers.AlbertConfig(
                hidden_size=768, num_attention_heads=12, intermediate_size=3072, embedding_size=128
            )
            shapes = transformers.AlbertForPreTraining(config).named_parameters()
        else:
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


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of all sides")
    bench = Benchmark("optimizers", options=options)
    torch.set_num_threads(bench.args.threads)
    timm_optim, other = peer_module("timm.optim"), peer_module("pytorch_optimizer")

    for model in ("albert-base", "bert-base"):
        named = parameters_like(model)

        def timm_lamb(foreach: bool, named: list[tuple[str, nn.Parameter]] = named) -> Optimizer:
            groups = parameter_groups(named, 0.01)
            optimizer: Optimizer = timm_optim.Lamb(groups, lr=_LR, max_grad_norm=1.0, foreach=foreach)
            return optimizer

        def other_lamb(foreach: bool, named: list[tuple[str, nn.Parameter]] = named) -> Optimizer:
            groups = parameter_groups(named, 0.01)
            optimizer: Optimizer = other.Lamb(groups, lr=_LR, weight_decouple=False, foreach=foreach)
            return optimizer

        num_millions = sum(parameter.numel() for _, parameter in named) / 1e6
        # timm's clips the global norm in its step, which reads all gradients once more; the other does not
        for library, make, max_norm in (
            ("timm", timm_lamb, 1.0),
            ("pytorch_optimizer", other_lamb, None),
        ):
            ours = settled_ms(Lamb(parameter_groups(named, 0.01), lr=_LR, max_grad_norm=max_norm))
            peer, form = faster_form(make)
            bench.compare(
                f"{model}, {num_millions:.0f} M parameters, {bench.args.threads} threads"
                + (", clipped" if max_norm else ""),
                ours=ours,
                peer=peer,
                peer_name=f"{library}, {form}",
                target=2.5,
                repetitions=8,
                quick_repetitions=3,
                warmup=2,
            )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
