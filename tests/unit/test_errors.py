"""Exit codes and suggestions."""

from __future__ import annotations

import pytest

from shoal.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, EXIT_USAGE, ShoalError, UsageError, did_you_mean


def test_exit_codes_differ_and_the_errors_carry_theirs() -> None:
    assert len({EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_STOPPED}) == 4
    assert (ShoalError("x").exit_code, UsageError("x").exit_code) == (EXIT_FAILURE, EXIT_USAGE)


def test_usage_error_is_caught_as_either() -> None:
    """Libraries expect a ValueError for a wrong argument, the command line a ShoalError."""
    for kind in (UsageError, ShoalError, ValueError):
        with pytest.raises(kind, match="wrong"):
            raise UsageError("wrong")
    assert not issubclass(ShoalError, ValueError)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("learning-rate", " Did you mean 'learning_rate'?"),
        ("warmup_step", " Did you mean 'warmup_steps'?"),
        ("zebra", ""),
        ("", ""),
    ],
)
def test_did_you_mean(word: str, text: str) -> None:
    assert did_you_mean(word, iter(["learning_rate", "warmup_steps", "weight_decay"])) == text
    assert did_you_mean(word, []) == ""
