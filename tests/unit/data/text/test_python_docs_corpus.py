"""The prose filter on written cases, docstrings against `ast`, and the order of an installation."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import textwrap
from pathlib import Path

import pytest

from shoal.data.text import python_docs_corpus
from shoal.data.text.python_docs_corpus import clean_markup, is_prose, prose_paragraphs

NUMPY_STYLE = """
Return the sum of the elements, as the name says it does.

    It is computed in the order in which the elements are stored in memory.

.. math:: x = y

Parameters
----------
a : array_like
    The elements that are to be summed up, in any shape whatever.
out : ndarray, optional
    n.

Notes
-----
The sum of an empty array is the neutral element, which is 0. For example::

    this is code that should not be in the text at all, is it?

After the code there is a further sentence with :class:`~torch.nn.Linear` and `a link <https://x.y>`_ in it.

>>> sum([1, 2])
3

| one   | two    |
| the table is not for us | at all, or is it the one that we want? |
"""


def test_numpy_docstring() -> None:
    assert prose_paragraphs(NUMPY_STYLE) == [
        "Return the sum of the elements, as the name says it does.",
        "It is computed in the order in which the elements are stored in memory.",
        "The elements that are to be summed up, in any shape whatever.",
        "The sum of an empty array is the neutral element, which is 0.",
        "After the code there is a further sentence with Linear and a link in it.",
    ]


def test_google_docstring_and_markdown() -> None:
    text = """# A title that is not a sentence of the text

This is the first paragraph of
the text, with **bold** words and [a link](http://x.y).

Args:
    size (`int`, *optional*, defaults to 3): The size of the thing that is to be made here.
    name: The name
        of the thing that is to be made here.

```python
This is not a sentence that we want to have in the text.
```
- The first of the items in this list is a sentence.
- not_a_sentence
"""
    assert prose_paragraphs(text) == [
        "This is the first paragraph of the text, with bold words and a link.",
        "The size of the thing that is to be made here.",
        "The name of the thing that is to be made here.",
        "The first of the items in this list is a sentence.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Too short to be of use.",
        "without a capital the paragraph is a part of something else.",
        "This one has no end and is therefore a title or part of a list",
        "Available names are Alpha, Beta, Gamma, Delta, Epsilon, Zeta, Eta, Theta, Iota, Kappa.",
        "If x = y then a[i] = b(j) and the foo_bar is {x: y} or it is the other_one(x).",
        "Copyright of the text is with the authors, and all of it is under the Apache License.",
        "The [MASK] token is the one that is put in the place of the word.",
    ],
)
def test_what_is_not_prose(text: str) -> None:
    assert not is_prose(text)


def test_markup_goes() -> None:
    text = (
        "See :meth:`.Artist.draw`, :ref:`the guide <guide>`, |term|, *this* and ``that`` [1]_ (http://a.b) ."
    )
    assert clean_markup(text) == "See draw, the guide, term, this and that."


def test_docstrings_are_those_that_ast_finds() -> None:
    """On modules with all kinds of strings; more may be found (texts attached by functions), none missed."""
    for module in (inspect, argparse, functools, textwrap):
        source = Path(inspect.getfile(module)).read_text(encoding="utf-8")
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, nodes)]
        expected = {text for text in found if text and '"""' in source}
        triple = set(python_docs_corpus.docstrings(source))
        missed = {text for text in expected - triple if "\n" in text}
        assert not missed and len(triple & expected) >= 3


def test_strings_comments_and_escapes_do_not_confuse() -> None:
    source = """x = '\"\"\"'  # it's \"\"\" here
'''One\\n  two.'''
def f():
    r\"\"\"Raw \\d "quoted" text.\"\"\"
    return \"\"\"not a docstring\"\"\"
y = "\\\\"; z = '\\''
\"\"\"Last.\"\"\"
\"\"\"never closed
"""
    assert list(python_docs_corpus.docstrings(source)) == ["One\ntwo.", 'Raw \\d "quoted" text.', "Last."]


def test_files_have_a_fixed_order_and_no_tests() -> None:
    files = python_docs_corpus.source_files()
    assert files == python_docs_corpus.source_files()
    names = {(file.parent.name, file.name) for file in files}
    assert {("pydoc_data", "topics.py"), ("numpy", "__init__.py"), ("torch", "__init__.py")} <= names
    assert not any("tests" in file.parts[-4:] for file in files)


def test_topics_of_the_manual_are_a_document_each() -> None:
    topics = next(
        file for file in python_docs_corpus.source_files() if file.parts[-2:] == ("pydoc_data", "topics.py")
    )
    found = [" ".join(document) for document in python_docs_corpus.documents(topics) if document]
    assert len(found) > 50 and sum(map(len, found)) > 150_000
    assert any(
        "Assignment is defined recursively depending on the form of the target" in text for text in found
    )


def test_repeated_paragraphs_are_known_again() -> None:
    seen: set[bytes] = set()
    text = "The quick brown fox jumps over the lazy dog and then it goes home again."
    assert python_docs_corpus._is_new(text, seen)
    assert not python_docs_corpus._is_new(text.replace("fox", "Fox") + " Twice.", seen)
    assert python_docs_corpus._is_new("Something else altogether is said in this sentence here.", seen)


def test_a_file_that_cannot_be_read_has_no_documents(tmp_path: Path) -> None:
    assert python_docs_corpus.documents(tmp_path / "missing.py") == []
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    assert python_docs_corpus.documents(tmp_path / "bytes.py") == [[]]
