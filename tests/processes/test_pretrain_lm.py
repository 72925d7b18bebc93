"""Whole jobs of causal language models: scores, exports, kills, other numbers of workers, other starts."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pretrain_jobs as jobs
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from shoal import record
from shoal.data.text.prepare import PrepareConfig, prepare_text
from shoal.data.text.shards import TextShards
from shoal.errors import EXIT_OK, EXIT_USAGE, UsageError
from shoal.recipes.export import export_model
from shoal.recipes.lm import LmConfig
from shoal.recipes.prepared_text import read_manifest
from shoal.record import read_record

WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {"vocab_size": 96, "max_position_embeddings": 64}
MODELS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt_neox": GPTNeoXConfig(**COMMON, **WIDE),
    "llama": LlamaConfig(**COMMON, **WIDE, num_key_value_heads=2, attention_dropout=0.1),
    "qwen2": Qwen2Config(**COMMON, **WIDE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**COMMON, **WIDE, num_key_value_heads=2, head_dim=16),
    "gemma3": Gemma3TextConfig(
        **COMMON,
        **WIDE,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json of each kind."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        config.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def whole_run(data: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 workers that nothing interrupted, of a GPT-2 with dropout."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert jobs.run(with_dropout(data, models, run_dir)) == [EXIT_OK] * 2
    return run_dir


def with_dropout(data: Path, models: Path, run_dir: Path, **changes: dict[str, Any]) -> LmConfig:
    """Return the settings of a small GPT-2 with its own dropout."""
    model = {"dropout": None, **changes.pop("model", {})}
    return jobs.small_lm_config(data, models / "gpt2" / "config.json", run_dir, model=model, **changes)


def last_scores(run_dir: Path) -> record.Evaluation:
    return [row for row in read_record(run_dir) if isinstance(row, record.Evaluation)][-1]


def scores_by_transformers(model: PreTrainedModel, data: Path, length: int, limit: int) -> dict[str, float]:
    """Return the scores of held-out text, one document at a time, by transformers' own loss.

    The blocks are cut here from the stream of the text, at the places where the run began.
    """
    from shoal.data.steps import evenly_spread
    from shoal.data.text.blocks import BlockConfig, BlockReader

    shards = TextShards(data, "validation")
    (tokenizer, end) = Tokenizer.from_file(str(data / "tokenizer.json")), shards.manifest.sep_id
    reader = BlockReader(shards, BlockConfig(block_length=length, seed=42))
    blocks = reader.batch(0, evenly_spread(reader.num_examples, limit))
    loss = torch.zeros((), dtype=torch.float64)
    num_targets = num_bytes = num_correct = 0
    for ids, last in zip(blocks["input_ids"], blocks["labels"][:, -1], strict=True):
        row = [*ids.tolist(), *([] if last < 0 else [int(last)])]
        cuts = [0, *(at + 1 for at, token in enumerate(row) if token == end), len(row)]
        for begin, stop in pairwise(cuts):
            document = torch.tensor([row[begin:stop]])
            if stop - begin < 2:
                continue
            with torch.no_grad():
                out = model(input_ids=document, labels=document)
            loss += out.loss.double() * (stop - begin - 1)
            num_targets += stop - begin - 1
            num_correct += int((out.logits[0, :-1].argmax(-1) == document[0, 1:]).sum())
            num_bytes += len(tokenizer.decode([t for t in row[begin + 1 : stop] if t != end]).encode())
    mean = float(loss) / num_targets
    return {
        "lm_loss": mean,
        "perplexity": math.exp(mean),
        "bits_per_byte": float(loss) / math.log(2) / num_bytes,
        "lm_accuracy": num_correct / num_targets,
    }


@pytest.mark.parametrize("name", MODELS)
def test_any_model_is_trained_scored_and_exported(
    name: str, data: Path, models: Path, tmp_path: Path
) -> None:
    config = jobs.small_lm_config(data, models / name / "config.json", tmp_path / "run")
    assert jobs.run(config, 1) == [EXIT_OK]
    losses = jobs.losses(tmp_path / "run")
    assert losses[12] < losses[1] - 0.3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "transformers").eval()
    row = last_scores(tmp_path / "run")
    wanted = scores_by_transformers(model, data, 32, 32)
    assert row.metrics.keys() == wanted.keys()
    assert row.metrics == pytest.approx(wanted, rel=2e-6)
    again = AutoModelForCausalLM.from_pretrained(export_model(tmp_path / "run")).eval()
    ids = torch.arange(40).reshape(2, 20)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_exported_tokenizer_puts_nothing_around_texts(whole_run: Path, data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(whole_run / "transformers")
    end = TextShards(data, "train").manifest.sep_id
    assert tokenizer.eos_token_id == end
    ids = tokenizer("The river and the moon.")["input_ids"]
    plain = Tokenizer.from_file(str(data / "tokenizer.json"))
    assert ids == plain.encode("The river and the moon.", add_special_tokens=False).ids
    model = AutoModelForCausalLM.from_pretrained(whole_run / "transformers")
    assert model.generation_config.eos_token_id == end


@pytest.mark.parametrize("pipeline", [1, 2], ids=["replicas", "stages"])
def test_the_best_model_is_exported(pipeline: int, data: Path, models: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = with_dropout(
        data, models, run_dir,
        optim={"learning_rate": 0.5, "warmup_steps": 6},
        parallel={"pipeline": pipeline},
        run={"validation_frequency": 2, "keep_best": "lm_loss", "keep_checkpoints": 1},
    )  # fmt: skip
    assert jobs.run(config) == [EXIT_OK] * 2
    scores = {row.step: row.metrics for row in read_record(run_dir) if isinstance(row, record.Evaluation)}
    best = min(scores, key=lambda step: scores[step]["lm_loss"])
    assert best != 12
    model = AutoModelForCausalLM.from_pretrained(run_dir / "transformers")
    wanted = scores_by_transformers(model, data, 32, config.run.validation_samples)
    assert scores[best]["lm_loss"] == pytest.approx(wanted["lm_loss"], rel=1e-5)


def test_a_killed_run_continues_bitwise(data: Path, models: Path, whole_run: Path, tmp_path: Path) -> None:
    config = with_dropout(data, models, tmp_path / "run", run={"checkpoint_frequency": 1})
    workers = jobs.start(config, 2)
    jobs.wait_for_step(tmp_path / "run", 5, workers)
    jobs.kill(workers)
    assert jobs.run(config) == [EXIT_OK] * 2
    assert any(isinstance(row, record.Resume) for row in read_record(tmp_path / "run"))
    assert jobs.losses(tmp_path / "run") == jobs.losses(whole_run)
    files = [path / "transformers" / "model.safetensors" for path in (tmp_path / "run", whole_run)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_losses_do_not_depend_on_the_workers(
    num_workers: int, data: Path, models: Path, whole_run: Path, tmp_path: Path
) -> None:
    """Dropout is on: its masks belong to blocks."""
    config = with_dropout(data, models, tmp_path / "run")
    assert jobs.run(config, num_workers) == [EXIT_OK] * num_workers
    assert jobs.losses(tmp_path / "run") == pytest.approx(jobs.losses(whole_run), rel=2e-5)
    assert last_scores(tmp_path / "run").metrics == pytest.approx(last_scores(whole_run).metrics, rel=2e-5)


def test_muon_has_the_same_bits_with_divided_state_and_after_a_kill(
    data: Path, models: Path, tmp_path: Path
) -> None:
    optim = {"optimizer": "muon"}
    whole = with_dropout(data, models, tmp_path / "whole", optim=optim)
    assert jobs.run(whole) == [EXIT_OK] * 2
    losses = jobs.losses(tmp_path / "whole")
    assert losses[12] < losses[1] - 0.3
    divided = with_dropout(
        data,
        models,
        tmp_path / "divided",
        optim=optim,
        train={"shard_optimizer": True},
        run={"checkpoint_frequency": 1},
    )
    workers = jobs.start(divided, 2)
    jobs.wait_for_step(tmp_path / "divided", 5, workers)
    jobs.kill(workers)
    assert jobs.run(divided) == [EXIT_OK] * 2
    assert any(isinstance(row, record.Resume) for row in read_record(tmp_path / "divided"))
    assert jobs.losses(tmp_path / "divided") == losses
    files = [tmp_path / name / "transformers" / "model.safetensors" for name in ("whole", "divided")]
    assert files[0].read_bytes() == files[1].read_bytes()
    three = with_dropout(data, models, tmp_path / "three", optim=optim, train={"shard_optimizer": True})
    assert jobs.run(three, 3) == [EXIT_OK] * 3
    assert jobs.losses(tmp_path / "three") == pytest.approx(losses, rel=2e-3)  # Muon rounds to bf16


def test_recomputed_activations_change_nothing(
    data: Path, models: Path, whole_run: Path, tmp_path: Path
) -> None:
    config = with_dropout(
        data, models, tmp_path / "run", model={"activation_checkpointing": True}, train={"total_steps": 4}
    )
    assert jobs.run(config) == [EXIT_OK] * 2
    whole = {step: loss for step, loss in jobs.losses(whole_run).items() if step <= 2}  # the rate is the same
    assert {step: jobs.losses(tmp_path / "run")[step] for step in whole} == pytest.approx(whole, rel=1e-6)


def test_a_directory_starts_with_its_weights_and_its_own_end_token(
    data: Path, whole_run: Path, tmp_path: Path
) -> None:
    """A run of another run's export begins at the loss at which that ended."""
    config = jobs.small_lm_config(
        data, whole_run, tmp_path / "run", optim={"warmup_steps": 1}, train={"total_steps": 1}
    )  # a warm-up of the whole run: the rate is 0
    assert jobs.run(config, 1) == [EXIT_OK]
    assert last_scores(tmp_path / "run").metrics == pytest.approx(last_scores(whole_run).metrics, rel=1e-6)
    model = AutoModelForCausalLM.from_pretrained(whole_run / "transformers")
    model.config.eos_token_id = model.config.bos_token_id = 7
    model.save_pretrained(tmp_path / "other")
    other = jobs.small_lm_config(data, tmp_path / "other", tmp_path / "refused")
    assert jobs.run(other, 1) == [EXIT_USAGE]
    said = (tmp_path / "refused" / "worker-0.log").read_text()
    assert "documents end with token" in said and "with 7: prepare the text with the model's own" in said


