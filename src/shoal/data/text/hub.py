"""Reads data sets of Hugging Face's hub through ``datasets``: ``hf:NAME[:CONFIG][:SPLIT][:FIELD]``.

The rows are written once, as JSON lines beside the shards, when the preparation begins; from there on they
are a source like any other. A data set that changes on the hub meanwhile changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from shoal.data.text.rows import TEXT
from shoal.errors import ShoalError, UsageError, did_you_mean

PREFIX = "hf:"
FORM = "hf:NAME[:CONFIG][:SPLIT][:FIELD]"

_COLON = re.compile(r":(?![^\[]*\])")
"""A colon that is in no slice, as ``train[:10%]`` has one."""
_BATCH_ROWS = 64


class HubSource(NamedTuple):
    """A split of a data set, and the field with its text.

    Attributes:
        name: on the hub, or a local directory.
        config: empty for the default.
    """

    name: str
    config: str = ""
    split: str = "train"
    field: str = TEXT


def parse_hub(source: str) -> HubSource:
    """Return the parts of ``hf:NAME[:CONFIG][:SPLIT][:FIELD]``; parts that are empty are the default.

    Raises:
        UsageError: there is no name or more than four parts, or the package ``datasets`` is missing.

    Example:
        >>> parse_hub("hf:wikimedia/wikipedia:20231101.simple::title")
        HubSource(name='wikimedia/wikipedia', config='20231101.simple', split='train', field='title')
    """
    parts = _COLON.split(source.removeprefix(PREFIX))
    if not parts[0] or len(parts) > len(HubSource._fields):
        raise UsageError(f"{source}: a data set is named as {FORM}; empty parts are the default")
    if find_spec("datasets") is None:
        raise UsageError(
            f"{source}: needs the package datasets, which is not installed: pip install datasets"
        )
    return HubSource(**{key: part for key, part in zip(HubSource._fields, parts, strict=False) if part})


def json_lines(source: str) -> Iterator[bytes]:
    """Yield the rows of a data set as lines of JSON objects with the one field, in their order.

    Raises:
        UsageError: there is no such data set, configuration, split or field of text.
        ShoalError: it cannot be downloaded.
    """
    parsed = parse_hub(source)
    datasets = import_module("datasets")
    try:
        rows = datasets.load_dataset(parsed.name, parsed.config or None, split=parsed.split)
    except ConnectionError as error:
        raise ShoalError(f"{source}: cannot be downloaded: {error}") from None
    except Exception as error:  # noqa: BLE001  # of the library, or of what it uses to read this data set
        reason = error.__cause__ or error
        raise UsageError(f"{source}: datasets cannot load it as {FORM}: {reason}") from None
    texts = [name for name, kind in rows.features.items() if getattr(kind, "dtype", "").endswith("string")]
    if parsed.field not in texts:
        raise UsageError(
            f"{source}: there is no text in a field {parsed.field!r}; its texts are "
            f"{', '.join(texts) or 'none'}. Name one as {FORM}." + did_you_mean(parsed.field, texts)
        )
    for batch in rows.select_columns([parsed.field]).iter(batch_size=_BATCH_ROWS):
        lines = (json.dumps({parsed.field: text}, ensure_ascii=False) for text in batch[parsed.field])
        yield "".join(f"{line}\n" for line in lines).encode()
