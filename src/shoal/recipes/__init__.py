"""Complete training jobs: one script per recipe, read from top to bottom, and its presets.

Each script runs by ``python -m shoal.recipes.NAME``, under ``torchrun``, or by its command, such as ``shoal
train NAME``. :class:`Script` lists what its module has. Other packages add recipes by an entry point of the
group ``shoal.recipes`` whose value is a :class:`Recipe`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, resources
from importlib.metadata import entry_points
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

if TYPE_CHECKING:
    import torch

    from shoal.decide.batch import BatchPlan
    from shoal.recipes.model_source import ModelSource
    from shoal.train.gradients import Precision
    from shoal.train.world import World

Row = Mapping[str, Any]
"""A line of the output of ``shoal predict``: a JSON object."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Registers ``shoal predict NAME`` or ``shoal evaluate NAME`` by names and texts."""

    name: str
    help: str
    """One sentence for ``shoal predict --help``."""
    details: str
    """More for ``shoal predict NAME --help``."""
    inputs: str = ""
    """Text about the files that it takes; empty: it takes none."""
    model: str = ""
    """Text about the model, where it is an argument; empty: it is an option of the settings."""
    module: str = ""
    """Module of this package whose ``use`` it is, if it is not the recipe's own."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Registers a recipe by names and texts; :func:`load` imports its module."""

    config: str
    """Class of its settings."""
    preset: str
    """Its default preset."""
    help: str
    """One sentence for ``shoal GROUP --help``."""
    example: str
    """A whole command, for ``shoal GROUP COMMAND --help``."""
    module: str = ""
    """Its script, as ``package.module``; presets are in the folder ``presets/NAME`` of that package. Default:
    NAME in this package."""
    group: str = "train"
    """Its command is ``shoal GROUP COMMAND``."""
    command: str = ""
    """Default: its name."""
    details: str = ""
    """More about it, for ``shoal GROUP COMMAND --help``."""
    shortcuts: Mapping[str, str] = field(default_factory=dict)
    """Shorter names of options: option to setting, such as ``model`` to ``model.path``."""
    run_name: str = "{name}-{preset}"
    """Default name of a run; ``{config}`` stands for the settings."""
    starts_from: tuple[str, ...] = ()
    """Of a finetuning: the recipes that pretrain its models, by default the first."""
    workload: str = "{name}-{size}"
    """Its model's name in ``shoal plan`` and ``shoal bench train``: ``{size}`` is the preset up to its first
    hyphen, ``{config}`` stands for the settings. Of a finetuning the recipe and its model are the name, such
    as ``squad-bert-large``."""
    length: str = ""
    """The setting with the tokens of a sample, such as ``data.max_seq_length``."""
    divides: bool = False
    """Its script has ``divide``, by which :mod:`shoal.recipes.divided` trains what ``parallel`` divides."""
    layouts: bool = False
    """Its script has ``find_layouts`` and ``explain``, for ``shoal pipeline show NAME``."""
    predict: Command | None = None
    """Its command for inputs without labels."""
    evaluate: Command | None = None
    """Its command for labelled data."""
    samples: str = ""
    """Command of ``shoal predict`` that takes its checkpoints before the run ends, for ``run.samples``."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A few samples of a recipe's training step, whose operations are counted on the meta device."""

    model: Any
    """A module on the meta device; its modules with parameters are the layers."""
    inputs: Mapping[str, Any]
    """On any device: only shapes matter."""
    loss: Callable[[Any, Mapping[str, Any]], Any]
    """Returns a scalar that depends on all outputs, from the model and the inputs on the meta device."""
    num_samples: int
    sequence_length: int = 1
    """Tokens of a sample; 1: samples are no sequences."""
    relay_bytes: float = 0.0
    """16-bit activations of a sample between two layers; 0: unknown."""
    recompute: Callable[[Any], None] | None = None
    """Turns on the activation checkpointing of the settings, which operations are counted without."""
    num_recomputed: int = 1
    """Layers that are recomputed one at a time."""
    blocks: Sequence[Any] = ()
    """Modules of the model that shards gather one at a time."""
    divide: Callable[[Any, int], None] | None = None
    """Keeps the part of the model's layers that one of a number of workers has, as ``parallel.tensor`` does;
    ``None``: it does not go with the model."""
    summed_bytes: float = 0.0
    """16-bit activations and their gradients that such workers sum, per sample; 0: unknown."""
    more_operations: int = 0
    """Kernels of a step that depend on data, which do not run on the meta device."""
    work_spread: float = 0.0
    """Standard deviation of a sample's work over its mean; 0: all samples have one size."""
    input_s: float = 0.0
    """Time of one core to read a sample; 0: next to nothing."""

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def gathered(self) -> float:
        """Share of the parameters that are whole at a time in shards."""
        from shoal.decide.workload import gathered_share

        blocks = [sum(weight.numel() for weight in block.parameters()) for block in self.blocks]
        return gathered_share(self.num_parameters, blocks)

    @property
    def num_trainable(self) -> int:
        """Parameters that have gradients."""
        return sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad)


