"""What a command is: a function whose docstring lists its arguments, so that help, completion and
a reader have the same text; and the arguments that several commands share.
"""

import argparse
import dataclasses
import inspect
import itertools as it
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .._misc import printable
from .._summary import Shown, Table, plain
from ._outputs import Writes, check_writes
from ._values import address, count, number, quantile, quantiles, seconds, seed, steps, tokens


Args = argparse.Namespace


# What `add_argument` takes.
Arguments = tuple[tuple[str, dict[str, Any]], ...]
# How a value is read: by a function, or by what `add_argument` takes.
How = Callable[[str], Any] | Mapping[str, Any]
# How a value is read by the word for it, unless a command says otherwise; other words are texts.
_READERS = {"N": count, "K": count, "Q": quantile, "S": seconds}
# A name, perhaps the word for its value, in square brackets if it can be left out, and with dots if
# there can be several, and its default, or `required`, in brackets; two spaces, and what it is.
# Further lines are indented.
_ARGUMENT = re.compile(r"^(\S+)(?: (\S+?)(\.\.\.)?)?(?: \((.+?)\))?  (.+(?:\n .+)*)$", re.MULTILINE)


# See `Output`.
Part = str | list[str] | Table | Shown | Mapping[str, Any] | None


class Output:
    """What a command found.

    **Arguments:**

    - `parts`: a text or a table is printed, and a list of lines, beside other lines. A dictionary
        is what `--json` prints. A result is both; one in a dictionary shows its lines, but no
        table. `None` is nothing. Of a command with `--csv`, the first table is what that prints.
    - `status`: the exit status of the command.
    """

    def __init__(self, *parts: Part, status: int = 0):
        self.parts: tuple[Part, ...] = parts
        self.status: int = status

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        dictionaries = (plain(part) for part in self.parts if isinstance(part, Mapping | Shown))
        return dict(it.chain.from_iterable(map(dict.items, dictionaries)))

    def blocks(self) -> Iterator[Table | str]:
        """What is printed without it, an empty line between any two."""
        for are_lines, pieces in it.groupby(self._pieces(), lambda piece: isinstance(piece, list)):
            if are_lines:
                yield "\n".join(filter(None, it.chain.from_iterable(pieces)))
            else:
                yield from pieces

    def _pieces(self) -> Iterator[Any]:
        for part in self.parts:
            if isinstance(part, Mapping):
                yield [value.headline() for value in part.values() if isinstance(value, Shown)]
            elif isinstance(part, Shown):
                yield [part.headline()]
                if (table := part.summary()).rows:
                    yield table
            elif part is not None:
                yield part

    def printed(self, args: Args) -> str:
        """The output in the requested format."""
        if args.json:
            return json.dumps(self.to_json(), allow_nan=False)
        if getattr(args, "csv", False):
            tables = (block for block in self.blocks() if isinstance(block, Table))
            return next(tables).csv()
        blocks = (printable(str(block), "\n") for block in self.blocks())
        return "\n\n".join(filter(None, blocks))


@dataclasses.dataclass(frozen=True)
class Command:
    """**Attributes:**

    - `run`: what it does. It raises a `ValueError` of one sentence for bad input.
    - `about`: a sentence that says what it does.
    - `example`: a line of a shell with an example, after the word `example:`.
    - `arguments`: what follows its name.
    - `csv`: whether its table can be printed as CSV.
    """

    run: Callable[[Args], Output]
    about: str
    example: str
    arguments: Arguments
    csv: bool


def command(
    *shared: str | Arguments,
    how: Mapping[str, How] = {},
    csv: bool = False,
    writes: Writes | None = None,
) -> Callable[[Callable[[Args], Output]], Command]:
    """Makes a function a command. Its docstring has a sentence, its own arguments if it has any,
    and an example; `how` says how these arguments are read. `shared` names others, in words with
    blanks between them. What it writes is checked first: a file, if the word for one has the end of
    its name, such as `LAW.npz`; else what `writes` says.
    """

    def made(run: Callable[[Args], Output]) -> Command:
        sentence, *description, example = (inspect.getdoc(run) or "").split("\n\n")
        listed = dict(arguments("".join(description), how))
        ends = {name: os.path.splitext(read.get("metavar", ""))[1] for name, read in listed.items()}
        files = [Writes(name, suffix) for name, suffix in ends.items() if suffix]
        written = [*files, *([] if writes is None else [writes])]

        def checked(args: Args) -> Output:
            for place in written:
                check_writes(args, place)
            return run(args)

        force = "--force" if any(place.replaces for place in written) else ""
        groups = (_named(words) if isinstance(words, str) else words for words in (*shared, force))
        # An argument of its own stands for a shared one of the same name.
        listed |= {name: read for name, read in it.chain(*groups) if name not in listed}
        sentence, example = (" ".join(text.split()) for text in (sentence, example))
        return Command(checked, sentence, example, tuple(listed.items()), csv)

    return made


