"""``shoal evaluate lm`` and ``predict lm``: transformers' scores and continuations, on any workers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pretrain_jobs as jobs
import pytest
import torch
import use_jobs
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from forked_programs import forked_pools
from shoal.data.text.prepare import PrepareConfig, prepare_text
from shoal.data.text.shards import TextShards
from shoal.errors import EXIT_OK, UsageError
from shoal.models.directory import save
from shoal.recipes.lm import tokenizer_files
from shoal.recipes.lm_use import continuation, read_prompts

END = "<|endoftext|>"
PROMPTS = ["The river", "The moon and the stone", "The"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers directory with a tokenizer of GPT-2's kind, its text, prepared and not, and prompts."""
    folder = tmp_path_factory.mktemp("use")
    jobs.small_text(folder / "articles.txt")
    made = ByteLevelBPETokenizer()
    made.train([str(folder / "articles.txt")], vocab_size=290, special_tokens=[END])
    made.save(str(folder / "made.json"))
    torch.manual_seed(4)
    sizes = GPT2Config(
        vocab_size=290, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3,
        eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    weights = GPT2LMHeadModel(sizes)

    class Model:
        pass

    model = Model()
    model.weights = weights  # type: ignore[attr-defined]
    tokenizer = Tokenizer.from_file(str(folder / "made.json"))
    save(model, folder / "model", tokenizer=tokenizer_files(tokenizer, 0, 64))  # type: ignore[arg-type]
    config = PrepareConfig(
        sources=(str(folder / "articles.txt"),), out=folder / "text", validation=0.2, processes=1,
        tokenizer=str(folder / "made.json"), end_token=END,
    )  # fmt: skip
    with forked_pools():
        prepare_text(config, progress=False)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


def scores(folder: Path, name: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / f"scores-{name}.json").read_text())
    return found


