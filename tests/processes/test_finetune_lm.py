"""Whole finetunings of causal models on conversations: scores, exports, adapters, kills, other workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import job_workers as jobs
import pretrain_jobs
import pytest
import torch
import use_jobs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

import finetune_made as made
from forked import shoal
from shoal import record
from shoal.data.text.conversations import ChatTokenizer, Conversation
from shoal.errors import EXIT_OK, EXIT_USAGE
from shoal.recipes import lm_finetune
from shoal.recipes.memory import MemoryCount
from shoal.record import read_record

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with dropout, training and held-out chats."""
    out = tmp_path_factory.mktemp("made")
    made.write_causal(out / "model")
    made.write_causal(out / "bare", template=None)
    made.write_chats(out / "train.jsonl", 90, seed=1)
    made.write_chats(out / "other.jsonl", 20, seed=2)
    return out


def settings(folder: Path, run_dir: Path, **changes: Any) -> lm_finetune.LmFinetuneConfig:
    files = folder / "train.jsonl", (folder / "other.jsonl",)
    return made.lm_config(folder / "model", *files, run_dir, **changes)


@pytest.fixture(scope="module")
def whole_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert jobs.run(settings(folder, run_dir), 2) == [EXIT_OK] * 2
    return run_dir


@pytest.fixture(scope="module")
def adapted_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with adapters."""
    pytest.importorskip("peft", reason="needs the extra lora")
    run_dir = tmp_path_factory.mktemp("adapted") / "run"
    assert jobs.run(settings(folder, run_dir, lora=LORA), 2) == [EXIT_OK] * 2
    return run_dir


def last_scores(run_dir: Path) -> dict[str, float]:
    (row,) = [row for row in read_record(run_dir) if isinstance(row, record.Evaluation)]
    assert row.split == "other"
    return dict(row.metrics)


def scores_by_transformers(model: PreTrainedModel, directory: Path, file: Path) -> dict[str, float]:
    """Return the scores of each conversation alone by transformers' own loss."""
    tokenizer = ChatTokenizer(directory)
    loss, num_correct, num_targets = 0.0, 0, 0
    for line in file.read_text().splitlines():
        messages = tuple(json.loads(line)["messages"])
        ids, is_target = tokenizer.encode(Conversation("", messages=messages))
        row, learnt = torch.tensor([ids]), torch.tensor([is_target])
        with torch.no_grad():
            out = model.eval()(input_ids=row, labels=row.masked_fill(~learnt, -100))
        loss += float(out.loss) * sum(is_target)
        right = out.logits[0, :-1].argmax(-1) == row[0, 1:]
        num_correct += int((right & learnt[0, 1:]).sum())
        num_targets += sum(is_target)
    mean = loss / num_targets
    return {
        "lm_loss": mean,
        "perplexity": float(torch.tensor(mean, dtype=torch.float64).exp()),
        "lm_accuracy": num_correct / num_targets,
    }


def test_a_chat_is_learnt_scored_and_exported(folder: Path, whole_run: Path) -> None:
    losses = pretrain_jobs.losses(whole_run)
    assert losses[12] < losses[1] - 1.0
    export = whole_run / "transformers"
    model = AutoModelForCausalLM.from_pretrained(export)
    wanted = scores_by_transformers(model, export, folder / "other.jsonl")
    assert last_scores(whole_run) == pytest.approx(wanted, rel=2e-6)
    tokenizer, before = (AutoTokenizer.from_pretrained(path) for path in (export, folder / "model"))
    chat = made.conversations(1, seed=9)[0]
    assert tokenizer.apply_chat_template(chat) == before.apply_chat_template(chat)
    said = (whole_run / "worker-0.log").read_text()
    assert "train.jsonl: 90 conversations" in said and "are learnt, 0 cut to 64 tokens" in said


