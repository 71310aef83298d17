"""What schedules of two stages on each rank, placed in a V, have in common."""

from ._base import check_positive


def v_shape(num_ranks: int) -> tuple[int, ...]:
    """The ranks of the stages: down the ranks, and back up."""
    ranks = tuple(range(num_ranks))
    return ranks + ranks[::-1]


def check_v_shape(
    name: str | None, num_ranks: int, num_microbatches: int, virtual_stages: int
) -> None:
    """Raises a `ValueError` for sizes that are not positive, and for other than two stages."""
    check_positive(num_ranks=num_ranks, num_microbatches=num_microbatches)
    if virtual_stages != 2:
        raise ValueError(
            f"`virtual_stages={virtual_stages!r}` does not fit `{name}`, which has two stages on "
            "each rank; use 2."
        )