def by_transformers(folder: Path, texts: list[list[int]], length: int) -> dict[str, float]:
    """Return the scores of documents that follow each other, cut into blocks, by transformers' own loss."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    stream = [(token, number) for number, ids in enumerate(texts) for token in (*ids, 0)]
    loss, num_targets, num_correct = 0.0, 0, 0
    for start in range(0, len(stream), length):
        part = stream[start : start + length + 1]
        for number in dict.fromkeys(document for _, document in part):
            ids = torch.tensor([[token for token, document in part if document == number]])
            if ids.shape[1] < 2:
                continue
            with torch.no_grad():
                out = model(input_ids=ids, labels=ids)
            loss += float(out.loss) * (ids.shape[1] - 1)
            num_targets += ids.shape[1] - 1
            num_correct += int((out.logits[0, :-1].argmax(-1) == ids[0, 1:]).sum())
    return {
        "lm_loss": loss / num_targets,
        "perplexity": math.exp(loss / num_targets),
        "lm_accuracy": num_correct / num_targets,
        "targets": num_targets,
    }


def test_prepared_text_and_files_are_scored_as_by_transformers(folder: Path, tmp_path: Path) -> None:
    settings = ("--model", folder / "model", "--data.block-length", 24, "--batch-size", 2)
    prepared = ("evaluate", "lm", *settings, "--data.path", folder / "text", "--out", tmp_path / "one")
    said = use_jobs.said(tmp_path, *prepared)
    assert said == use_jobs.said(tmp_path, *prepared[:-1], tmp_path / "three", workers=3)
    found = scores(tmp_path / "one", "text")
    assert found == scores(tmp_path / "three", "text")
    held_out = TextShards(folder / "text", "validation")
    texts = [held_out.document(number)[0].tolist() for number in range(held_out.num_documents)]
    wanted = by_transformers(folder, texts, 24)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=2e-6)
    assert f"loss {wanted['lm_loss']:.4f}" in said and "fp32" in said

    use_jobs.said(tmp_path, "evaluate", "lm", folder / "articles.txt", *settings, "--out", tmp_path / "file")
    found = scores(tmp_path / "file", "articles.txt")
    articles = (folder / "articles.txt").read_text().splitlines()
    tokenizer = Tokenizer.from_file(str(folder / "made.json"))
    texts = [tokenizer.encode(article).ids for article in articles]
    wanted = by_transformers(folder, texts, 24)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=2e-6)
    assert found["bits_per_byte"] == pytest.approx(
        found["lm_loss"] * found["targets"] / math.log(2) / found["bytes"], rel=1e-9
    )


def test_prompts_are_continued_as_by_transformers(folder: Path) -> None:
    command = ("predict", "lm", "prompts.txt", "--model", folder / "model", "--max-new-tokens", 12)
    rows = use_jobs.lines(folder, *command)
    assert rows == use_jobs.lines(folder, *command, "--batch-size", 2, workers=2)
    assert [row["prompt"] for row in rows] == PROMPTS and [row["id"] for row in rows] == [1, 2, 3]
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
        new = out[ids["input_ids"].shape[1] :]
        has_ended = new[-1] == 0
        assert row["text"] == tokenizer.decode(new, skip_special_tokens=True)
        assert row["tokens"] == len(new) - has_ended
        assert row["ended"] == ("end token" if has_ended else "max new tokens")
    drawn = (*command, "--temperature", 1.0, "--seed", 3)
    assert use_jobs.lines(folder, *drawn) == use_jobs.lines(folder, *drawn, workers=3) != rows


def test_a_run_is_scored_and_continues_text_as_its_export_does(tmp_path: Path) -> None:
    """Its own text and blocks are the default; a tokenizer of BERT's kind puts nothing around prompts."""
    data = jobs.prepare_small(tmp_path)
    GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64).save_pretrained(
        tmp_path / "gpt"
    )
    config = jobs.small_lm_config(data, tmp_path / "gpt" / "config.json", tmp_path / "run")
    assert jobs.run(config, 1) == [EXIT_OK]
    evaluate = ("evaluate", "lm", "--model")
    said = use_jobs.said(tmp_path, *evaluate, "run")
    assert said == use_jobs.said(tmp_path, *evaluate, "run/transformers")
    assert said == use_jobs.said(tmp_path, *evaluate, "run/checkpoints/step-00000012")
    predict = ("predict", "lm", "--text", "The river and", "--max-new-tokens", 6, "--model")
    (row,) = use_jobs.lines(tmp_path, *predict, "run")
    assert row["tokens"] == 6 and [row] == use_jobs.lines(tmp_path, *predict, "run/transformers")
    jobs.run(jobs.small_config(data, tmp_path / "albert", train={"total_steps": 2}), 1)
    refused = use_jobs.refused("predict", "lm", "--text", "x", "--model", tmp_path / "albert")
    assert "is of a run of albert, and not of `shoal train lm`" in refused


def test_a_blank_before_a_continuation_belongs_to_it() -> None:
    tokenizer = Tokenizer(models.WordLevel({"\u2581sun": 0, "\u2581moon": 1, "s": 2}))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([1]) == "moon"
    assert continuation(tokenizer, [0], [1, 2]) == " moons"


def test_bad_prompts_and_texts_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "prompt": "x"}\n{"prompt": "y"}\n')
    assert [(each.id, each.text) for each in read_prompts(tmp_path / "rows.jsonl")] == [("a", "x"), (2, "y")]
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UsageError, match=r"bad\.jsonl, line 1: holds no string 'prompt', but text"):
        read_prompts(tmp_path / "bad.jsonl")
    with pytest.raises(UsageError, match=r"prompts\.csv: is known by the end of its name"):
        read_prompts(tmp_path / "prompts.csv")
    model = ("--model", folder / "model")
    long = use_jobs.refused("predict", "lm", "--text", "The river", *model, "--max-new-tokens", 64)
    assert "must have from 1 to 0: the model's positions less --max-new-tokens 64" in long
    assert "there is no text to score: name files" in use_jobs.refused("evaluate", "lm", *model)
    other = jobs.prepare_small(tmp_path)
    refused = use_jobs.refused("evaluate", "lm", *model, "--data.path", other)
    assert "prepare the text with the model's own tokenizer" in refused
