"""``shoal predict …``: a trained network at work on files that a person names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

predict = App(name="predict", help="Use a trained network on files of your own.")


@predict.command(name="mask_rcnn")
def predict_mask_rcnn(
    *images: Path,
    model: Annotated[Path, Parameter(name=("--model", "--checkpoint"))],
    out: Path = Path("predictions"),
    min_score: float = 0.5,
    classes: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
) -> None:
    """Find objects in pictures; draw their boxes, masks, names and scores, and list them in JSON.

    For each picture NAME.objects.png and NAME.objects.json are written. Pictures are taken as their files
    hold them: a camera's note of how to turn one (EXIF) does not count, as in training.

    Parameters
    ----------
    images
        JPEG, PNG, GIF or WebP files.
    model
        A run of `shoal train mask_rcnn`, one of its checkpoints, or a directory that `shoal export` wrote.
    out
        Folder for what is written.
    min_score
        Objects of which the network is less sure are left out.
    classes
        Names of the only categories that shall be looked for; default: all.
    """
    from shoal.recipes.mask_rcnn.predict import Prediction, run

    run(Prediction(images=images, model=model, out=out, min_score=min_score, classes=classes))