def test_a_chat_is_continued_by_its_template(folder: Path, whole_run: Path) -> None:
    """The end of a turn ends the text, as in transformers."""
    options = ("--model", whole_run, "--text", "sun moon", "--max-new-tokens", 16)
    (row,) = use_jobs.lines(folder, "predict", "lm", "--chat", *options)
    tokenizer = AutoTokenizer.from_pretrained(whole_run / "transformers")
    model = AutoModelForCausalLM.from_pretrained(whole_run / "transformers").eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == [0, end]
    asked = [{"role": "user", "content": "sun moon"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    new = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    assert row["prompt"] == "sun moon"
    assert (row["text"], row["ended"]) == (tokenizer.decode(new, skip_special_tokens=True), "end token")
    refused = use_jobs.refused("predict", "lm", "--chat", *options[2:], "--model", folder / "bare")
    assert "has no chat template, which messages need" in refused


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_adapters_alone_are_trained_and_kept(folder: Path, adapted_run: Path) -> None:
    peft = pytest.importorskip("peft")
    losses = pretrain_jobs.losses(adapted_run)
    assert losses[12] < losses[1] - 0.1
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    model = peft.PeftModel.from_pretrained(base, adapted_run / "adapter")
    wanted = scores_by_transformers(model, folder / "model", folder / "other.jsonl")
    assert last_scores(adapted_run) == pytest.approx(wanted, rel=2e-6)
    merged = AutoModelForCausalLM.from_pretrained(adapted_run / "transformers").state_dict()
    theirs = model.merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], theirs[name]) for name in theirs)
    config = json.loads((adapted_run / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "model") and config["r"] == 4
    (newest,) = (adapted_run / "checkpoints").glob("*12")
    stored = {name for file in newest.glob("*.safetensors") for name in load_file(file)}
    assert stored and all(".lora_" in name for name in stored if name.startswith("model."))


@pytest.mark.parametrize("lora", [{}, LORA], ids=["whole", "adapters"])
def test_a_killed_run_continues_bitwise(
    lora: dict[str, Any], folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    reference: Path = request.getfixturevalue("adapted_run" if lora else "whole_run")
    config = settings(folder, tmp_path / "run", lora=lora, run={"checkpoint_frequency": 1})
    workers = jobs.start(config, 2)
    pretrain_jobs.wait_for_step(tmp_path / "run", 5, workers)
    pretrain_jobs.kill(workers)
    assert jobs.run(config, 2) == [EXIT_OK] * 2
    assert any(isinstance(row, record.Resume) for row in read_record(tmp_path / "run"))
    assert pretrain_jobs.losses(tmp_path / "run") == pretrain_jobs.losses(reference)
    for name in ("transformers/model.safetensors", *(["adapter/adapter_model.safetensors"] if lora else [])):
        assert (tmp_path / "run" / name).read_bytes() == (reference / name).read_bytes()


@pytest.mark.parametrize("lora", [{}, LORA], ids=["whole", "adapters"])
def test_losses_do_not_depend_on_the_workers(
    lora: dict[str, Any], folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Dropout is on: its masks belong to rows."""
    reference: Path = request.getfixturevalue("adapted_run" if lora else "whole_run")
    config = settings(folder, tmp_path / "run", lora=lora, train={"micro_batch_size": 2})
    assert jobs.run(config, 3) == [EXIT_OK] * 3
    wanted = pretrain_jobs.losses(reference)
    assert pretrain_jobs.losses(tmp_path / "run") == pytest.approx(wanted, rel=5e-5)
    assert last_scores(tmp_path / "run") == pytest.approx(last_scores(reference), rel=5e-5)


@pytest.mark.parametrize(
    ("num_workers", "parallel"),
    [
        (4, {"pipeline": 2}),
        (2, {"shard": True}),
        pytest.param(4, {"pipeline": 2, "shard": True}, marks=pytest.mark.slow),
    ],
    ids=["2 stages x 2 replicas", "2 shards", "2 x 2 shards"],
)
def test_a_model_in_parts_learns_what_a_whole_one_does(
    num_workers: int, parallel: dict[str, Any], folder: Path, whole_run: Path, tmp_path: Path
) -> None:
    config = settings(folder, tmp_path / "run", parallel=parallel)
    codes = jobs.run(config, num_workers)
    assert codes == [EXIT_OK] * num_workers, (tmp_path / "run" / "worker-0.log").read_text()
    wanted = pretrain_jobs.losses(whole_run)
    assert pretrain_jobs.losses(tmp_path / "run") == pytest.approx(wanted, rel=2e-6)
    assert last_scores(tmp_path / "run") == pytest.approx(last_scores(whole_run), rel=2e-6)
    directories = [run / "transformers" for run in (tmp_path / "run", whole_run)]
    models = [AutoModelForCausalLM.from_pretrained(directory).eval() for directory in directories]
    ids = torch.arange(40).reshape(2, 20)
    assert torch.allclose(models[0](ids).logits, models[1](ids).logits, rtol=1e-3, atol=1e-4)
    ends = [model.generation_config.eos_token_id for model in models]
    assert ends[0] == ends[1] and len(ends[0]) == 2


def test_new_weights_do_not_depend_on_the_layout(folder: Path, tmp_path: Path) -> None:
    losses = []
    for num_workers, parallel in ((1, {}), (2, {"pipeline": 2})):
        scratch = {"model": {"from_scratch": True}, "train": {"total_steps": 2}}
        config = settings(folder, tmp_path / str(num_workers), parallel=parallel, **scratch)
        assert jobs.run(config, num_workers) == [EXIT_OK] * num_workers
        losses.append(pretrain_jobs.losses(tmp_path / str(num_workers)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_llama_learns_prompts_one_in_each_row(folder: Path, tmp_path: Path) -> None:
    wide = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    made.write_causal(tmp_path / "llama", LlamaConfig(**wide, max_position_embeddings=64), template=None)
    rows = [{"prompt": f"{word} {word}", "completion": f" {word}"} for word in made.WORDS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = made.lm_config(
        tmp_path / "llama",
        tmp_path / "rows.jsonl",
        (),
        tmp_path / "run",
        data={"packed": False},
        model={"activation_checkpointing": True},
        train={"total_steps": 40, "shard_optimizer": True},
    )
    assert jobs.run(config, 2) == [EXIT_OK] * 2
    assert not [row for row in read_record(tmp_path / "run") if isinstance(row, record.Evaluation)]
    losses = pretrain_jobs.losses(tmp_path / "run")
    assert losses[40] < losses[1] - 1.0


@pytest.mark.parametrize("lora", [{}, LORA], ids=["whole", "adapters"])
def test_a_dry_run_counts_what_is_trained(lora: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Parameters are those of the model that transformers, or peft, makes."""
    if lora:
        pytest.importorskip("peft", reason="needs the extra lora")
    config = settings(folder, tmp_path / "run", lora=lora)
    lines = lm_finetune.check(config, 2, MemoryCount())
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapters = lm_finetune.add_adapters(model, config.lora)
    parameters = list((model if adapters is None else adapters.weights).parameters())
    num_all = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    assert f"parameters   {num_all:,}, of which {trained:,} are trained" in lines
    assert (trained < num_all) == bool(lora)
    assert sum(line.startswith("memory ") for line in lines) == 1
    assert [line for line in lines if str(folder / "other.jsonl") in line and "20" in line]
    assert lm_finetune.check(config, 2, None) == [] and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_finetuning_is_measured_on_texts_that_are_made(folder: Path, tmp_path: Path) -> None:
    options = ("--preset", "tiny", "--model.path", folder / "model", "--data.max-seq-length", 32)
    sizes = ("--batch", 2, "--accumulate", 2, "--steps", 2, "--warm-up", 1)
    command = ("bench", "train", "lm_finetune", *options, *sizes, "--json", tmp_path / "run.json")
    done = shoal(*map(str, command))
    assert done.returncode == EXIT_OK, done.stdout + done.stderr
    read = json.loads((tmp_path / "run.json").read_text())
    assert (read["sequence_length"], read["global_batch"], len(read["samples_s"])) == (32, 4, 2)


def test_adapters_alone_are_refused_with_the_remedy(tmp_path: Path) -> None:
    adapter = tmp_path / "run" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    for path in (tmp_path / "run", adapter):
        said = use_jobs.refused("predict", "lm", "--model", path, "--text", "one")
        assert "has adapters alone" in said and "merge_and_unload()" in said


def test_what_does_not_go_together_is_refused(folder: Path, tmp_path: Path) -> None:
    long = settings(folder, tmp_path / "long", data={"max_seq_length": 128})
    assert jobs.run(long) == [EXIT_USAGE]
    said = (tmp_path / "long" / "worker-0.log").read_text()
    assert "data.max_seq_length 128 is more than the 64 positions" in said
    files = ("--model", folder / "model", "--data", folder / "train.jsonl", "--data.max-seq-length", 64)
    served = use_jobs.refused("finetune", "lm", *files, "--lora.rank", 4, "--servers.mode", "sync")
    assert "lora.rank 4 with servers.mode sync" in served
    staged = use_jobs.refused("finetune", "lm", *files, "--lora.rank", 4, "--parallel.pipeline", 2)
    assert "lora.rank 4 does not go with a model in stages or shards" in staged
    padded = use_jobs.refused("finetune", "lm", *files, "--data.no-packed", "--parallel.shard")
    assert "data.packed False does not go with" in padded
