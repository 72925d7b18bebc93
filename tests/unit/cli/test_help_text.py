"""Output of --help, and messages about an incomplete command line."""

from __future__ import annotations

import pytest

from forked import shoal
from shoal.cli.help_text import laid_out


def test_paragraphs_are_one_line_and_code_stays() -> None:
    text = laid_out("""Sum gradients, with ``int8`` on the
    wire.

    shoal serve --address 10.0.0.1
    shoal doctor

Say `shoal stop` to
end it.""")
    assert text.plain == (
        "Sum gradients, with int8 on the wire.\n\n"
        "    shoal serve --address 10.0.0.1\n    shoal doctor\n\n"
        "Say shoal stop to end it."
    )
    assert [text.plain[span.start : span.end] for span in text.spans if span.style] == ["int8", "shoal stop"]


def test_help_shows_no_default_that_says_nothing_and_no_option_for_it() -> None:
    said = shoal("plan", "--help").stdout
    assert said.startswith("Usage: shoal plan [OPTIONS] [ARGS...]")
    for word in ("default: ()", '""', "--empty", "`"):
        assert word not in said
    assert "[default: fp32]" in said


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        (("prepare", "text", "book.txt"), "shoal prepare text needs --out; see shoal prepare text --help"),
        (("export",), "shoal export needs SOURCE; see shoal export --help"),
        (("serve", "--address"), 'Command "serve" parameter --address requires an argument.'),
    ],
)
def test_what_is_missing_is_named(command: tuple[str, ...], needs: str) -> None:
    result = shoal(*command)
    assert result.returncode == 2
    assert needs in " ".join((result.stdout + result.stderr).replace("│", "").split())


def test_the_last_of_an_option_counts() -> None:
    result = shoal("train", "albert", "--data.path", "first", "--data.path", "second")
    assert result.returncode == 2
    assert result.stderr.startswith("shoal: second has no manifest.json")
