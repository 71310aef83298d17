"""What a training costs: GPU hours, and money in the unit of a price."""

from typing import Any

from .._summary import Column
from ._options import Given, argument
from ._values import number, tokens


PRICE = argument(
    "--price PER_GPU_HOUR",
    "also print the cost, in the unit of this price of an hour of one GPU",
    number(0, "a price from 0 to 1e9"),
)
COST = (
    argument(
        "--tokens N", "also print the GPU hours of training on N tokens, such as 15e12", tokens
    ),
    PRICE,
)


def check_cost(given: Given) -> None:
    """Raises a `ValueError` for a price without a number of tokens."""
    if given.price is not None and given.tokens is None:
        raise ValueError("`--price` needs to know for how much; give `--tokens`, too.")


def cost(given: Given, gpus: int, seconds: float) -> dict[str, float]:
    """The GPU hours of so many GPUs for so long, and their price if there is one."""
    hours = gpus * seconds / 3600
    priced = {} if given.price is None else {"cost": hours * given.price}
    return {"gpu_hours": hours, **priced}


def cost_of(given: Given, one: Any) -> dict[str, float]:
    """The cost of training on the given tokens at the throughput of a ranked layout."""
    if given.tokens is None:
        return {}
    return cost(given, one.gpus, given.tokens / one.tokens_per_s)


def cost_columns(given: Given) -> list[Column]:
    names = (
        {"gpu_hours": "GPU hours"}
        if given.price is None
        else {"gpu_hours": "GPU hours", "cost": "cost"}
    )
    if given.tokens is None:
        return []
    return [
        Column(text, lambda one, name=name: cost_of(given, one)[name], ",.0f")
        for name, text in names.items()
    ]


def steps_of(given: Given, job: Any) -> int:
    """The steps of a run: those given, or as many as have the given tokens."""
    if (given.steps is None) == (given.tokens is None):
        raise ValueError("A run has `--steps` or `--tokens`; give one of them.")
    if given.steps is not None:
        return given.steps
    if job is None:
        raise ValueError("A profile does not say how many tokens a step has; give `--steps`.")
    return max(1, -(-given.tokens // job.tokens_per_step))
