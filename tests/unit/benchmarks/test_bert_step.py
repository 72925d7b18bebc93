"""The Trainer must be given the sequences of our packed batches, or its times mean nothing."""

import numpy as np
import torch
from benchmarks import bert_step_worker as worker

from shoal.data.packing import pack_padded

IDS = np.array([[2, 7, 8, 3, 9, 3], [2, 6, 3, 0, 0, 0]])
TYPES = np.array([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]])
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


def test_pretraining_rows_are_the_padded_batch_again() -> None:
    packed = pack_padded(IDS, TYPES, MASK)
    masked = {"masked_rows": np.array([2, 4, 7]), "masked_ids": np.array([18, 19, 16])}
    rows = worker.peer_rows({**packed, **masked, "labels": np.array([1, 0])})
    assert [len(row["input_ids"]) for row in rows] == [6, 3]
    batch = worker.collate(rows)
    for name, values in (("input_ids", IDS), ("token_type_ids", TYPES), ("attention_mask", MASK)):
        assert batch[name].tolist() == values.tolist()
    assert batch["labels"].tolist() == [[-100, -100, 18, -100, 19, -100], [-100, 16] + 4 * [-100]]
    assert batch["next_sentence_label"].tolist() == [1, 0]


def test_rows_of_tasks_have_the_names_of_transformers() -> None:
    packed = pack_padded(IDS, TYPES, MASK)
    batch = worker.collate(worker.peer_rows({**packed, "start": np.array([4, 0]), "end": np.array([5, 0])}))
    assert batch["start_positions"].tolist() == [4, 0]
    assert batch["end_positions"].tolist() == [5, 0]
    batch = worker.collate(worker.peer_rows({**packed, "labels": np.array([2, 1])}))
    assert torch.equal(batch["labels"], torch.tensor([2, 1]))
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