def arguments(text: str, how: Mapping[str, How] = {}) -> Arguments:
    """The arguments that a text lists, such as `--top N (10)  how many rows to print`, or
    `--set KEY=VALUE...  change a key`, which can be repeated, or `--of {ranks,ops}  what to print`.
    One without a word for its value is a flag. `how` says how a value is read, where neither the
    text nor the word for it does.
    """
    listed = []
    for name, word, *rest in _ARGUMENT.findall(inspect.cleandoc(text)):
        read = how.get(name, _READERS.get(word, {}))
        options = _listed(name, word, *rest) | ({"type": read} if callable(read) else dict(read))
        listed.append((name, options))
    assert how.keys() <= {name for name, _ in listed}, f"{[*how]}: not all are listed in {text}"
    return tuple(listed)


def _listed(name: str, word: str, many: str, default: str, meaning: str) -> dict[str, Any]:
    """What `add_argument` takes for an argument as a text lists it."""
    required, can_lack = default == "required", word.startswith("[")
    given = {} if required or not default else {"default": default}
    shown = f"{' '.join(meaning.split())}{f' ({default})' if given else ''}"
    options: dict[str, Any] = {"help": shown.replace("%", "%%"), **given}
    if word.startswith("{"):
        options["choices"] = word[1:-1].split(",")
    elif word:
        options["metavar"] = word[1:-1] if can_lack else word
    else:
        options["action"] = "store_true"
    if not name.startswith("-"):
        if many:
            options["nargs"] = "*" if can_lack else "+"
        elif can_lack or given:
            options["nargs"] = "?"
    elif many:
        options |= {"action": "append", "default": []}
    elif can_lack:
        options |= {"nargs": "?", "const": True}
    return options | ({"required": True} if required else {})


# What `--allow-implausible` changes.
IMPLAUSIBLE = "allow_implausible=true"
_CHANGE = {"dest": "overrides"}
# Of several commands.
_SHARED = dict(
    arguments(
        """
        job JOB  a shipped job (`prism-jax jobs`), a .toml file, or the folder of a profile
        --samples N (65536)  steps to simulate
        --seed SEED (0)  random seed
        --gpus N...  the number of GPUs (`world_size`), from which layout.dp and num_nodes follow
        --set KEY=VALUE...  change a key of the job, such as layout.dp=64; can be repeated
        --allow-implausible  take hardware ten thousand times slower or faster than all that is
            shipped
        --allow-oom  continue if the job does not fit in memory
        --device {auto,cpu,gpu} (auto)  gpu is any accelerator that JAX has; auto is the CPU beside
            one for what is reckoned to be done there no later
        --progress  report progress on stderr (the default on a terminal without --json)
        --sampling {auto,plain,importance} (auto)  how samples of a replica are drawn: importance
            for tails
        --allocations K  divide the steps among K sets of GPUs, and print how much they differ (by
            default, GPUs are drawn anew for each step)
        --quantiles Q,Q  further quantiles, such as 0.999 (0.05, 0.5, 0.95 and 0.99 are always
            printed)
        --objective FIGURE (p95)  mean, std, p95, cvar95, or over1.7: the probability of more than
            1.7 s
        --top N (10)  how many rows to print
        --steps A:B[:S]  use only these of the sorted steps, a Python slice such as ::2 (all)
        --column NAME  the column of the step times, or of a rate, in a table of measured steps (by
            its name, if that is known)
        --unit UNIT  the unit of that column: s, ms, steps/s, tokens/s or samples/s, the last two of
            all GPUs or, with /GPU, of each
        --over KEY=VALUES...  values of a key: layout.dp=16,32,64 or
            kernels.all_gather.sigma=0.01:0.2:20 (from, to, how many); can be repeated, for all
            combinations
        --tokens N  also print the GPU hours of training on N tokens, such as 15e12
        --price PER_GPU_HOUR  also print the cost, in the unit of this price of an hour of one GPU
        --ray [ADDRESS]  simulate on the workers of a Ray cluster: host:port, or auto for the
            cluster on this machine; without ADDRESS, use that of RAY_ADDRESS, or else all cores of
            this machine
        --worker-gpus N  GPUs for each worker of --ray (0)
        --sources  also print where the numbers are from (--json always has it)
        --force  overwrite files that are there
        """,
        {
            "--seed": seed,
            "--gpus": {"type": lambda text: f"world_size={count(text)}", **_CHANGE},
            "--set": _CHANGE,
            "--allow-implausible": {"action": "append_const", "const": IMPLAUSIBLE, **_CHANGE},
            "--quantiles": {"type": quantiles, "default": {}},
            "--steps": {"type": steps, "default": ":"},
            "--tokens": tokens,
            "--price": number(0, "a price from 0 to 1e9"),
            "--ray": address,
        },
    )
)


# Groups of them.
_GROUPS = {
    "SET": "--gpus --set --allow-implausible",
    "RANDOM": "--seed SET --device --progress",
    "SIMULATED": "job --samples RANDOM --allow-oom",
    "LAW": "SIMULATED --sampling --allocations --quantiles",
}


def _named(words: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The shared arguments with these names, or in groups with these."""
    for word in words.split():
        if word in _GROUPS:
            yield from _named(_GROUPS[word])
        else:
            yield word, _SHARED[word]
