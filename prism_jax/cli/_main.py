"""The command `prism-jax`. Everything slow is imported where Ctrl-C is held back, and JAX only by
the commands that need it, so that help is quick.
"""

import argparse
import contextlib
import gc
import importlib
import keyword
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .._installed import Plugins, named, names_of
from .._interrupt import check_interrupt, run_command
from .._progress import on_terminal, said_to_work


if TYPE_CHECKING:
    from ._options import Command

# The file of each command, which is the function of its name there; in the order of `--help`.
# fmt: off
COMMANDS = {
    "simulate": "predict", "diagnose": "measured", "sensitivity": "sensitivity",
    "criticality": "sensitivity", "timeline": "sensitivity", "report": "predict",
    "whatif": "sensitivity", "place": "layouts", "improve": "sensitivity",
    "target": "sensitivity", "sweep": "compare", "layouts": "layouts", "compare": "compare",
    "run": "run", "predict": "predict", "explore": "explore", "memory": "predict",
    "import": "files", "trace": "trace", "fit": "trace", "measure": "kernels",
    "fit-kernels": "kernels", "calibrate": "measured",
    "score": "measured", "init": "files", "show": "files", "jobs": "files", "models": "files",
    "hardware": "files", "kernels": "kernels", "doctor": "installation",
}
# fmt: on
# Longer than any sentence.
_MOST_CHARACTERS = 600


class _PrintCompletion(argparse.Action):
    """Prints the script for a shell, as `--help` prints the help."""

    def __call__(self, parser, namespace, values, option_string=None):
        from ._completion import completion_script

        print(completion_script(*make_parser(), str(values)))
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Raises an error of one sentence instead of printing the usage."""

    def error(self, message: str):
        from .._misc import quoted

        message = quoted(f"{message[0].upper()}{message[1:]}", 300)
        raise ValueError(f"{message}; see `{self.prog} --help`.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    **Arguments:**

    - `arguments`: the words of the command line; by default those of the process.

    **Returns:**

    The exit status: 0, 1 for a failure, 2 for bad input, 130 when interrupted.
    """
    if arguments is not None:
        return _status(arguments)
    # JAX makes so many objects that their collection takes a tenth of a command, and finds little.
    gc.set_threshold(200_000)
    return run_command(lambda: _status(sys.argv[1:], keep=True))


def _status(arguments: Sequence[str], keep: bool = False) -> int:
    """Runs a command and returns the exit status. With `keep`, as a process of its own: it keeps
    compiled code, and tells its progress wherever stderr goes.
    """
    try:
        args = _parse(arguments)
        if keep and not args.no_cache:
            from .._cache import keep_compiled

            keep_compiled()
        check_interrupt()
        from .._misc import OutOfMemoryWarning

        wants_progress = getattr(args, "progress", False)
        shown = wants_progress or (not args.json and (keep or on_terminal()))
        working = said_to_work(f"`{arguments[0]}`", shown)
        with warnings.catch_warnings(), working, contextlib.ExitStack() as args.at_end:
            # The command itself refuses a job that does not fit, or was told to go on.
            warnings.simplefilter("ignore", OutOfMemoryWarning)
            output = args.run(args)
        if getattr(args, "overrides", ()):
            _tell_idle_sets(args)
        if sys.stdout is None:
            return 1
        print(output.printed(args))
        sys.stdout.flush()
    except (ValueError, ImportError) as error:
        # What is in the way of an import is listed whole.
        reasons = getattr(error, "reasons", ())
        _tell(str(error), _MOST_CHARACTERS + sum(len(reason) + 2 for reason in reasons))
        return 2
    except KeyboardInterrupt as interrupt:
        message = str(interrupt)
        _tell(message if "interrupted" in message else "interrupted before the first result.")
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe; keep the interpreter from flushing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (OSError, MemoryError, RuntimeError) as error:  # JAX out of memory: RuntimeError.
        _tell(str(error) or "out of memory")
        return 1
    return output.status