def token_ids(*shape: int) -> torch.Tensor:
    """Return token ids for a :class:`Sample`: int64 without values, on the meta device."""
    import torch

    return torch.empty(*shape, dtype=torch.int64, device="meta")


class Use:
    """Defines how the models of a recipe are used; :mod:`shoal.recipes.using` has the commands.

    ``shoal predict`` reads inputs, computes their outputs and formats these as rows; ``shoal evaluate`` reads
    labelled data, computes outputs and scores them; ``shoal export`` writes the model of a checkpoint. A
    recipe has a subclass with the methods of those that it offers, named ``use``. An instance is one command:
    its settings and, on a worker, the model.
    """

    Predict: ClassVar[type[Any]]
    """Settings of ``shoal predict``."""
    Evaluate: ClassVar[type[Any]]
    """Settings of ``shoal evaluate``."""
    one_input: ClassVar[str] = ""
    """Options that give one input instead of files, if there are any."""
    export_folder: ClassVar[str] = ""
    """Folder of an export, such as ``transformers``; empty: checkpoints are not exported."""

    world: World
    precision: Precision

    def __init__(self, settings: Any) -> None:
        """Take the settings, a ``Predict`` or an ``Evaluate``."""
        self.settings = settings

    @classmethod
    def find(cls, path: Path) -> ModelSource:
        """Return the files of a model; called before torch is imported."""
        from shoal.recipes.model_source import find_model

        return find_model(path)

    @classmethod
    def export(cls, source: Path, out: Path | None, dtype: torch.dtype) -> Path:
        """Write the model of a checkpoint and return the directory.

        Args:
            source: a run directory, whose best or newest checkpoint is taken, or one of its checkpoints.
            out: what to write; default: a folder of the run directory named after the step.
        """
        raise NotImplementedError

    def open(self, world: World, precision: Precision) -> None:
        """Read the model on a worker."""
        self.world, self.precision = world, precision
        self.read_model()

    def read_model(self) -> None:
        """Put the model on the worker's device, and read what its outputs depend on."""
        raise NotImplementedError

    def outputs(self, data: Any) -> Any:
        """Return the outputs on the first worker, ``None`` on the others; all workers call it."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------- predict

    def read(self, inputs: tuple[Path, ...]) -> Sequence[Any]:
        """Return the inputs of each file, or the one of the command line; before the model is read, too."""
        raise NotImplementedError

    def describe(self, data: Any) -> str:
        """Return a line of a dry run about the inputs of a file."""
        raise NotImplementedError

    def remarks(self, data: Any) -> list[str]:
        """Return lines about entries that are left out of a file."""
        return []

    def rows(self, data: Any, outputs: Any) -> Iterator[Row]:
        """Yield the rows of a file."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------- evaluate

    def score_files(self) -> str | None:
        """Return the scores of predictions in a file, if the settings name one instead of a model."""
        return None

    def check_evaluation(self, inputs: tuple[Path, ...]) -> list[str]:
        """Check the labelled data before torch is imported; return the lines of a dry run."""
        raise NotImplementedError

    def labelled(self, inputs: tuple[Path, ...]) -> Iterable[Any]:
        """Yield the labelled data of each file."""
        raise NotImplementedError

    def score(self, data: Any) -> str | None:
        """Return the scores of labelled data on the first worker; all workers call it."""
        outputs = self.outputs(data)
        return None if outputs is None else self.scores(data, outputs)

    def scores(self, data: Any, outputs: Any) -> str:
        """Return the scores of outputs as text, and write the files that the settings ask for."""
        raise NotImplementedError


