"""Defines ``shoal predict``: a command for each use of trained models, and that of detectors."""

# Annotations are objects here, not texts: cyclopts reads those of the generated commands.

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from shoal.cli.settings import this_command
from shoal.cli.use import LAUNCH, settings_of_the_run, with_options
from shoal.errors import UsageError
from shoal.recipes import USES, load, using
from shoal.recipes.start import Launch

predict = App(name="predict", default_parameter=Parameter(consume_multiple=True))

_HELP = """Use the model.

Parameters
----------
inputs
    Files of inputs.
"""


def __getattr__(name: str) -> Callable[..., int]:
    """Return the command of a use; cyclopts asks for it when it is used."""
    if name not in USES:
        raise AttributeError(name)
    return command_for(name)


def command_for(name: str) -> Callable[..., int]:
    """Return the command of a use as a function with the settings of its module as options."""
    module = load(USES[name].module)

    def command(
        *inputs: Path,
        what: Any,
        launch: LAUNCH = Launch(),  # noqa: B008
    ) -> int:
        def work(world: Any, precision: Any) -> None:
            rows = list(module.predict(what, inputs, world, precision))
            if world.is_main:
                using.write_rows(({**row, "precision": precision.name} for row in rows), what.out)

        return using.run(
            what,
            launch,
            command=this_command(),
            check=lambda: module.check_prediction(what, inputs),
            work=work,
        )

    return with_options(command, module.Predict, _HELP)


predict.config = (settings_of_the_run,)
for _name, _use in USES.items():
    _texts = (_use.help, _use.details, f"Example: `{_use.example}`")
    predict.command(f"{__name__}:{_name}", name=_name, help="\n\n".join(_texts))


@predict.command(name="mask_rcnn")
def predict_mask_rcnn(
    *images: Path,
    model: Annotated[Path, Parameter(name=("--model", "--checkpoint"))],
    out: Path = Path("predictions"),
    min_score: float = 0.5,
    classes: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    precision: using.PrecisionName = "auto",
    launch: LAUNCH = Launch(),  # noqa: B008
) -> int:
    """Detect objects in images; draw their boxes, masks, names and scores, and list them in JSON.

    For each image NAME.objects.png and NAME.objects.json are written. As in training, EXIF orientation is
    ignored.

    Parameters
    ----------
    images
        JPEG, PNG, GIF or WebP files, or folders of them.
    model
        A run of `shoal train mask_rcnn`, one of its checkpoints, or a directory that `shoal export` wrote.
    out
        Output folder.
    min_score
        Minimum score of an object.
    classes
        Categories to detect; default: all.
    precision
        Autocast type; auto: fp32 on CPUs; on GPUs bf16, or fp16 where there is none. It is in the output.
    """
    from shoal.data.images.files import image_files
    from shoal.recipes.images import find_network

    def check() -> list[str]:
        find_network(model)  # a wrong path is refused at once, before torch is imported
        if not images:
            raise UsageError("no image is named: give image files, or folders of them")
        return [f"images       {len(image_files(images)):,}"]

    def work(world: Any, chosen: Any) -> None:
        from shoal.recipes.mask_rcnn_predict import Prediction, run

        files = tuple(image_files(images))
        what = Prediction(images=files, model=model, out=out, min_score=min_score, classes=classes)
        run(what, world, chosen)

    how = using.ComputeConfig(precision=precision)
    return using.run(how, launch, command=this_command(), check=check, work=work)
