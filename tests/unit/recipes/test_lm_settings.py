"""Settings of causal language models: sizes of presets, schedules, and what is refused before a start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from shoal.errors import UsageError
from shoal.models.causal import CausalLM, new_causal
from shoal.optim.lr_schedules import learning_rate
from shoal.recipes import lm
from shoal.recipes.lm import DataConfig, LmConfig, LmOptimConfig, ModelConfig, sample
from shoal.recipes.memory import MemoryCount, state_bytes
from shoal.recipes.workloads import flops_per_sample, preset_settings, workload_name
from shoal.train.config import ServersConfig, TrainConfig
from shoal.train.optimizers import build_optimizers
from synthetic_text import SEP, prepare, random_documents

PARAMETERS = {"gpt2-124m": 124_439_808, "llama-1b": 1_235_814_400, "llama-8b": 8_030_261_248}
"""Those of the published models."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    documents = random_documents([300] * 20, vocab_size=2_048)
    prepare(folder, {"train": documents[:16], "validation": documents[16:]}, vocab_size=2_048)
    return folder


def config(text: Path, source: str | Path = "tiny", **model: object) -> LmConfig:
    return LmConfig(
        model=ModelConfig(source=Path(source), **model),  # type: ignore[arg-type]
        data=DataConfig(path=text, block_length=64),
        train=TrainConfig(total_steps=10, global_batch_size=8),
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_sizes_of_the_published_models(name: str) -> None:
    assert lm.sample(preset_settings("lm", name)).num_parameters == PARAMETERS[name]


def test_shards_gather_two_layers_and_what_is_in_no_layer() -> None:
    layer = 2 * 2048 * (2048 + 512) + 3 * 2048 * 8192 + 2 * 2048
    left = 14 * layer / PARAMETERS["llama-1b"]
    assert lm.sample(preset_settings("lm", "llama-1b")).gathered == pytest.approx(1 - left, rel=1e-12)


@pytest.mark.parametrize("name", lm.PRESETS)
def test_the_files_of_a_preset_are_those_of_its_model(name: str) -> None:
    settings = preset_settings("lm", name)
    assert str(settings.model.source) == name
    sizes = json.loads(lm.source_of(settings.model).read_text())
    assert settings.data.block_length <= sizes.get("max_position_embeddings", sizes.get("n_positions"))
    assert settings.optim.options()["beta2"] == 0.95


def test_the_planner_names_a_model_after_its_recipe() -> None:
    assert [workload_name("lm", name) for name in lm.PRESETS] == [f"lm-{name}" for name in lm.PRESETS]


def test_wsd_stays_at_the_rate_and_decays_at_the_end() -> None:
    optim = LmOptimConfig(learning_rate=1.0, warmup_steps=10, schedule="wsd", decay_share=0.2)
    rates = [learning_rate(optim.schedule_of(100), step) for step in (0, 5, 10, 79, 80, 90, 100)]
    assert rates == pytest.approx([0, 0.5, 1, 1, 1, 0.5, 0])
    cosine = replace(optim, schedule="cosine", end_learning_rate=0.1).schedule_of(100)
    rates = [learning_rate(cosine, step) for step in (5, 10, 55, 100)]
    assert rates == pytest.approx([0.5, 1, 0.55, 0.1])
    with pytest.raises(UsageError, match=r"optim\.warmup_steps 85 and optim\.decay_share 0\.2 are more"):
        replace(optim, warmup_steps=85).schedule_of(100)


def test_a_dry_run_counts_blocks_and_parameters(text: Path) -> None:
    lines = "\n".join(lm.check(config(text), 2, MemoryCount()))
    assert "5,120 tokens in blocks of 64, about 1.1 times the 4,816 tokens" in lines
    assert "parameters   656,000" in lines and "memory  " in lines
    assert lm.check(config(text), 2, None) == []


def test_a_dry_run_counts_one_moment_of_what_muon_updates(text: Path) -> None:
    """The state is that of the optimizers after a step."""
    whole = config(text)
    settings = replace(whole, optim=LmOptimConfig(optimizer="muon"))
    model = CausalLM(new_causal(lm.read_sizes(whole, lm.source_of(whole.model))))
    made = build_optimizers(model.named_parameters(), settings.optim, model.hidden_matrices())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in made.values():
        optimizer.step()
    states = [state for optimizer in made.values() for state in optimizer.state.values()]
    kept = sum(tensor.nbytes for state in states for tensor in state.values() if tensor.ndim)
    counted = state_bytes(settings, model) * sum(p.numel() for p in model.parameters())
    assert counted == pytest.approx(kept)
    assert state_bytes(whole, model) == 8


def test_random_weights_have_the_end_token_and_the_dropout_of_the_run(text: Path) -> None:
    settings = config(text, "gpt2-124m")
    sizes = lm.read_sizes(settings, lm.source_of(settings.model))
    assert (sizes.eos_token_id, sizes.resid_pdrop, sizes.attn_pdrop, sizes.embd_pdrop) == (SEP, 0, 0, 0)
    settings = config(text, "gpt2-124m", dropout=None, vocab_size=2_050)
    sizes = lm.read_sizes(settings, lm.source_of(settings.model))
    assert (sizes.resid_pdrop, sizes.vocab_size) == (0.1, 2_050)


def test_what_does_not_go_together_is_refused_before_a_start(text: Path, tmp_path: Path) -> None:
    whole = config(text)
    for settings, said in (
        (replace(whole, model=ModelConfig()), "model.source is not set: name a transformers directory"),
        (config(text, "no/such"), "no/such does not exist"),
        (config(text, vocab_size=100), "vocabulary of 2048 tokens, the model one of 100"),
        (
            replace(whole, data=replace(whole.data, block_length=512)),
            "data.block_length 512 is more than the 256 positions",
        ),
        (replace(whole, train=replace(whole.train, global_batch_size=9)), "global_batch_size 9"),
        (replace(whole, data=DataConfig()), "data.path is not set"),
    ):
        with pytest.raises(UsageError, match=said):
            lm.check(settings, 2, None)
    (tmp_path / "config.json").write_text(lm.source_of(ModelConfig(source=Path("gpt2-124m"))).read_text())
    with pytest.raises(UsageError, match=rf"end with token {SEP}, those of the model .* with 50256"):
        lm.check(config(text, tmp_path), 2, None)
    with pytest.raises(UsageError, match=r"model\.vocab_size 3000 is for random weights"):
        lm.check(config(text, tmp_path, vocab_size=3_000), 2, None)
    with pytest.raises(UsageError, match=r"optim\.optimizer muon with servers\.mode sync: servers"):
        replace(whole, optim=LmOptimConfig(optimizer="muon"), servers=ServersConfig(mode="sync"))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_step_is_counted_without_values(kind: str, tmp_path: Path) -> None:
    """`shoal bench train lm` and `shoal plan` count on the meta device, where positions have no values."""
    source = Path("tiny")
    if kind == "gpt2":
        GPT2Config(vocab_size=2_048, n_embd=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
        source = tmp_path / "config.json"
    counted = sample(LmConfig(model=ModelConfig(source=source), data=DataConfig(block_length=64)))
    sizes = counted.model.weights.config
    head = counted.model.weights.lm_head.weight
    layers = (w for n, w in counted.model.named_parameters() if w.ndim == 2 and ".wpe" not in n)
    in_matrices = sum(w.numel() for w in layers if w is not head) + head.numel()
    if head is not counted.model.weights.get_input_embeddings().weight:
        in_matrices -= head.numel()
    attention = 4 * sizes.num_hidden_layers * 64**2 * sizes.hidden_size
    assert flops_per_sample(counted) == 3 * (2 * 64 * in_matrices + attention)