class DryRun(Protocol):
    """Counts for a dry run what depends on the model; :class:`shoal.recipes.memory.MemoryCount` does it."""

    @property
    def machines(self) -> Any:
        """Planned hosts, as :class:`shoal.planner.hardware.Machines`; ``None``: this one."""

    def memory_line(self, config: Any, *phases: tuple[Sample, BatchPlan]) -> str:
        """Return the text about a worker's memory, in the phase that needs most, and about the hosts.

        Args:
            config: the recipe's; of its stages, each keeps as many micro-batches as there are stages.
            phases: a sample of each, on which activations are counted, and its batch.
        """
        ...


class Script(Protocol):
    """Lists the names in a recipe's module: ``sample`` and ``trial`` come together, ``use`` is optional."""

    PRESETS: tuple[str, ...]
    IMMUTABLE: tuple[str, ...]
    """Settings that must stay when a run continues: weights, optimizer state or data order depend on them."""
    use: type[Use]
    """By which its models are used."""

    def main(self, config: Any, worker: Any = None) -> int:
        """Train until the last step or a signal; return the exit code.

        Args:
            worker: this process, as :class:`shoal.env.worker.WorkerEnv`; default: by the environment.

        Raises:
            UsageError: settings that do not go together, or with the model, the data or the run there.
            ShoalError: damaged files or checkpoints, a lost worker, no memory, a loss that is not finite.
        """
        ...

    def check(self, config: Any, num_workers: int, dry_run: DryRun | None) -> list[str]:
        """Check the settings before any worker starts; return the lines of a dry run.

        Args:
            dry_run: counts for the lines; ``None``: the settings are checked, and no lines are wanted.

        Raises:
            UsageError: sizes that do not divide, or a file or model that cannot be used.
        """
        ...

    def sample(self, config: Any) -> Sample:
        """Return a few samples and the model: the first ones of the data, or of full length if none is named.

        ``shoal plan``, ``shoal bench train`` and dry runs count them (:mod:`shoal.recipes.workloads`,
        :mod:`shoal.recipes.memory`).
        """
        ...

    def trial(self, config: Any, folder: Path) -> Any:
        """Return the settings of a short run for ``shoal bench train``, with little evaluation.

        Args:
            config: its batch, steps and run directory are set, and it has no warm-up.
            folder: for synthetic data, where the settings name none.
        """
        ...


_SQUAD = """The run directory gets predictions.json, nbest.json and null_odds.json in the official formats,
scores.json, and the finetuned model as a transformers directory. Files are the official JSON, or JSONL, JSON
or Parquet with a row for each question. Training answers that are not found at their answer_start, and what
is not SQuAD's form, are counted and left out (--data.on-bad, --data.most-bad)."""
_CLASSIFY = """For each evaluation file, the run directory gets predictions-NAME.txt (one label per line) and
scores-NAME.json (accuracy and confusion table, which is printed too), and the finetuned model as a
transformers directory. Columns have MNLI's names unless --data.first, --data.second and --data.label give
others."""
_SCORES = """ With --data.scores labels are numbers, as STS-B's: predictions are too, and scores are Pearson's
and Spearman's correlation."""
_T5 = f"""{_CLASSIFY} With --source-column and --target-column targets are texts: inputs begin with the task's
name, outputs are found by beam search, and scores are exact match, token F1, ROUGE and BLEU."""
_CLASSIFY_SHORTCUTS = {
    "model": "model.path",
    "data": "data.path",
    "eval": "data.eval",
    "labels": "data.labels",
}

