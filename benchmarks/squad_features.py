"""Time to SQuAD's windows, against `datasets.map` as transformers' `run_qa` calls it.

The same questions, the same tokenizer, windows of 384 tokens that share 128; both sides end with token ids,
types and the answer's first and last token. That the windows are equal is checked before anything is
measured. The peer tokenises question and paragraph together, in batches of 1,000 with overflowing tokens
and offsets, and nothing is cached. With 2 processes it has ``num_proc=2``; ours stays one process, whose
tokenizer has 2 threads. With 1 process neither side has more than a thread.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.harness import Benchmark, peer_module
from shoal.data.squad.config import WindowConfig
from shoal.data.squad.dataset import SquadData, read_squad
from shoal.data.squad.features import SquadFeatures, make_features
from shoal.data.text.tokenizer import read_tokenizer
from shoal.data.text.tokenizer_files import special_ids
from shoal.env.settings import TEST_DATA, test_data_dir

TARGET = 1.5
MAX_SEQ_LENGTH = 384
OVERLAP = 128
"""Tokens that two windows share; `run_qa` calls it ``doc_stride``."""
WINDOWS = WindowConfig(
    max_seq_length=MAX_SEQ_LENGTH,
    overlap=OVERLAP,
    max_question_length=MAX_SEQ_LENGTH,  # the peer cuts no questions
)
MEASURED = "cs224n-dev-v2.0.json"
CHECKED_TOO = "xquad.en.json"
TOKENIZERS = {"WordPiece": "bert-uncased-vocab.txt", "Unigram": "albert_spiece.model"}
MOST_DIFFERENT = 0.001
"""Share of windows whose answer may begin at another token; see :func:`check_equal`."""
THREADS = "TOKENIZERS_PARALLELISM"


def question_rows(data: SquadData) -> Any:
    """Return the questions as a dataset with the columns of SQuAD on the hub."""
    return peer_module("datasets").Dataset.from_list(
        [
            {
                "id": question.id,
                "context": data.paragraphs[question.paragraph],
                # without blanks at its ends, some of which sentencepiece would make a token
                "question": question.text.strip(),
                "answers": {
                    "text": [answer.text for answer in question.answers],
                    "answer_start": [answer.start for answer in question.answers],
                },
            }
            for question in data.questions
        ]
    )


def map_rows(rows: Any, tokenizer: Any, processes: int) -> Any:
    """The peer's side: the training features of `run_qa`, not padded.

    Args:
        tokenizer: a fast tokenizer of transformers.
    """

    def features(batch: dict[str, list[Any]]) -> dict[str, Any]:
        made = tokenizer(
            batch["question"],
            batch["context"],
            truncation="only_second",
            max_length=MAX_SEQ_LENGTH,
            stride=OVERLAP,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=True,
        )
        sources, offsets = made.pop("overflow_to_sample_mapping"), made.pop("offset_mapping")
        spans = [
            answer_span(batch["answers"][source], offsets[window], made.sequence_ids(window))
            for window, source in enumerate(sources)
        ]
        made["start_positions"] = [first for first, _ in spans]
        made["end_positions"] = [last for _, last in spans]
        return dict(made)

    return rows.map(
        features,
        batched=True,
        num_proc=processes if processes > 1 else None,
        remove_columns=rows.column_names,
        load_from_cache_file=False,
    )


def answer_span(
    answers: dict[str, list[Any]], offsets: list[tuple[int, int]], parts: list[int | None]
) -> tuple[int, int]:
    """Return the positions of the first answer's ends, found token by token; 0 where it is not all inside."""
    if not answers["answer_start"]:
        return 0, 0
    begin = answers["answer_start"][0]
    end = begin + len(answers["text"][0])
    first, last = 0, len(parts) - 1
    while parts[first] != 1:
        first += 1
    while parts[last] != 1:
        last -= 1
    if offsets[first][0] > begin or offsets[last][1] < end:
        return 0, 0
    while first < len(offsets) and offsets[first][0] <= begin:
        first += 1
    while offsets[last][1] >= end:
        last -= 1
    return first - 1, last + 1


