"""CSV files of PyTorch's schedule runtime, with a line for each rank and a cell for each op."""

import csv
import io
import os
import re

from .._files import shown, written_whole
from ..data import read_text
from ._base import AbstractSchedule
from ._custom import CustomSchedule
from ._token import parse_token


_MOST_BYTES = 2**23  # A million ops.
# Actions that PyTorch adds when it lowers a schedule; here they follow from the ops.
_ADDED = re.compile(r"\d+((SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)")


def load_schedule(path: str | os.PathLike[str]) -> CustomSchedule:
    """Reads a schedule from a CSV file of PyTorch's schedule runtime.

    Idle slots and the communication of a lowered schedule (`3SEND_F7`, `3UNSHARD`) are ignored,
    because sends and receives follow from the ops.

    **Arguments:**

    - `path`: the file. It has a line for each rank, with the tokens of its ops, as in
        `CustomSchedule`, in the order in which it runs them.

    **Returns:**

    A [`prism_jax.CustomSchedule`][]. Each stage is placed on the first rank that runs one of its
    ops.

    **Raises:**

    A `ValueError` that names the file, if it is not such a schedule.
    """
    # An empty line is a rank that is always idle.
    reader = csv.reader(io.StringIO(read_text(path, _MOST_BYTES), newline=""))
    try:
        cells = [[cell.strip() for cell in row] for row in reader]
    except csv.Error as error:
        raise ValueError(
            f"{shown(path)}, line {reader.line_num}: this is not valid CSV: {error}."
        ) from None
    orders = [[cell for cell in row if cell and not _ADDED.fullmatch(cell)] for row in cells]
    try:
        return CustomSchedule(orders, places(orders))
    except ValueError as error:
        raise ValueError(f"{shown(path)}: {error}") from None


def save_schedule(schedule: AbstractSchedule, path: str | os.PathLike[str]) -> None:
    """Writes a schedule as a CSV file that PyTorch's schedule runtime loads.

    PyTorch only runs schedules with one chain of stages. Others are written too, for
    `load_schedule`.

    **Arguments:**

    - `schedule`: any schedule.
    - `path`: the file. An existing file is replaced.
    """
    with written_whole(path) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(schedule.orders())


def places(orders: list[list[str]]) -> list[int]:
    """The rank of each stage, from the first of its ops.

    **Raises:**

    A `ValueError` where a stage is missing.
    """
    rank_of: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for position, token in enumerate(order):
            for _, stage, _ in parse_token(token, rank, position).parts:
                rank_of.setdefault(stage, rank)
    missing = next(stage for stage in range(len(rank_of) + 1) if stage not in rank_of)
    if missing < len(rank_of):
        raise ValueError(
            f"no rank runs stage {missing}, but there is a stage {max(rank_of)}; number the stages "
            "from 0 without a gap."
        )
    return [rank_of[stage] for stage in range(len(rank_of))]
