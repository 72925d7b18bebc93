"""From settings to workers: checks what can be checked before any starts, then starts or joins them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from shoal.env import WorkerEnv
from shoal.errors import UsageError
from shoal.recipes.finetune.config import (
    ClassifyFinetuneConfig,
    FinetuneConfig,
    SquadFinetuneConfig,
    T5FinetuneConfig,
)
from shoal.recipes.start import Launch, start
from shoal.train.config import as_tree, required, to_toml

C = TypeVar("C", bound=FinetuneConfig)


def finetune_squad(config: SquadFinetuneConfig, how: Launch, *, preset: str, command: list[str]) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: settings that cannot work together, or with the model or the data.
        ShoalError: a worker failed.
    """
    config = named(config, f"squad-{preset}")
    require_path("data.path", "--data", config.data.path, "training questions, such as train-v2.0.json")
    require_path("data.eval", "--eval", config.data.eval, "questions to evaluate on, such as dev-v2.0.json")

    def describe(num_workers: int) -> list[str]:
        from shoal.data.squad.dataset import describe_misplaced
        from shoal.data.squad.features import make_features
        from shoal.recipes.finetune.squad import read_questions

        files = read_questions(config.data)
        if not how.dry_run:
            check(config, num_workers, "window.max_seq_length", config.window.max_seq_length)
            return []
        tokenizer = tokenizer_of(config, "window.max_seq_length", config.window.max_seq_length)
        windows = [make_features(data, tokenizer, config.window) for data in files]
        counts = [
            f"{f.data.path}: SQuAD {f.data.version}, {len(f.data.questions):,} questions, {len(f):,} windows"
            for f in windows
        ]
        odd = [line for data in files if (line := describe_misplaced(data))]
        return [*plan_lines(config, len(windows[0]), num_workers), *counts, *odd]

    def work(joined: WorkerEnv) -> int:
        from shoal.recipes.finetune.squad import finetune

        return finetune(config, joined=joined, command=command)

    return start(how, command=command, run_dir=required(config.run.dir), describe=describe, work=work)


def finetune_classify(config: ClassifyFinetuneConfig, how: Launch, *, preset: str, command: list[str]) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: settings that cannot work together, or with the model or the data.
        ShoalError: a worker failed.
    """
    config = named(config, f"classify-{preset}")
    require_path("data.path", "--data", config.data.path, "training examples, such as train.tsv")
    require_path("data.eval", "--eval", config.data.eval or None, "one or more files to evaluate on")

    def describe(num_workers: int) -> list[str]:
        from shoal.data.text.classify import make_pairs
        from shoal.recipes.finetune.classify import read_examples

        length = config.data.max_seq_length
        train, held_out = read_examples(config.data)
        if not how.dry_run:
            check(config, num_workers, "data.max_seq_length", length)
            return []
        tokenizer = tokenizer_of(config, "data.max_seq_length", length)
        pairs = [make_pairs(data, tokenizer, max_seq_length=length) for data in (train, *held_out)]
        counts = [f"{f.data.path}: {len(f):,} examples, {f.num_cut:,} cut to {length} tokens" for f in pairs]
        labels = f"labels       {', '.join(train.labels)}"
        return [*plan_lines(config, len(pairs[0]), num_workers), labels, *counts]

    def work(joined: WorkerEnv) -> int:
        from shoal.recipes.finetune.classify import finetune

        return finetune(config, joined=joined, command=command)

    return start(how, command=command, run_dir=required(config.run.dir), describe=describe, work=work)


def finetune_t5(config: T5FinetuneConfig, how: Launch, *, preset: str, command: list[str]) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: settings that cannot work together, or with the model or the data.
        ShoalError: a worker failed.
    """
    config = named(config, f"t5-{config.data.task}-{preset}")
    require_path("data.path", "--data", config.data.path, "training examples, such as train.tsv")
    require_path("data.eval", "--eval", config.data.eval or None, "one or more files to evaluate on")

    def describe(num_workers: int) -> list[str]:
        from shoal.recipes.finetune.classify import read_examples
        from shoal.recipes.finetune.text_to_text import wording

        train, held_out = read_examples(config.data)
        check(config, num_workers, "data.max_seq_length", config.data.max_seq_length)
        if not how.dry_run:
            return []
        counts = [f"{data.path}: {len(data.examples):,} examples" for data in (train, *held_out)]
        words = [f"worded as    {wording(config.data, train)}", f"labels       {', '.join(train.labels)}"]
        return [*plan_lines(config, len(train.examples), num_workers), *words, *counts]

    def work(joined: WorkerEnv) -> int:
        from shoal.recipes.finetune.text_to_text import finetune

        return finetune(config, joined=joined, command=command)

    return start(how, command=command, run_dir=required(config.run.dir), describe=describe, work=work)


def named(config: C, default: str) -> C:
    """Fill in the name and the directory of the run, after a look whether a model is named.

    Raises:
        UsageError: there is none.
    """
    require_path("model.path", "--model", config.model.path, "a run of shoal or a transformers directory")
    run = config.run
    name = run.name or (run.dir.name if run.dir else default)
    return replace(config, run=replace(run, name=name, dir=run.dir or Path("runs") / name))


def require_path(name: str, option: str, value: object, what: str) -> None:
    """Raise a :class:`UsageError` where a setting that has no default is not there."""
    if value is None:
        raise UsageError(f"{name} is not set: name {what} with {option}")


def check(config: FinetuneConfig, num_workers: int, setting: str, max_seq_length: int) -> None:
    """Check the batch, and the model where it is a directory, before workers start."""
    from shoal.recipes.finetune.job import make_plan
    from shoal.recipes.finetune.source import kind_of_source

    make_plan(config, num_sequences=config.train.global_batch_size, num_workers=num_workers)
    if kind_of_source(required(config.model.path)) != "run":
        tokenizer_of(config, setting, max_seq_length)


def tokenizer_of(config: FinetuneConfig, setting: str, max_seq_length: int) -> Tokenizer:
    """Return the tokenizer of the model to start from, after a look at the model's sizes.

    Raises:
        UsageError: there is no such model, it has no tokenizer of its own, or too few positions.
        ShoalError: it is a run without a checkpoint.
    """
    from shoal.recipes.finetune.source import check_length, prepare_source, read_source_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        directory = prepare_source(required(config.model.path), Path(folder))
        check_length(directory, setting, max_seq_length)
        return read_source_tokenizer(directory)


def plan_lines(config: FinetuneConfig, num_sequences: int, num_workers: int) -> list[str]:
    """Return the settings, and what they come to."""
    from shoal.recipes.finetune.job import make_plan

    plan = make_plan(config, num_sequences=num_sequences, num_workers=num_workers)
    epochs = plan.total_steps * plan.batch.global_batch_size / num_sequences
    return [
        to_toml(as_tree(config)),
        f"batch        {plan.batch}",
        f"run          {plan.total_steps:,} steps, {plan.warmup_steps:,} of them warm-up: "
        f"{epochs:.2f} times {num_sequences:,} sequences",
    ]