def check_equal(case: str, ours: SquadFeatures, peer: Any) -> int:
    """Compare all windows of both sides; return in how many the answer's positions differ.

    An answer at the begin of a paragraph that sentencepiece begins with a lone blank does: its first token is
    the blank here, the one after it there.

    Raises:
        SystemExit: the number of windows, a length, a token id or a type differs, or more positions than that
            explains.
    """
    lengths = [len(window) for window in peer["input_ids"]]
    if not np.array_equal(np.diff(ours.bounds), lengths):
        raise SystemExit(
            f"{case}: {len(ours)} windows here and {len(lengths)} there, or not of the same lengths"
        )
    for name, values in (("input_ids", ours.tokens), ("token_type_ids", ours.types)):
        if not np.array_equal(values, np.concatenate(peer[name][:])):
            raise SystemExit(f"{case}: the sides make different {name}; a comparison would mean nothing")
    differs = (ours.start != peer["start_positions"][:]) | (ours.end != peer["end_positions"][:])
    if differs.mean() > MOST_DIFFERENT:
        raise SystemExit(f"{case}: {differs.sum()} of {len(ours)} windows have another answer there")
    return int(differs.sum())


def read_pair(name: str) -> tuple[Tokenizer, Any]:
    """Return one of ``TOKENIZERS`` for our side and, as an object of its own, for the peer's."""
    file = find(f"tokenizers/{TOKENIZERS[name]}")
    ours, theirs = (read_tokenizer(file, lowercase=True) for _ in range(2))
    specials = {f"{role}_token": ours.id_to_token(i) for role, i in special_ids(ours, str(file)).items()}
    return ours, peer_module("transformers").PreTrainedTokenizerFast(tokenizer_object=theirs, **specials)


def find(name: str) -> Path:
    """Return a file of the test data.

    Raises:
        SystemExit: it is not there.
    """
    file = test_data_dir() / name
    if not file.is_file():
        raise SystemExit(
            f"{file} is not there: this benchmark reads SQuAD and tokenizers from the test data; "
            f"name its folder in {TEST_DATA}"
        )
    return file


def compare(bench: Benchmark, data: SquadData, name: str, processes: int) -> None:
    """Add the row of one tokenizer and number of processes."""
    mine, theirs = read_pair(name)
    rows = question_rows(data)
    num_questions = len(data.questions)
    threads = "true" if processes > 1 else "false"

    def ours() -> float:
        # the peer's library leaves it at "false", unseen by Python, once it has had processes
        os.environ[THREADS] = threads
        begin_s = time.perf_counter()
        make_features(data, mine, WINDOWS)
        return num_questions / (time.perf_counter() - begin_s)

    def peer() -> float:
        os.environ[THREADS] = "false"
        begin_s = time.perf_counter()
        map_rows(rows, theirs, processes)
        return num_questions / (time.perf_counter() - begin_s)

    bench.compare(
        f"{name}, {num_questions:,} questions, {processes} process{'es' if processes > 1 else ''}",
        ours=ours,
        peer=peer,
        peer_name="datasets.map as in run_qa",
        unit="1/s",
        target=TARGET,
        better="higher",
        repetitions=6,
        quick_repetitions=2,
        warmup=1,
    )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--processes", type=int, action="append", help="only these; default: 1 and 2")
    bench = Benchmark("squad_features", options=options)
    datasets = peer_module("datasets")
    peer_module("transformers").logging.set_verbosity_error()
    datasets.disable_progress_bars()
    datasets.disable_caching()
    files = [read_squad(find(f"squad/{name}"), purpose="score") for name in (MEASURED, CHECKED_TOO)]
    for name in TOKENIZERS:
        mine, theirs = read_pair(name)
        for data in files:
            case, made = f"{data.path.name}, {name}", make_features(data, mine, WINDOWS)
            num_other = check_equal(case, made, map_rows(question_rows(data), theirs, 1))
            print(f"{case}: {len(made):,} windows of the same tokens; {num_other} answers begin elsewhere")
    for name in TOKENIZERS:
        for processes in bench.args.processes or (1, 2):
            compare(bench, files[0], name, processes)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
