"""A warning for comparisons between different numbers of GPUs."""

from collections.abc import Mapping


def other_sizes(sizes: Mapping[str, int], size: int) -> list[str]:
    """A sentence if the compared jobs do not all have the same number of GPUs."""
    others = {name: number for name, number in sizes.items() if number != size}
    if not others:
        return []
    listed = ", ".join(f"{name}: {number:,}" for name, number in others.items())
    return [
        f"note: not all jobs have {size:,} GPUs ({listed}), so their steps may have other numbers "
        "of tokens; compare tokens/s per GPU."
    ]
