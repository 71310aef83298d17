"""Parses a command line and runs its command. JAX is imported only by the commands that need it, so
that help is quick.
"""

import argparse
import csv
import importlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .._interrupt import check_interrupt


EXAMPLES = {
    "simulate": "gpt3-175b-h100-4096 --samples 100000 --set layout.dp=64 --quantiles 0.999",
    "sensitivity": "gpt3-175b-h100-4096 --objective p95 --samples 8192",
    "criticality": "gpt3-175b-h100-4096 --of stages --band 0.94:0.96",
    "timeline": "gpt3-175b-h100-4096 --quantile 0.99 --out step.json",
    "report": "gpt3-175b-h100-4096 --samples 100000 --out report.html",
    "whatif": "gpt3-175b-h100-4096 --slow-rank stage=7:1.2 --kernel all_gather:0.8",
    "place": "gpt3-175b-h100-4096 --factors nodes.csv --out placement.csv",
    "improve": "gpt3-175b-h100-4096 --cost all_gather=3 --cost rank=2 --budget 2",
    "target": "gpt3-175b-h100-4096 --part rank --at 1.605",
    "sweep": "gpt3-175b-h100-4096 --over layout.dp=64,128 --samples 10000 --csv",
    "layouts": "my_job.toml --gpus 1024 --objective p95",
    "compare": "gpt3-175b-h100-4096 --over schedule.virtual_stages=3,6,12",
    "run": "gpt3-175b-h100-4096 --steps 100000 --deadline 7",
    "predict": "gpt3-175b-h100-4096 --set training.dtype=fp8",
    "memory": "gpt3-175b-h100-4096 --set training.recompute=full",
    "import": "config.json --gpus 64 --batch 512 --set layout.tp=8 --out my_job.toml",
    "trace": "traces/ --format kineto",
    "fit": "trace.parquet --job job.toml --out profile",
    "calibrate": "job.toml --to step_times.csv --out mine.toml",
    "score": "mine.toml --against step_times.csv",
    "init": "my_job.toml",
    "show": "my_job.toml --set layout.tp=8",
    "jobs": "--csv",
    "models": "",
    "hardware": "",
    "kernels": "--variability",
    "doctor": "",
    "completion": "bash",
}


# The module of each command.
_COMMANDS = {
    "simulate": "_simulate",
    "sensitivity": "_sensitivity",
    "criticality": "_criticality",
    "timeline": "_timeline",
    "report": "_report",
    "whatif": "_whatif",
    "place": "_place",
    "improve": "_improve",
    "target": "_target",
    "sweep": "_sweep",
    "layouts": "_layouts",
    "compare": "_compare",
    "run": "_run",
    "predict": "_predict",
    "memory": "_memory",
    "import": "_import",
    "trace": "_trace",
    "fit": "_fit",
    "calibrate": "_calibrate",
    "score": "_score",
    "init": "_init",
    "show": "_show.Show",
    "jobs": "_catalogue.Jobs",
    "models": "_show.Models",
    "hardware": "_catalogue.Hardware",
    "kernels": "_catalogue.KernelProfiles",
    "doctor": "_doctor",
    "completion": "_completion",
}
# Longer than any sentence.
_MOST_CHARACTERS = 600


def _command(name: str) -> Any:
    module, _, inner = _COMMANDS[name].partition(".")
    found = importlib.import_module(f"{__package__}.{module}")
    return getattr(found, inner) if inner else found


class _UsageError(ValueError):
    pass


class _Parser(argparse.ArgumentParser):
    """Raises an error of one sentence instead of printing the usage."""

    def error(self, message: str):
        from .._misc import quoted

        message = quoted(f"{message[0].upper()}{message[1:]}", 300)
        raise _UsageError(f"{message}; see `{self.prog} --help`.")


def status(arguments: Sequence[str], keep: bool = False) -> int:
    """Runs a command, with or without keeping compiled code, and returns the exit status."""
    try:
        parsed = _parse(arguments)
        if keep and not parsed.no_cache:
            from .._cache import keep_compiled

            keep_compiled()
        check_interrupt()
        result, text = parsed.run(parsed)
        if sys.stdout is None:
            return 1
        print(_printed(parsed, result, text))
        sys.stdout.flush()
    except ValueError as error:
        _tell(str(error))
        return 2
    except KeyboardInterrupt as interrupt:
        _tell(str(interrupt) or "interrupted before the first result.")
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe; keep the interpreter from flushing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (OSError, MemoryError, RuntimeError) as error:  # JAX out of memory: RuntimeError.
        _tell(str(error) or "out of memory")
        return 1
    return 0


def _printed(parsed: argparse.Namespace, result: dict[str, Any], text: str) -> str:
    """A result in the requested format."""
    if parsed.json:
        return json.dumps(result, allow_nan=False)
    if parsed.rows is not None and parsed.csv:
        return as_csv(parsed.rows(result))
    return text


def _tell(sentence: str) -> None:
    from .._misc import quoted

    sentence = quoted(" ".join(sentence.split()), _MOST_CHARACTERS)
    print(f"prism-jax: {sentence}", file=sys.stderr)


def make_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of the command line, and the parser of each command."""
    import importlib.metadata

    from .._cache import VARIABLE

    parser = _Parser(
        prog="prism-jax",
        description="The distribution of a distributed training step's time.",
        allow_abbrev=False,
    )
    version = importlib.metadata.version("prism-jax")
    parser.add_argument("--version", action="version", version=f"prism-jax {version}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for name in _COMMANDS:
        command = _command(name)
        example = f"prism-jax {name} {EXAMPLES.get(name, '')}".rstrip()
        sub = commands.add_parser(
            name,
            help=command.HELP,
            description=f"{command.HELP[:1].upper()}{command.HELP[1:]}.",
            epilog=f"example: {example}",
            allow_abbrev=False,
        )
        formats = sub.add_mutually_exclusive_group()
        formats.add_argument("--json", action="store_true", help="print one JSON object")
        # A command with a table has a function that gives its rows.
        rows = getattr(command, "rows", None)
        if rows is not None:
            formats.add_argument("--csv", action="store_true", help="print the table as CSV")
        sub.add_argument(
            "--no-cache",
            action="store_true",
            help=f"do not use the cache of compiled code ({VARIABLE}=off does the same)",
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, rows=rows)
    return parser, commands.choices


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options of a parser by their long names."""
    return {
        name: action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    from .._misc import unknown_name

    parser, commands = make_parser()
    if not arguments:
        raise _UsageError(f"No command was given; use one of {', '.join(_COMMANDS)}.")
    name = arguments[0]
    if not name.startswith("-") and name not in commands:
        raise _UsageError(unknown_name("command", name, commands))
    parsed, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        if word.startswith("--") and name in commands:
            word = word.partition("=")[0]
            raise _UsageError(unknown_name("option", word, options_of(commands[name])))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with a header. Nested values have columns of their own, such as `gain.value`, or
    `interval.low` and `interval.high` for a pair of numbers. Unknown values are empty.
    """
    flat = [dict(_flat(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue().rstrip("\n")


def _flat(row: Mapping[str, Any], prefix: str = ""):
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and len(value) == 2 and _are_numbers(value):
            yield from _flat(dict(zip(("low", "high"), value, strict=True)), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(x, int | float) or x is None for x in values)