def _tell_idle_sets(args: argparse.Namespace) -> None:
    """Says which `--set` change none of the jobs that a command loads. `import`, which makes one,
    says it itself.
    """
    import functools as ft

    from ..data import is_profile, load_job
    from ._load import tell_idle_sets

    names = [*filter(None, [getattr(args, "job", None)]), *getattr(args, "jobs", ())]
    jobs = (name for name in names if not is_profile(name))
    tell_idle_sets(args.overrides, [ft.partial(load_job, name) for name in jobs])


def _tell(sentence: str, most: int = _MOST_CHARACTERS) -> None:
    from .._misc import quoted

    sentence = quoted(" ".join(sentence.split()), most)
    print(f"prism-jax: {sentence}", file=sys.stderr)


def make_parser(
    names: Sequence[str] = (),
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of the command line, and the parser of each command: of some or, by default, of
    all, also of those that other packages add.
    """
    from .. import __version__
    from .._cache import VARIABLE

    parser = _Parser(
        prog="prism-jax",
        description="The distribution of a distributed training step's time.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"prism-jax {__version__}")
    completion = "print the script with which a shell completes words"
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help=f"{completion}, for `eval` in its start-up file",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for name in names or names_of(_added(), COMMANDS):
        try:
            command = _command(name)
        except ImportError as error:  # One that cannot be imported leaves the others as they are.
            if names:
                raise
            _tell(str(error))
            continue
        description = command.about
        sub = commands.add_parser(
            name,
            help=f"{description[0].lower()}{description[1:].rstrip('.')}",
            description=description,
            epilog=command.example,
            allow_abbrev=False,
        )
        formats = sub.add_mutually_exclusive_group()
        formats.add_argument("--json", action="store_true", help="print one JSON object")
        if command.csv:
            formats.add_argument("--csv", action="store_true", help="print the table as CSV")
        no_cache = f"do not use the cache of compiled code ({VARIABLE}=off does the same)"
        sub.add_argument("--no-cache", action="store_true", help=no_cache)
        for word, options in command.arguments:
            sub.add_argument(word, **options)
        sub.set_defaults(run=command.run, command=name)
    return parser, commands.choices


def _command(name: str) -> "Command":
    """The command of a name, of this package or another."""
    if name not in COMMANDS:
        return named(_added(), {}, name)
    function = name.replace("-", "_") + "_" * keyword.iskeyword(name)
    return getattr(importlib.import_module(f"{__package__}._{COMMANDS[name]}"), function)


def _added() -> Plugins:
    """The commands that other packages add."""
    from ._options import Command

    return Plugins("commands", "command", Command)


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

    names = names_of(_added(), COMMANDS)
    if not arguments:
        raise ValueError(f"No command was given; use one of {', '.join(names)}.")
    name = arguments[0]
    is_option = name.startswith("-")
    if not is_option and name not in names:
        raise ValueError(unknown_name("command", name, names_of(_added(), COMMANDS)))
    parser, commands = make_parser([] if is_option else [name])
    args, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        if word.startswith("--") and name in commands:
            word = word.partition("=")[0]
            raise ValueError(unknown_name("option", word, options_of(commands[name])))
    if unknown:
        commands.get(name, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    _check_once([*getattr(args, "overrides", ()), *getattr(args, "over", ())])
    return args


def _check_once(changes: Sequence[str]) -> None:
    """Raises a `ValueError` for a key that `--gpus`, `--set` and `--over` give twice."""
    from .._misc import quoted

    texts: dict[str, list[str]] = {}
    for text in changes:
        texts.setdefault(text.partition("=")[0].replace(" ", ""), []).append(quoted(text))
    for key, same in texts.items():
        if len(same) > 1:
            raise ValueError(f"`{quoted(key)}` is given twice, {', '.join(same)}; keep one.")
