"""Finds the largest micro-batch that fits into memory, in few trials."""

from __future__ import annotations

from collections.abc import Callable

MOST = 1 << 20
"""Samples of a micro-batch that nothing reaches."""
_MOST_GROWTH = 8
"""A trial has at most so many times the samples of one that fits."""
_PRECISION = 32
"""The search ends when the next larger trial would be greater by less than this part."""


def largest_that_fits(
    peak_bytes: Callable[[int], int | None],
    limit_bytes: float,
    *,
    most: int = MOST,
    sample_bytes: float = 0.0,
) -> int:
    """Return the largest number of samples, or one less than a 32nd below it; 0 if not even one fits.

    Memory grows about linearly with the samples, so the next trial is where the line through the last two
    meets the limit; it stays between the largest that fits and the smallest that does not.

    Args:
        peak_bytes: tries a number of samples; returns the memory at its peak, ``None`` if it was too little.
        limit_bytes: memory that may be used.
        most: samples to try at most.
        sample_bytes: expected growth by a sample, for the second trial; 0: unknown.

    Example:
        >>> trials = []
        >>> def peak(samples):
        ...     trials.append(samples)
        ...     return 1000 + 10 * samples
        >>> largest_that_fits(peak, 1305), trials
        (30, [1, 8, 30, 31])
        >>> trials.clear()
        >>> largest_that_fits(peak, 1305, sample_bytes=10.5), trials
        (30, [1, 29, 30, 31])
    """
    fits: list[tuple[int, int]] = []
    fails = most + 1
    samples = 1
    while True:
        peak = peak_bytes(samples)
        if peak is None or peak > limit_bytes:
            fails = samples
        else:
            fits.append((samples, peak))
        low = fits[-1][0] if fits else 0
        if fails - low <= max(1, low // _PRECISION):
            return low
        samples = min(max(_guess(fits, limit_bytes, low, fails, sample_bytes), low + 1), fails - 1)


def _guess(fits: list[tuple[int, int]], limit_bytes: float, low: int, fails: int, sample_bytes: float) -> int:
    """Return the number of samples to try next."""
    grown = min(_MOST_GROWTH * low, fails - 1)
    if len(fits) == 1 and sample_bytes > 0:
        return min(low + int((limit_bytes - fits[0][1]) / sample_bytes), fails - 1)
    if len(fits) < 2:
        return grown if low else fails // 2
    (before, before_bytes), (last, last_bytes) = fits[-2:]
    slope = (last_bytes - before_bytes) / (last - before)
    if slope <= 0:
        return grown
    target = last + int((limit_bytes - last_bytes) / slope)
    if target <= low:  # the line says that no more fit: one more trial settles it
        return low + max(1, low // _PRECISION)
    return min(target, grown)
