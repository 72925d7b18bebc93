"""Settings choose an optimizer with its options and groups, and are refused where it does not have them."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pydantic
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.errors import UsageError
from shoal.models.causal import CausalLM
from shoal.optim.lamb import Lamb
from shoal.optim.lans import Lans
from shoal.optim.lars import Lars
from shoal.optim.lr_schedules import set_learning_rate
from shoal.optim.novograd import Novograd
from shoal.recipes.lm import LmOptimConfig
from shoal.train.config import as_tree
from shoal.train.optim_config import (
    OPTIMIZERS,
    OptimizerConfig,
    TextOptimizerConfig,
    VisionOptimizerConfig,
    defaults_of,
)
from shoal.train.optimizers import build_optimizer, build_optimizers


def small_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def built(**options: Any) -> torch.optim.Optimizer:
    return build_optimizer(small_model().named_parameters(), VisionOptimizerConfig(**options), 0.5)


def groups_of(optimizer: torch.optim.Optimizer, *names: str) -> list[tuple[Any, ...]]:
    return [(len(g["params"]), *(g.get(name) for name in names)) for g in optimizer.param_groups]


@pytest.mark.parametrize("config", [TextOptimizerConfig, VisionOptimizerConfig, LmOptimConfig])
def test_settings_have_the_options_of_their_own_optimizers(config: type[OptimizerConfig]) -> None:
    choices = get_args(get_type_hints(config)["optimizer"])
    options = {field.name for field in fields(config) if "optimizer_default" in field.metadata}
    assert options == {name for choice in choices for name in defaults_of(choice)}
    for choice in choices:
        assert issubclass(config, OPTIMIZERS[choice])
        given = config(optimizer=choice, **defaults_of(choice))
        assert given.options() == config(optimizer=choice).options() == defaults_of(choice)


def test_sgd_is_torchs_with_nesterovs_momentum() -> None:
    optimizer = built()
    assert isinstance(optimizer, torch.optim.SGD)
    assert groups_of(optimizer, "lr", "weight_decay", "momentum", "nesterov", "fused") == [
        (2, 0.5, 1e-4, 0.9, True, True),
        (4, 0.5, 0.0, 0.9, True, True),
    ]
    still = built(optimizer="sgd", momentum=0.0)
    assert groups_of(still, "momentum", "nesterov") == [(2, 0.0, False), (4, 0.0, False)]
    assert not built(optimizer="sgd", nesterov=False).param_groups[0]["nesterov"]


def test_lars_leaves_norms_and_biases_alone_but_in_the_form_of_the_paper() -> None:
    for form, eta, kind in (("mlperf", 1e-3, "lars"), ("larc", 0.013, "larc")):
        optimizer = built(optimizer="lars", lars_form=form, trust_coefficient=eta, weight_decay=2e-4)
        assert isinstance(optimizer, Lars)
        assert (optimizer.form, optimizer.nesterov) == (kind, False)
        assert groups_of(optimizer, "weight_decay", "trust_ratio", "eta", "momentum") == [
            (2, 2e-4, True, eta, 0.9),
            (4, 0.0, False, eta, 0.9),
        ]
    paper = built(optimizer="lars", lars_form="paper", momentum=0.8, nesterov=True, weight_decay=2e-4)
    assert isinstance(paper, Lars)
    assert (paper.form, paper.nesterov) == ("lars", True)
    assert groups_of(paper, "weight_decay", "trust_ratio", "momentum") == [
        (2, 2e-4, True, 0.8),
        (4, 2e-4, True, 0.8),
    ]


def test_novograd_with_the_variants_of_the_mask_rcnn_runs() -> None:
    optimizer = built(optimizer="novograd", beta2=0.35, grad_averaging=True)
    assert isinstance(optimizer, Novograd)
    names = ("betas", "eps", "bias_correction", "reg_inside_moment", "grad_averaging", "init_zero")
    assert groups_of(optimizer, *names)[0] == (2, (0.9, 0.35), 1e-7, True, True, True, False)


def test_biases_may_have_a_rate_of_their_own() -> None:
    optimizer = built(optimizer="novograd", bias_rate=2.0, weight_decay=1e-3)
    expected = [(2, 0.5, 1e-3), (1, 0.5, 0.0), (3, 1.0, 0.0)]  # weights, the norm's weight, all biases
    assert groups_of(optimizer, "lr", "weight_decay") == expected
    set_learning_rate(optimizer, 0.07)
    assert [group["lr"] for group in optimizer.param_groups] == [0.07, 0.07, 0.14]
    set_learning_rate(optimizer, 0.0)
    set_learning_rate(optimizer, 0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01, 0.02]
    with_step = built(optimizer="sgd", bias_rate=0.0)
    before = [p.detach().clone() for group in with_step.param_groups for p in group["params"]]
    for group in with_step.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    with_step.step()
    after = [p.detach() for group in with_step.param_groups for p in group["params"]]
    moved = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    assert moved == [True, True, True, False, False, False]


def test_those_that_were_there_are_as_they_were() -> None:
    model = small_model()
    lamb = build_optimizer(model.named_parameters(), TextOptimizerConfig(bias_correction=False), 0.5)
    assert isinstance(lamb, Lamb)
    names = ("betas", "eps", "weight_decay", "bias_correction", "trust_ratio")
    assert groups_of(lamb, *names) == [
        (2, (0.9, 0.999), 1e-6, 0.01, False, True),
        (4, (0.9, 0.999), 1e-6, 0.0, False, False),
    ]
    for name, kind in (("lans", Lans), ("adamw", torch.optim.AdamW)):
        optimizer = build_optimizer(model.named_parameters(), TextOptimizerConfig(optimizer=name, beta2=0.99))
        assert isinstance(optimizer, kind)
        assert groups_of(optimizer, "betas", "eps", "weight_decay", "trust_ratio") == [
            (2, (0.9, 0.99), 1e-6, 0.01, None),
            (4, (0.9, 0.99), 1e-6, 0.0, None),
        ]


def test_only_what_was_given_is_written_beside_the_run() -> None:
    tree = as_tree(VisionOptimizerConfig(optimizer="lars", momentum=0.8))
    assert (tree["optimizer"], tree["momentum"]) == ("lars", 0.8)
    assert not {"nesterov", "beta1", "lars_form", "init_zero"} & set(tree)


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (TextOptimizerConfig, {"optimizer": "adafactor", "beta1": 0.9},
         "optim.beta1 0.9 is not an option of adafactor: .* --optim.optimizer lamb or lans or adamw$"),
        (TextOptimizerConfig, {"optimizer": "adamw", "bias_correction": False},
         "optim.bias_correction False is not an option of adamw: .* --optim.optimizer lamb$"),
        (VisionOptimizerConfig, {"optimizer": "sgd", "trust_coefficient": 0.1},
         "optim.trust_coefficient 0.1 is not an option of sgd: .* --optim.optimizer lars$"),
        (VisionOptimizerConfig, {"optimizer": "novograd", "momentum": 0.9},
         "optim.momentum 0.9 is not an option of novograd: .* --optim.optimizer sgd or lars$"),
        (VisionOptimizerConfig, {"optimizer": "lars", "init_zero": False}, "init_zero False .* novograd$"),
        (VisionOptimizerConfig, {"bias_rate": -1.0}, "optim.bias_rate -1.0 must be a number of at least 0"),
    ],
)  # fmt: skip
def test_options_of_other_optimizers_are_refused(config: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "sgd", "momentum": 1.5}, "momentum=1.5"),
        ({"optimizer": "sgd", "weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"optimizer": "adamw", "beta2": 1.5}, "beta2=1.5"),
        ({"optimizer": "lars", "momentum": 1.5}, "momentum=1.5"),
    ],
)
def test_values_out_of_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        built(**given)


def test_muon_updates_the_matrices_of_layers_and_adamw_all_else() -> None:
    """The bits are those of torch's two optimizers; steps of matrices have about equal singular values."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(2)
    ours = CausalLM(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)))
    theirs = copy.deepcopy(ours)
    config = LmOptimConfig(optimizer="muon", weight_decay=0.1, beta2=0.95, muon_momentum=0.9)
    made = build_optimizers(ours.named_parameters(), config, ours.hidden_matrices())
    layers = [p for n, p in theirs.named_parameters() if ".layers." in n and p.ndim == 2]
    others = [p for n, p in theirs.named_parameters() if not (".layers." in n and p.ndim == 2)]
    assert len(layers) == 2 * 7 and len(others) == 2 + 2 * 2 + 1
    groups = [{"params": [p for p in others if p.ndim == 2], "weight_decay": 0.1}]
    groups += [{"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0}]
    scaled = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    wanted = [
        torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-6, fused=True),
        torch.optim.Muon(layers, lr=0.01, momentum=0.9, **scaled),
    ]
    assert list(made) == ["optimizer", "muon"]
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    for step in range(3):
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.grad = torch.randn(own.shape, generator=torch.Generator().manual_seed(step))
            other.grad = own.grad.clone()
        for each in made.values():
            set_learning_rate(each, 0.01)
        for each in (*made.values(), *wanted):
            each.step()
        if step == 0:
            name = "weights.model.layers.1.mlp.up_proj.weight"
            change = before[name] * (1 - 0.01 * 0.1) - dict(ours.named_parameters())[name].detach()
            values = torch.linalg.svdvals(change / (0.01 * 0.2 * 48**0.5))
            assert float(values.min()) > 0.5 and float(values.max()) < 1.3
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other)
    assert list(build_optimizers(ours.named_parameters(), LmOptimConfig(), set())) == ["optimizer"]


def test_settings_are_read_in_a_process_that_has_pydantic() -> None:
    """Cyclopts then checks dataclasses by it, and pydantic reads fields' metadata as its own."""
    given: dict[str, Any] = {"optimizer": "adamw", "beta2": 0.95}
    assert pydantic.TypeAdapter(TextOptimizerConfig).validate_python(given) == TextOptimizerConfig(**given)