_OWN = {
    "albert": Recipe(
        config="AlbertConfig",
        preset="base",
        samples="fill-mask",
        help="Pretrain ALBERT: masked LM and sentence order.",
        example="shoal train albert --preset tiny --data.path runs/text --run.dir runs/first --workers 2",
        length="data.max_seq_length",
        divides=True,
        predict=Command(
            name="fill-mask",
            module="fill_mask",
            help="Fill the masks of texts with a pretrained encoder.",
            details="""Files are .txt with a text in each line. A line of the output: {"id": 1, "text": …,
"masks": [{"token": …, "probability": …, "top": [the likeliest tokens]}, …]}.

Example: `shoal predict fill-mask --model runs/first --text 'The [MASK] is on the table.'`""",
            inputs="Files of texts.",
        ),
    ),
    "bert": Recipe(
        config="BertConfig",
        preset="base",
        samples="fill-mask",
        help="Pretrain BERT: masked LM and next sentence, in two phases.",
        example="shoal train bert --preset tiny --data.path runs/text --run.dir runs/bert --workers 2",
        length="phase1.max_seq_length",
        divides=True,
    ),
    "t5": Recipe(
        config="T5Config",
        preset="base",
        samples="t5",
        help="Pretrain T5: span corruption, on one device per replica or on a pipeline of several.",
        example="shoal train t5 --preset tiny --data.path runs/text --workers 4 --parallel.pipeline 2",
        details="Workers = --parallel.pipeline × --parallel.data; a run may continue in another layout.",
        shortcuts={"devices": "parallel.devices", "memory": "parallel.memory"},
        length="data.input_length",
        layouts=True,
    ),
    "lm": Recipe(
        config="LmConfig",
        preset="tiny",
        samples="lm",
        help="Pretrain a causal language model of transformers, such as a GPT-2, Llama or Qwen.",
        example="shoal train lm --preset tiny --data.path runs/text --run.dir runs/lm --workers 2",
        details="""The model is a transformers directory, whose weights are trained on, or a config.json.
Held-out text is scored by loss, perplexity, bits per byte and accuracy.""",
        shortcuts={"model": "model.source"},
        workload="{name}-{config.model.source}",
        length="data.block_length",
        divides=True,
        predict=Command(
            name="lm",
            module="lm_use",
            help="Continue prompts with a causal language model.",
            details="""Files are .txt with a prompt in each line, or .jsonl ({"prompt": …} and, if you like,
an id); --text gives one prompt instead. A line of the output: {"id": 1, "prompt": …, "text": the
continuation, "tokens": …, "ended": "end token" or "max new tokens"}.

Example: `shoal predict lm --model runs/lm --text 'The list is' --max-new-tokens 20`""",
            inputs="Files of prompts.",
        ),
        evaluate=Command(
            name="lm",
            module="lm_use",
            help="Score a causal language model on text: loss, perplexity, bits per byte, accuracy.",
            details="""Every token counts that follows another one of its document. The scores are the same
bits on any number of workers.

Example: `shoal evaluate lm book.txt --model runs/lm`""",
            inputs="Files of text, in a format of `shoal prepare text`; default: held-out prepared text.",
        ),
    ),
    "resnet50": Recipe(
        config="ResNetTrainConfig",
        preset="imagenet-16k",
        samples="resnet50",
        help="Train ResNet-50, or another residual network, to classify images.",
        example="shoal train resnet50 --preset tiny --data.path runs/images --run.dir runs/resnet",
        details="The run is defined in epochs; its optimizer steps follow from the batch and are printed.",
        workload="{config.model.network}",
        predict=Command(
            name="resnet50",
            help="Classify images with a residual network.",
            details="""Inputs are images, or folders, which are searched recursively. A line
of the output: {"image": "photos/1.jpg", "label": …, "probability": …, "top": [the likeliest classes]}.

Example: `shoal predict resnet50 photos --model runs/resnet50 --out classes.jsonl --workers 2`""",
            inputs="Image files, or folders of them.",
        ),
        evaluate=Command(
            name="imagenet",
            help="Compute the top-1 and top-5 accuracy of a network on all validation images.",
            details="""The counts do not depend on the number of workers.

Example: `shoal evaluate imagenet runs/resnet50 --data /data/imagenet --workers 8`""",
            model="""A run of `shoal train resnet50`, one of its checkpoints, or a directory that `shoal
export` wrote.""",
        ),
    ),
    "mask_rcnn": Recipe(
        config="MaskRCNNTrainConfig",
        preset="coco-1x",
        help="Train Mask R-CNN to find objects in images, each with its box and mask.",
        example="shoal train mask_rcnn --preset tiny --data.path runs/coco --run.dir runs/detector",
        details="All workers score held-out images by COCO's rules.",
        workload="{config.model.network}",
        predict=Command(
            name="mask_rcnn",
            help="Detect objects in images: list them in JSON and draw boxes, masks, names and scores.",
            details="""For each image NAME.objects.png and NAME.objects.json are written. As in training,
EXIF orientation is ignored.

Example: `shoal predict mask_rcnn photos --model runs/detector --out found --classes person dog`""",
            inputs="JPEG, PNG, GIF or WebP files, or folders of them.",
        ),
        evaluate=Command(
            name="mask_rcnn",
            help="Find objects in labelled images with a trained detector and compute COCO's metrics.",
            details="""Objects and scores are bitwise those of its own training's end in the same precision,
on any number of workers.

Example: `shoal evaluate mask_rcnn --model runs/detector --data runs/coco --workers 2`""",
        ),
    ),
    "squad": Recipe(
        config="SquadConfig",
        preset="bert",
        samples="squad",
        help="Finetune on SQuAD 1.1 or 2.0 and answer the questions of an evaluation file.",
        group="finetune",
        example="shoal finetune squad --preset albert --model runs/first --data train.json --eval dev.json",
        details=_SQUAD,
        shortcuts={"model": "model.path", "data": "data.path", "eval": "data.eval"},
        starts_from=("bert", "albert"),
        length="window.max_seq_length",
        predict=Command(
            name="squad",
            help="Answer questions about paragraphs.",
            details="""Files are .jsonl ({"question": …, "context": …} and, if you like, an id) or .json
in the official format, with or without answers; --question and --context give one input instead. A line of
the output: {"id": …, "question": …, "answer": …, "probability": …}, in 2.0 with the odds of no answer.

Example: `shoal predict squad questions.jsonl --model runs/squad --out answers.jsonl --workers 2`""",
            inputs="Files of questions.",
        ),
        evaluate=Command(
            name="squad",
            help="Score answers to SQuAD 1.1 or 2.0, or a model that answers, as the official scripts do.",
            details="""Questions missing from the predictions file count as wrong by the rules of 1.1, and are
left out by those of 2.0; the output says how many there are. A model answers all questions, on all workers;
its scores are bitwise those of its own finetuning in the same precision, on any number of workers.

Example: `shoal evaluate squad --model runs/squad --data dev-v2.0.json --out scored --workers 2`""",
        ),
    ),
    "classify": Recipe(
        config="ClassifyConfig",
        preset="bert",
        samples="classify",
        help="Finetune on sentences or pairs with labels: MNLI, any tab-separated, JSONL or Parquet file.",
        example="shoal finetune classify --model runs/first --data train.tsv --eval dev.tsv",
        group="finetune",
        details=_CLASSIFY + _SCORES,
        shortcuts=_CLASSIFY_SHORTCUTS,
        starts_from=("bert", "albert"),
        length="data.max_seq_length",
        predict=Command(
            name="classify",
            help="Label texts or pairs of texts.",
            details="""Files are .tsv (column names first), .jsonl or .parquet, without labels, or .txt with
a text in each line; --text gives one input instead. A line of the output: {"id": 1, "label": "entailment",
"probabilities": {"neutral": 0.1, …}}, or {"id": 1, "score": 3.2} of a model that learnt scores.

Example: `shoal predict classify pairs.tsv --model runs/mnli --out labels.jsonl --workers 2`""",
            inputs="Files of texts.",
        ),
        evaluate=Command(
            name="classify",
            help="Score a finetuned model on texts with labels or scores, for each file separately.",
            details="""Predictions and scores are bitwise those of its own finetuning in the same precision,
on any number of workers.

Example: `shoal evaluate classify pairs.tsv --model runs/mnli`""",
            inputs="Files of texts and labels, .tsv (column names first), .jsonl or .parquet.",
        ),
    ),
    "t5_classify": Recipe(
        config="T5ClassifyConfig",
        preset="t5",
        samples="t5",
        help="Finetune T5 on sentences or pairs with labels, which it generates, or from text to text.",
        example="shoal finetune t5 --task mnli --model runs/t5 --data train.tsv --eval dev_matched.tsv",
        group="finetune",
        command="t5",
        details=_T5,
        shortcuts={
            "task": "data.task",
            "source_column": "data.source_column",
            "target_column": "data.target_column",
            **_CLASSIFY_SHORTCUTS,
        },
        run_name="t5-{config.data.task}-{preset}",
        starts_from=("t5",),
        length="data.max_seq_length",
        predict=Command(
            name="t5",
            help="Label texts with a finetuned T5, or generate texts.",
            details="""Files are .tsv (column names first), .jsonl or .parquet, without labels, or .txt with
a text in each line; --text gives one input instead. A line of the output: {"id": 1, "label": the likeliest,
"probabilities": {…}}; with
--data.labels-by generation {"id": 1, "generated_label": "entailment"}, or null if the output is no label. A
text-to-text model, and one that was not finetuned, generates {"id": 1, "text": …}. A model that was not
finetuned reads the first text unchanged, or in the form of --data.task.

Example: `shoal predict t5 pairs.tsv --model runs/t5-mnli --out labels.jsonl --workers 2`""",
            inputs="Files of texts.",
        ),
        evaluate=Command(
            name="t5",
            help="Score a finetuned T5 on each file separately: labels by accuracy, texts by four scores.",
            details="""A label is the one whose tokens are likeliest, or, with --data.labels-by generation,
the one that the model writes; the score is then called generated accuracy. Texts (--data.source-column,
--data.target-column) are scored by exact match, token F1, ROUGE and BLEU. Predictions and scores are those of
its own finetuning in the same precision, on any number of workers: bitwise, unless that had the model in
stages, whose likelihoods are rounded otherwise.

Example: `shoal evaluate t5 pairs.tsv --model runs/t5-mnli`""",
            inputs="Files of texts and labels or targets, .tsv (column names first), .jsonl or .parquet.",
        ),
    ),
    "lm_finetune": Recipe(
        config="LmFinetuneConfig",
        preset="full",
        samples="lm",
        help="Finetune a causal language model on conversations, or on prompts and responses.",
        example="shoal finetune lm --preset lora --model models/qwen2 --data chats.jsonl --run.dir runs/chat",
        group="finetune",
        command="lm",
        details="""Files are .jsonl, .json or .parquet. A row has `messages`, which the tokenizer's chat
template turns into text, or `prompt` and `completion`. Only responses are learnt. The run directory gets the
model as a transformers directory; with --lora.rank also its adapters as peft saves them.""",
        shortcuts={"model": "model.path", "data": "data.path"},
        run_name="lm-{preset}",
        length="data.max_seq_length",
        divides=True,
    ),
}


