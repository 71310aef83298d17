"""The command `prism-jax`. What takes long to import is imported where Ctrl-C is caught, and JAX by
the commands that need it, so that help is quick.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any


# Where each command is.
_COMMANDS = {
    "simulate": "_simulate",
    "sensitivity": "_sensitivity",
    "criticality": "_criticality",
    "timeline": "_timeline",
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
    "jobs": "_catalogue.Jobs",
    "hardware": "_catalogue.Hardware",
    "kernels": "_catalogue.KernelProfiles",
}
# No sentence is as long.
_MOST_CHARACTERS = 600


def _command(name: str) -> Any:
    module, _, inner = _COMMANDS[name].partition(".")
    found = importlib.import_module(f"{__package__}.{module}")
    return getattr(found, inner) if inner else found


class _UsageError(ValueError):
    pass


class _Parser(argparse.ArgumentParser):
    """Raises one sentence in place of printing the usage."""

    def error(self, message: str):
        from .._misc import quoted

        message = quoted(f"{message[0].upper()}{message[1:]}", 300)
        raise _UsageError(f"{message}; see `{self.prog} --help`.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    **Arguments:**

    - `arguments`: words of the command line; those of the process by default.

    **Returns:**

    The exit status: 0, 1 for a failure, 2 for bad input, 130 when interrupted.
    """
    is_command = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parsed = _parse(arguments)
        if is_command and not parsed.no_cache:
            from .._cache import keep_compiled

            keep_compiled()
        result, text = parsed.run(parsed)
        if sys.stdout is None:
            return 1
        print(json.dumps(result, allow_nan=False) if parsed.json else text)
        sys.stdout.flush()
    except ValueError as error:
        _tell(str(error))
        return 2
    except KeyboardInterrupt as interrupt:
        what = str(interrupt) or "interrupted before the first result."
        print(f"prism-jax: {what}", file=sys.stderr)
        if is_command:  # XLA may still be compiling, and crashes if the interpreter is taken down.
            sys.stderr.flush()
            os._exit(130)
        return 130
    except BrokenPipeError:
        # The reader (`head`, say) has seen enough; keep the interpreter from flushing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (OSError, MemoryError, RuntimeError) as error:  # JAX's out of memory is the last.
        _tell(str(error) or "out of memory")
        return 1
    return 0


def _tell(sentence: str) -> None:
    from .._misc import quoted

    sentence = quoted(" ".join(sentence.split()), _MOST_CHARACTERS)
    print(f"prism-jax: {sentence}", file=sys.stderr)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    import importlib.metadata

    from .._cache import VARIABLE
    from .._misc import unknown_name

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
        sub = commands.add_parser(
            name, help=command.HELP, description=command.HELP, allow_abbrev=False
        )
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.add_argument(
            "--no-cache",
            action="store_true",
            help=f"keep nothing that is compiled for the next time ({VARIABLE}=off does so, too)",
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    names = [word for word in arguments if not word.startswith("-")]
    if names and arguments[0] == names[0] and names[0] not in _COMMANDS:
        raise _UsageError(unknown_name("command", names[0], _COMMANDS))
    if not arguments:
        raise _UsageError(f"No command was given; use one of {', '.join(_COMMANDS)}.")
    return parser.parse_args(arguments)
