"""Reads targets in the forms that users write, and compares them with scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from shoal.errors import UsageError
from shoal.train.stopping import Target, read_target

COCO = {"validation": ["box_AP", "box_AP50", "mask_AP", "mask_AP50"]}
IMAGES = {"validation": ["loss", "top1_accuracy", "top5_accuracy"]}
TEXT = {"validation": ["mlm_loss", "mlm_accuracy"], "squad": ["exact_match", "f1"]}
MNLI = {"dev_matched": ["accuracy"], "dev_mismatched": ["accuracy"]}


def target(text: str, known: Mapping[str, Sequence[str]]) -> Target:
    found = read_target(text, known)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "known", "resolved"),
    [
        ("box_AP>=0.377,mask_AP>=0.339", COCO, "box_AP>=0.377,mask_AP>=0.339"),
        (" bbox >= 37.7% , SEGM>=.339", COCO, "box_AP>=0.377,mask_AP>=0.339"),
        ("top1>=75.9%", IMAGES, "top1_accuracy>=0.759"),
        ("Top1_Accuracy>=7.59e-1", IMAGES, "top1_accuracy>=0.759"),
        ("squad_f1>=90.5,mlm_loss<=1.6", TEXT, "f1>=90.5,mlm_loss<=1.6"),
        ("squad/f1>=0.5%,em>=1", TEXT, "squad/f1>=0.5,exact_match>=1"),
        ("dev_matched/acc>=84%", MNLI, "dev_matched/accuracy>=0.84"),
    ],
)
def test_forms(text: str, known: dict[str, list[str]], resolved: str) -> None:
    assert str(read_target(text, known)) == resolved


@pytest.mark.parametrize(
    ("text", "known", "message"),
    [
        ("box_AP", COCO, r"'box_AP' is not a condition; write NAME>=NUMBER"),
        ("box_AP>=0.3,", COCO, r"'' is not a condition"),
        ("", COCO, r"'' is not a condition"),
        ("box_AP=0.3", COCO, r"is not a condition"),
        ("box_AP>=1.2.3", COCO, r"could not convert"),
        ("top1>=0.7", COCO, r"no score top1\. Its scores by split are validation: box_AP, box_AP50, mask_AP"),
        ("box_Ap5>=0.7", COCO, r"no score box_Ap5\. Did you mean 'box_AP50'\?.*\(bbox for box_AP, segm for"),
        ("squad_f1>=80", {"validation": ["mlm_loss"]}, r"no score squad_f1\..*validation: mlm_loss"),
        ("squad/mlm_loss<=3", TEXT, r"no score squad/mlm_loss"),
        ("mlm_loss>=1.6", TEXT, r"mlm_loss is to fall: write <="),
        ("top1<=0.7", IMAGES, r"top1_accuracy is to rise: write >="),
        ("mlm_loss<=16%", TEXT, r"mlm_loss is not a fraction"),
        ("top1>=75.9", IMAGES, r"between 0 and 1: write top1_accuracy>=0.759 or 75.9%"),
        ("f1>=0.905", TEXT, r"f1 is a percentage, between 0 and 100"),
        ("x>=1", {}, r"no score x\. Its scores by split are none"),
    ],
)
def test_refusals_name_the_text_the_rule_and_the_remedy(
    text: str, known: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        read_target(text, known)
    assert f"run.until {text!r}" in str(error.value)


def test_all_conditions_hold_at_one_step_in_every_split_that_has_the_score() -> None:
    coco = target("bbox>=0.377,segm>=0.339", COCO)
    assert coco.holds({"validation": {"box_AP": 0.377, "mask_AP": 0.339}})
    assert not coco.holds({"validation": {"box_AP": 0.4, "mask_AP": 0.3389}})
    assert not coco.holds({"validation": {"box_AP": 0.4}})
    assert not coco.holds({"validation": {"box_AP": 0.4, "mask_AP": float("nan")}})
    assert not coco.holds({})
    both, one = target("accuracy>=0.8", MNLI), target("dev_matched/accuracy>=0.8", MNLI)
    scores = {"dev_matched": {"accuracy": 0.81}, "dev_mismatched": {"accuracy": 0.79}}
    assert one.holds(scores) and not both.holds(scores)
    assert both.scores_of(scores) == {"dev_matched/accuracy": 0.81, "dev_mismatched/accuracy": 0.79}


def test_no_text_is_no_target_and_two_names_of_squad_are_one() -> None:
    assert read_target(None, TEXT) is None
    exact = target("exact>=80", TEXT)
    assert exact.holds({"squad": {"exact": 81.0}}) and exact.holds({"squad": {"exact_match": 81.0}})
