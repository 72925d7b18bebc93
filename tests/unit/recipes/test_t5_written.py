"""Settings of text to text, and the form that a finetuned T5 keeps in its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

import finetune_made as made
from shoal.decide.batch import StagesConfig
from shoal.errors import UsageError
from shoal.models.t5 import read_t5
from shoal.recipes.t5_classify import T5ClassifyConfig, T5DataConfig
from shoal.recipes.t5_written import (
    Form,
    GenerationConfig,
    Search,
    SearchConfig,
    T5WordingConfig,
    form_of,
    require_labels,
    set_form,
)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"source_column": "a"}, "data.source_column needs data.target_column"),
        ({"scores": True}, "T5 learns texts and labels, and no numbers; finetune an encoder with `shoal"),
        ({"target_column": "b"}, "data.target_column needs data.source_column"),
        ({"source_column": "a", "target_column": "b"}, 'needs a name.*give --task, "" for none'),
        ({"source_column": "a", "target_column": "b", "task": "sum", "labels": ("x",)}, "data.labels are of"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        T5ClassifyConfig(data=T5DataConfig(**settings))  # type: ignore[arg-type]


def test_generated_labels_need_the_whole_model() -> None:
    data = T5DataConfig(labels_by="generation", eval=(Path("dev.tsv"),))
    assert T5ClassifyConfig(data=data).scores == {"dev": ("generated_accuracy",)}
    with pytest.raises(UsageError, match=r"labels_by generation needs the whole model.*by likelihood"):
        T5ClassifyConfig(data=data, parallel=StagesConfig(pipeline=2))


def test_a_search_has_beams_and_tokens() -> None:
    T5WordingConfig(source_column="a")  # a prediction needs no targets
    with pytest.raises(UsageError, match=r"generation\.num_beams 0 must be at least 1"):
        GenerationConfig(num_beams=0)
    form = Form(search=Search(num_tokens=7, num_beams=4, length_penalty=0.6))
    assert form.searched(SearchConfig()) == form.search
    assert form.searched(SearchConfig(num_beams=2, max_new_tokens=3)) == Search(
        num_tokens=3, num_beams=2, length_penalty=0.6
    )


def test_a_model_keeps_the_form_of_its_finetuning(tmp_path: Path) -> None:
    directory = made.write_t5(tmp_path / "t5")
    for form in (
        Form(template="sum: {first}", search=Search(num_tokens=7, num_beams=3, length_penalty=0.5)),
        Form(template="{second} {first}", labels=("no", "yes")),
    ):
        model = read_t5(directory, on_meta=True)
        assert form_of(model) == Form(keeps_sentinels=True)
        with pytest.raises(UsageError, match="was not finetuned on labels"):
            require_labels(directory, model)
        set_form(model, "some", form)
        model.weights.config.save_pretrained(tmp_path / "out")
        assert form_of(read_t5(tmp_path / "out", on_meta=True)) == form