def installed() -> dict[str, Recipe]:
    """Return the recipes of other installed packages, by the names of their entry points.

    An entry point cannot replace a recipe of shoal.

    Raises:
        TypeError: one is no :class:`Recipe`.
    """
    recipes: dict[str, Recipe] = {}
    for entry in entry_points(group=__name__):
        if entry.name not in _OWN:
            recipes[entry.name] = recipe = entry.load()
            if not isinstance(recipe, Recipe):
                raise TypeError(f"the entry point {entry.name} of {__name__} is {recipe!r}, not a Recipe")
    return recipes


RECIPES = _OWN | installed()


def recipe_of_command(group: str, command: str) -> str | None:
    """Return the name of the recipe that ``shoal GROUP COMMAND`` runs, if it runs one."""
    return next(
        (name for name, each in RECIPES.items() if (each.group, each.command or name) == (group, command)),
        None,
    )


def script(name: str) -> Script:
    """Import and return the module of a recipe."""
    return cast(Script, import_module(_module(name)))


def main_of(name: str, config: Any) -> Callable[..., int]:
    """Return the function that trains with these settings, ``main(config, worker=None)``."""
    if not RECIPES[name].divides or not config.parallel.splits:
        return script(name).main
    main: Callable[..., int] = import_module(f"{__name__}.divided").main
    return main


def use_of(name: str) -> type[Use] | None:
    """Return how the models of a recipe are used, or ``None`` if they cannot be, or it is not known."""
    return getattr(script(name), "use", None) if name in RECIPES else None


def command_use(name: str, command: Command) -> type[Use]:
    """Return how a command of a recipe uses models."""
    own = import_module(f"{__name__}.{command.module}") if command.module else script(name)
    return cast(Script, own).use


def _module(name: str) -> str:
    return RECIPES[name].module or f"{__name__}.{name}"


def preset_file(name: str, preset: str) -> Traversable:
    """Return the file of a recipe's preset, which may not exist."""
    return resources.files(_module(name).rpartition(".")[0]) / "presets" / name / f"{preset}.toml"


def run_script(name: str) -> None:
    """Replace this process by the recipe's command with the same options."""
    recipe = RECIPES[name]
    command = [recipe.group, recipe.command or name]
    os.execv(sys.executable, [sys.executable, "-m", "shoal", *command, *sys.argv[1:]])
