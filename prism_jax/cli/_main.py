"""Parses a command line and runs its command. JAX is imported only by the commands that need it, so
that help is quick.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from .._interrupt import check_interrupt
from ._options import Command, Output


# Each has a file of its own, and stands in this order in `--help`.
# fmt: off
COMMANDS = (
    "simulate", "diagnose", "sensitivity", "criticality", "timeline", "report", "whatif", "place",
    "improve", "target", "sweep", "layouts", "compare", "run", "predict", "memory", "import",
    "trace", "fit", "measure", "fit-kernels", "calibrate", "score", "init", "show", "jobs",
    "models", "hardware", "kernels", "doctor", "completion",
)
# fmt: on
# Longer than any sentence.
_MOST_CHARACTERS = 600


class _Parser(argparse.ArgumentParser):
    """Raises an error of one sentence instead of printing the usage."""

    def error(self, message: str):
        from .._misc import quoted

        message = quoted(f"{message[0].upper()}{message[1:]}", 300)
        raise ValueError(f"{message}; see `{self.prog} --help`.")


def status(arguments: Sequence[str], keep: bool = False) -> int:
    """Runs a command, with or without keeping compiled code, and returns the exit status."""
    try:
        parsed = _parse(arguments)
        if keep and not parsed.no_cache:
            from .._cache import keep_compiled

            keep_compiled()
        check_interrupt()
        found: Output = parsed.run(parsed)
        if sys.stdout is None:
            return 1
        print(found.printed(parsed))
        sys.stdout.flush()
    except ValueError as error:
        _tell(str(error))
        return 2
    except KeyboardInterrupt as interrupt:
        told = str(interrupt)
        _tell(told if "interrupted" in told else "interrupted before the first result.")
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe; keep the interpreter from flushing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (OSError, MemoryError, RuntimeError) as error:  # JAX out of memory: RuntimeError.
        _tell(str(error) or "out of memory")
        return 1
    return 0


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
    for name in COMMANDS:
        command: Command = importlib.import_module(f"{__package__}._{name.replace('-', '_')}").run
        what = " ".join(str(command.run.__doc__).split())
        sub = commands.add_parser(
            name,
            help=f"{what[0].lower()}{what[1:].rstrip('.')}",
            description=what,
            epilog=f"example: prism-jax {name} {command.example}".rstrip(),
            allow_abbrev=False,
        )
        formats = sub.add_mutually_exclusive_group()
        formats.add_argument("--json", action="store_true", help="print one JSON object")
        if command.csv:
            formats.add_argument("--csv", action="store_true", help="print the table as CSV")
        sub.add_argument(
            "--no-cache",
            action="store_true",
            help=f"do not use the cache of compiled code ({VARIABLE}=off does the same)",
        )
        for word, how in command.arguments:
            sub.add_argument(word, **how)
        sub.set_defaults(run=command.run)
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
        raise ValueError(f"No command was given; use one of {', '.join(COMMANDS)}.")
    name = arguments[0]
    if not name.startswith("-") and name not in commands:
        raise ValueError(unknown_name("command", name, commands))
    parsed, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        if word.startswith("--") and name in commands:
            word = word.partition("=")[0]
            raise ValueError(unknown_name("option", word, options_of(commands[name])))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    _check_once(getattr(parsed, "overrides", ()))
    return parsed


def _check_once(overrides: Sequence[str]) -> None:
    """Raises a `ValueError` for a key that `--set` gives twice."""
    from .._misc import quoted

    keys = [text.partition("=")[0].replace(" ", "") for text in overrides]
    for first, key in enumerate(keys):
        if key in keys[:first]:
            texts = [quoted(text) for text, one in zip(overrides, keys, strict=True) if one == key]
            raise ValueError(f"`--set` gives `{quoted(key)}` twice, {', '.join(texts)}; keep one.")
