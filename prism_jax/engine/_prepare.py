"""Computations that are made once for a program, before samples are drawn."""

import dataclasses
from typing import TYPE_CHECKING

from jaxtyping import PRNGKeyArray

from .._interrupt import check_interrupt
from ..program import Program
from ..random import KeyData, key_data
from ..replica import Plan, make_plan
from ..step import Chances, chances_of
from ._check import check_plan, check_program


if TYPE_CHECKING:
    from ._sampling import AbstractSampling


@dataclasses.dataclass(frozen=True)
class Run:
    """The common data of all chunks of a run.

    **Attributes:**

    - `sampling`: how replica samples are drawn; `None` until this is chosen.
    """

    program: Program
    plan: Plan
    key: KeyData
    chances: Chances
    sampling: "AbstractSampling | None" = None


def prepare(program: Program, key: PRNGKeyArray) -> Run:
    """Checks a program and a key, and computes what is needed before any sample is drawn.

    **Raises:**

    `ValueError` if an argument is not a program or a key, or if latencies are not valid.
    """
    check_interrupt()
    check_program(program, key)
    plan = make_plan(program)
    check_plan(program, plan)
    return Run(program, plan, key_data(key), chances_of(program, plan))
