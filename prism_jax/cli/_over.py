"""A grid of values of a job's keys: `--over`."""

import itertools as it
import math

from .._misc import quoted


# The most values of one key, and the most combinations: each takes a tenth of a second or more.
MOST_POINTS = 10_000


def values(
    text: str, option: str = "--over", example: str = "layout.dp=16,32,64"
) -> tuple[str, list[str]]:
    """A key and its values: `key=a,b,c` or `key=from:to:how_many`.

    **Raises:**

    A `ValueError` of one sentence.
    """
    key, equals, given = text.partition("=")
    key, given = key.strip(), given.strip()
    if not key or not equals or not given:
        raise ValueError(
            f"`{option} {quoted(text)}` is not a key and its values; write it as `{example}`."
        )
    if given[0] in "[{":
        raise ValueError(
            f"`{option} {quoted(text)}` gives lists or tables; vary keys that have one number or "
            f"word, as in `{example}`, and give a list by `--set`."
        )
    if ":" not in given:
        choices = [choice.strip() for choice in given.split(",")]
        if len(choices) > MOST_POINTS:
            raise ValueError(
                f"`{option} {quoted(text)}` has {len(choices):,} values; a sweep takes up to "
                f"{MOST_POINTS:,}, so give fewer."
            )
        if not all(choices):
            raise ValueError(
                f"`{option} {quoted(text)}` has an empty value; separate values by one comma."
            )
        return key, choices
    try:
        first, last, number = given.split(":")
        low, high, many = float(first), float(last), int(number)
        if not (1 <= many <= MOST_POINTS and math.isfinite(high - low)):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"`{option} {quoted(text)}` is not a range; write from, to and how many (1 to "
            f"{MOST_POINTS}), as in `kernels.all_gather.sigma=0.01:0.2:20`."
        ) from None
    step = (high - low) / max(many - 1, 1)
    return key, [f"{low + i * step:.12g}" for i in range(many)]


def choices_of(texts: list[str]) -> dict[str, list[str]]:
    """The values of each key. Raises a `ValueError` of one sentence."""
    over: dict[str, list[str]] = {}
    for text in texts:
        key, choices = values(text)
        if key in over:
            raise ValueError(
                f"`--over {quoted(key)}` was given twice; give all of its values at once."
            )
        over[key] = choices
    number = math.prod(map(len, over.values()))
    if number > MOST_POINTS:
        raise ValueError(
            f"The values of `--over` make {number:,} combinations; a sweep takes up to "
            f"{MOST_POINTS:,}, so give fewer values."
        )
    return over


def changes_of(texts: list[str]) -> list[list[str]]:
    """The overrides of each combination of values; a single empty one if there are no values."""
    over = choices_of(texts)
    return [
        [f"{key}={value}" for key, value in zip(over, row, strict=True)]
        for row in it.product(*over.values())
    ]
