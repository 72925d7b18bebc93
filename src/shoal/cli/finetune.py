"""``shoal finetune …``: one command a task, settings from options, a file and a preset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from shoal.cli.settings import settings_from, this_command
from shoal.recipes.finetune.config import (
    PRESETS,
    T5_PRESETS,
    ClassifyFinetuneConfig,
    SquadFinetuneConfig,
    T5FinetuneConfig,
)
from shoal.recipes.start import Launch

finetune = App(
    name="finetune",
    help="""Finetune a pretrained model on a task and score it; the same command again continues.

The model is the directory of a run of shoal (its newest checkpoint) or a transformers directory with its
tokenizer: BERT, ALBERT, RoBERTa or DistilBERT, or T5, which writes its answers.

    shoal finetune squad --preset albert --model runs/first --data train-v2.0.json --eval dev-v2.0.json

    shoal finetune classify --model bert/ --data train.tsv --eval dev_matched.tsv dev_mismatched.tsv

    shoal finetune t5 --task mnli --model t5/ --data train.tsv --eval dev_matched.tsv dev_mismatched.tsv
    """,
)
finetune.config = (
    settings_from(
        lambda command: f"finetune/presets/{command}", lambda command: "t5" if command == "t5" else "bert"
    ),
)


@finetune.command(name="squad")
def finetune_squad(
    *,
    model: Path | None = None,
    data: Path | None = None,
    eval: Path | None = None,
    preset: Literal[PRESETS] = "bert",  # type: ignore[valid-type]
    config: Path | None = None,
    settings: Annotated[SquadFinetuneConfig, Parameter(name="*")] = SquadFinetuneConfig(),  # noqa: B008
    how: Annotated[Launch, Parameter(name="*")] = Launch(),  # noqa: B008
) -> int:
    """Finetune on SQuAD 1.1 or 2.0 and answer the questions of an evaluation file.

    The run directory gets predictions.json, nbest.json and null_odds.json in the official formats,
    scores.json, and the finetuned model as a transformers directory. Training answers that do not stand where
    the file says are counted and left out (--data.misplaced). Started alone, the command starts the workers;
    started by torchrun, mpirun or anything that sets RANK and WORLD_SIZE, it joins them. Run it again to
    continue after a stop or a crash, with any number of workers.

    Parameters
    ----------
    model
        Run directory of shoal, a checkpoint in one, or a transformers directory with its tokenizer.
    data
        Training questions, the official JSON of SQuAD 1.1 or 2.0.
    eval
        Questions to evaluate on at the end.
    preset
        Settings to start from: the published ones of BERT and ALBERT, or tiny.
    config
        TOML file with settings that go before the preset's; options go before both.
    """
    from shoal.recipes.finetune import start

    settings = replace(
        settings,
        model=replace(settings.model, path=model or settings.model.path),
        data=replace(settings.data, path=data or settings.data.path, eval=eval or settings.data.eval),
    )
    return start.finetune_squad(settings, how, preset=preset, command=this_command())


@finetune.command(name="classify")
def finetune_classify(
    *,
    model: Path | None = None,
    data: Path | None = None,
    eval: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative=())] = (),
    labels: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
    preset: Literal[PRESETS] = "bert",  # type: ignore[valid-type]
    config: Path | None = None,
    settings: Annotated[ClassifyFinetuneConfig, Parameter(name="*")] = ClassifyFinetuneConfig(),  # noqa: B008
    how: Annotated[Launch, Parameter(name="*")] = Launch(),  # noqa: B008
) -> int:
    """Finetune on sentences or pairs with labels: MNLI, and any tab-separated or JSONL file.

    For each evaluation file the run directory gets predictions-NAME.txt (a label a line) and scores-NAME.json
    (accuracy and confusion table, which is printed too), and the finetuned model as a transformers directory.
    Columns have MNLI's names unless --data.first, --data.second and --data.label say others. Run the command
    again to continue after a stop or a crash, with any number of workers.

    Parameters
    ----------
    model
        Run directory of shoal, a checkpoint in one, or a transformers directory with its tokenizer.
    data
        Training examples: .tsv with column names in the first line, or .jsonl.
    eval
        Files to evaluate on at the end, each by itself, such as MNLI's matched and mismatched.
    labels
        The set of labels, in the order of the model's outputs; default: those of the training file, sorted.
    preset
        Settings to start from: the published ones of BERT and ALBERT, or tiny.
    config
        TOML file with settings that go before the preset's; options go before both.
    """
    from shoal.recipes.finetune import start

    given = settings.data
    settings = replace(
        settings,
        model=replace(settings.model, path=model or settings.model.path),
        data=replace(given, path=data or given.path, eval=eval or given.eval, labels=labels or given.labels),
    )
    return start.finetune_classify(settings, how, preset=preset, command=this_command())


@finetune.command(name="t5")
def finetune_t5(
    *,
    task: str | None = None,
    model: Path | None = None,
    data: Path | None = None,
    eval: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative=())] = (),
    labels: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
    preset: Literal[T5_PRESETS] = "t5",  # type: ignore[valid-type]
    config: Path | None = None,
    settings: Annotated[T5FinetuneConfig, Parameter(name="*")] = T5FinetuneConfig(),  # noqa: B008
    how: Annotated[Launch, Parameter(name="*")] = Launch(),  # noqa: B008
) -> int:
    """Finetune T5 on sentences or pairs with labels: it reads a worded example and writes the label.

    For each evaluation file the run directory gets predictions-NAME.txt (a label a line) and scores-NAME.json
    (accuracy and confusion table, which is printed too), and the finetuned model as a transformers directory.
    Columns have MNLI's names unless --data.first, --data.second and --data.label say others. Run the command
    again to continue after a stop or a crash, with any number of workers.

    Parameters
    ----------
    task
        The task's name, with which the input begins; mnli, qnli and qqp in T5's wording, others with
        sentence1 and sentence2, or sentence.
    model
        Run directory of shoal, a checkpoint in one, or a transformers directory with its tokenizer.
    data
        Training examples: .tsv with column names in the first line, or .jsonl.
    eval
        Files to evaluate on at the end, each by itself, such as MNLI's matched and mismatched.
    labels
        The set of labels, the words that are written; default: those of the training file.
    preset
        Settings to start from: the published ones of T5, or tiny.
    config
        TOML file with settings that go before the preset's; options go before both.
    """
    from shoal.recipes.finetune import start

    given = settings.data
    settings = replace(
        settings,
        model=replace(settings.model, path=model or settings.model.path),
        data=replace(
            given,
            task=task or given.task,
            path=data or given.path,
            eval=eval or given.eval,
            labels=labels or given.labels,
        ),
    )
    return start.finetune_t5(settings, how, preset=preset, command=this_command())
