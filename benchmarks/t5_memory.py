"""Memory of a worker that finetunes T5: one of 4 stages, against a worker that has the whole model.

Both run ``shoal finetune t5`` from a transformers directory to the finished model: two steps, an evaluation,
a checkpoint and the export. A sample is the most that a process had resident (pages of files included) above
what it had when torch, transformers and the recipe were imported.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import Benchmark
from benchmarks.worker import free_port, run_alone

STAGES = 4
MIB = 2**20
SIZES = {
    "small": {"num_layers": 6},
    "tiny": {"num_layers": 2, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": 2_048},
}
"""T5's small, and one with which the benchmark takes half a minute: of it the limit says nothing."""


def prepare(folder: Path, size: str) -> tuple[int, Path, Path]:
    """Write a T5 with random weights, a tokenizer and examples; return the model's bytes."""
    from transformers import T5Config, T5ForConditionalGeneration

    from shoal.data.text.tokenizer import train_tokenizer
    from shoal.data.text.tokenizer_files import tokenizer_json

    words = ["sun", "moon", "river", "stone", "bird", "tree", "wind", "light", "road", "same", "other", ":"]
    tokenizer = train_tokenizer("wordpiece", [" ".join(words)] * 20, vocab_size=120, lowercase=True)
    pad, end = tokenizer.token_to_id("[PAD]"), tokenizer.token_to_id("[SEP]")
    sizes = T5Config(**SIZES[size], pad_token_id=pad, eos_token_id=end, decoder_start_token_id=pad)
    model = T5ForConditionalGeneration(sizes)
    model.save_pretrained(folder / "t5")
    (folder / "t5" / "tokenizer.json").write_bytes(tokenizer_json(tokenizer))
    rows = [f"{words[i % 9]}\t{words[i % 7]}\t{'same' if i % 2 else 'other'}" for i in range(16)]
    (folder / "pairs.tsv").write_text("\n".join(["sentence1\tsentence2\tgold_label", *rows]) + "\n")
    return sum(p.nbytes for p in model.parameters()), folder / "t5", folder / "pairs.tsv"


def measure(folder: Path, model: Path, pairs: Path, *, pipeline: int) -> list[float]:
    """Return the growth of each worker of a run, in MiB."""
    spec = {
        "model": str(model), "pairs": str(pairs), "run": str(folder / f"run-{pipeline}"),
        "pipeline": pipeline, "port": free_port(),
    }  # fmt: skip
    function = "benchmarks.t5_memory_worker:growth"
    with ThreadPoolExecutor(pipeline) as pool:
        growths = pool.map(lambda rank: run_alone(function, spec | {"rank": rank}), range(pipeline))
        return [growth / MIB for growth in growths]


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--size", choices=tuple(SIZES), default="small", help="of the model")
    bench = Benchmark("t5_memory", options=options)
    with tempfile.TemporaryDirectory() as name:
        num_bytes, model, pairs = prepare(Path(name), bench.args.size)
        whole = measure(Path(name), model, pairs, pipeline=1)
        stages = measure(Path(name), model, pairs, pipeline=STAGES)
    size = num_bytes / MIB
    title = f"T5-{bench.args.size} ({size:.0f} MiB)"
    bench.limit(
        f"{title}, the fullest of {STAGES} stages",
        max(stages),
        0.5 * size + 300,
        unit="MiB",
        formula="0.5 × the model + 300 MiB",
    )
    bench.add(
        f"{title}, each of {STAGES} stages",
        ours=stages,
        peer=whole,
        peer_name="a worker with the whole model",
        unit="MiB",
    )
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