def test_a_byte_level_tokenizer_with_one_special_token_goes_all_the_way(models: Path, tmp_path: Path) -> None:
    """GPT-2's kind: documents are whole, the end token is the only special one, other recipes refuse."""
    jobs.small_text(tmp_path / "articles.txt")
    made = ByteLevelBPETokenizer()
    made.train([str(tmp_path / "articles.txt")], vocab_size=290, special_tokens=["<|endoftext|>"])
    made.save(str(tmp_path / "made.json"))
    options: dict[str, Any] = {"out": tmp_path / "text", "validation": 0.2, "processes": 1}
    options |= {"sources": (str(tmp_path / "articles.txt"),), "tokenizer": str(tmp_path / "made.json")}
    with pytest.raises(UsageError, match=r"end_token '</s>' is no token of"):
        prepare_text(PrepareConfig(**{**options, "out": tmp_path / "no"}, end_token="</s>"), progress=False)
    manifest = prepare_text(PrepareConfig(**options, end_token="<|endoftext|>"), progress=False)
    shards = TextShards(tmp_path / "text", "train")
    articles = (tmp_path / "articles.txt").read_text().splitlines()
    texts = [made.decode(shards.document(n)[0].tolist()) for n in range(shards.num_documents)]
    assert manifest.sep_id == 0 and set(texts) < set(articles) and len(texts) > 40
    with pytest.raises(UsageError, match=r"prepared with --end-token, for causal language models"):
        read_manifest(jobs.small_config(tmp_path / "text", tmp_path / "bert").data)
    config = jobs.small_lm_config(
        tmp_path / "text", models / "llama" / "config.json", tmp_path / "run", model={"vocab_size": 290}
    )
    assert jobs.run(config, 1) == [EXIT_OK]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "transformers").eval()
    wanted = scores_by_transformers(model, tmp_path / "text", 32, 32)
    assert last_scores(tmp_path / "run").metrics == pytest.approx(wanted, rel=2e-6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "transformers")
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer(articles[0])["input_ids"] == made.encode(articles[0]).ids
