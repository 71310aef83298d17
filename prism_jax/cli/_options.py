"""What a command is: a function, and its arguments as data, so that several can share them."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from .._summary import Table
from ._values import address, count, number, quantiles, seed, steps, tokens


Given = argparse.Namespace


# What `add_argument` takes.
Argument = tuple[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Output:
    """What a command found.

    **Attributes:**

    - `result`: what `--json` prints.
    - `blocks`: what is printed without it, an empty line between any two. Of a command with
        `--csv`, the first table is what that prints.
    """

    result: dict[str, Any]
    blocks: Sequence[Table | str]

    def printed(self, given: Given) -> str:
        """The output in the requested format."""
        if given.json:
            return json.dumps(self.result, allow_nan=False)
        if getattr(given, "csv", False):
            return next(block for block in self.blocks if isinstance(block, Table)).csv()
        return "\n\n".join(filter(None, map(str, self.blocks)))


@dataclasses.dataclass(frozen=True)
class Command:
    """**Attributes:**

    - `run`: what it does, which its docstring says in a sentence. It raises a `ValueError` of one
        sentence for bad input.
    - `example`: words that follow its name, in an example.
    - `arguments`: what follows its name.
    - `csv`: whether its table can be printed as CSV.
    """

    run: Callable[[Given], Output]
    example: str
    arguments: tuple[Argument, ...]
    csv: bool


def command(
    example: str, *arguments: Argument, csv: bool = False
) -> Callable[[Callable[[Given], Output]], Command]:
    """Makes a function the command of its file."""
    return lambda run: Command(run, example, arguments, csv)


def argument(
    name: str, help: str, type: Callable[[str], Any] = str, default: Any = None, **more: Any
) -> Argument:
    """An argument or an option; the word after its name says what its value is."""
    name, _, metavar = name.partition(" ")
    how = {"metavar": metavar or None, "help": help, "type": type, "default": default}
    return name, how | more


def repeated(name: str, help: str, **more: Any) -> Argument:
    """An option that can be given several times."""
    return argument(name, help, default=[], action="append", **more)


def flag(name: str, help: str) -> Argument:
    return name, {"help": help, "action": "store_true"}


JOB = argument(
    "job JOB", "a shipped job (`prism-jax jobs`), a .toml file, or the folder of a profile"
)
# Of commands that take no profile.
NO_PROFILE = argument("job JOB", "a shipped job (`prism-jax jobs`), or a .toml file")
SET = (
    repeated(
        "--set KEY=VALUE",
        "change a key of the job, such as layout.dp=64; can be repeated",
        dest="overrides",
    ),
    (
        "--allow-implausible",
        {
            "help": "take hardware ten thousand times slower or faster than all that is shipped",
            "action": "append_const",
            "dest": "overrides",
            "const": "allow_implausible=true",
        },
    ),
)
ALLOW_OOM = flag("--allow-oom", "continue if the job does not fit in memory")
PROGRESS = flag(
    "--progress", "report progress on stderr (the default on a terminal without --json)"
)
RANDOM = (argument("--seed S", "random seed (0)", seed, 0), *SET, PROGRESS)
STEPS = argument(
    "--steps A:B[:S]",
    "use only these of the sorted steps, a Python slice such as ::2 (all)",
    steps,
    slice(None),
)
OBJECTIVE = argument(
    "--objective FIGURE",
    "mean, std, p95, cvar95, or over1.7: the probability of more than 1.7 s (p95)",
    default="p95",
)
TOP = argument("--top N", "how many rows to print (10)", count, 10)


def over(**more: bool) -> Argument:
    return repeated(
        "--over KEY=VALUES",
        "values of a key: layout.dp=16,32,64 or kernels.all_gather.sigma=0.01:0.2:20 (from, to, "
        "how many); can be repeated, for all combinations",
        **more,
    )


def simulated(samples: int = 65_536) -> tuple[Argument, ...]:
    """Which job to simulate, with which changes, and for how many steps."""
    steps = argument("--samples N", f"steps to simulate ({samples})", count, samples)
    return JOB, steps, *RANDOM, ALLOW_OOM


SIMULATED = simulated()
LAW = (
    *SIMULATED,
    argument(
        "--sampling",
        "how samples of a replica are drawn: importance for tails, sobol for means (auto)",
        default="auto",
        choices=("auto", "plain", "importance", "sobol"),
    ),
    argument(
        "--allocations K",
        "divide the steps among K sets of GPUs, and print how much they differ (by default, GPUs "
        "are drawn anew for each step)",
        count,
    ),
    argument(
        "--quantiles Q,Q",
        "further quantiles, such as 0.999 (0.05, 0.5, 0.95 and 0.99 are always printed)",
        quantiles,
        {},
    ),
)
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
RAY = (
    argument(
        "--ray ADDRESS",
        "simulate on the workers of a Ray cluster: host:port, or auto for the cluster on this "
        "machine; without ADDRESS, use that of RAY_ADDRESS, or else all cores of this machine",
        address,
        nargs="?",
        const=True,
    ),
    argument("--worker-gpus N", "GPUs for each worker of --ray (0)", count),
)
MEASURED = (
    "measured step times in the order of steps: a .csv or .parquet file with a column "
    "`step_time_s`, and a column `run` if there are several runs"
)
