"""Command-line arguments. Each error says what was given and what is allowed."""

import argparse
import os

from .._files import check_writable, shown
from .._misc import quoted


# Samples and seeds have numbers of 32 bits.
_MOST = 2**32


def count(text: str, least: int = 1) -> int:
    """A whole number of at least `least`; `1e6` and `1_000_000` are fine too."""
    try:
        value = int(text)
    except ValueError:
        try:
            number = float(text)
            value = int(number) if number == int(number) else -1
        except (ValueError, OverflowError):
            value = -1
    if not least <= value < _MOST:
        raise argparse.ArgumentTypeError(
            f"`{quoted(text)}` must be a whole number of at least {least} and below 2^32"
        )
    return value


def seed(text: str) -> int:
    """A whole number that JAX accepts as a seed."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < _MOST:
        raise argparse.ArgumentTypeError(
            f"`{quoted(text)}` must be a whole number from 0 to 2^32 - 1"
        )
    return value


def quantile(text: str) -> float:
    """A number in [0, 1]."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"`{quoted(text)}` must be a number in [0, 1]")
    return value


def steps(text: str) -> slice:
    """A slice, `A:B` or `A:B:S`. Each number may be left out."""
    try:
        numbers = [int(word) if word.strip() else None for word in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or (len(numbers) == 3 and numbers[2] == 0):
        raise argparse.ArgumentTypeError(f"`{quoted(text)}` must be a slice such as 0:100 or ::2")
    return slice(*numbers)


def quantiles(text: str) -> dict[str, float]:
    """Numbers between 0 and 1, separated by commas, with their names: `0.999` is `p99.9`."""
    found = {}
    for word in text.split(","):
        try:
            q = float(word)
        except ValueError:
            q = 0.0
        if not 0 < q < 1:
            raise argparse.ArgumentTypeError(
                f"`{quoted(word)}` must be a number between 0 and 1, such as 0.999"
            )
        found[f"p{100 * q:.12g}"] = q
    return found


def check_out(path: str | None, suffix: str) -> None:
    """Raises a `ValueError` unless a file with this suffix can be written there."""
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    if not path.endswith(suffix) or os.path.isdir(path) or not _is_writable(folder):
        raise ValueError(
            f"--out `{shown(path)}` must be a {suffix} file in a folder that exists and can be "
            "written to."
        )


def check_out_folder(path: str | None) -> None:
    """Raises a `ValueError` unless files can be written to that folder, which need not exist."""
    if path is None:
        return
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"--out `{shown(path)}` is a file; give a folder.")
    try:
        check_writable(path)
    except OSError as error:
        raise ValueError(
            f"--out `{shown(path)}`: nothing can be written there ({error.strerror}); give another "
            "folder."
        ) from None


def _is_writable(folder: str) -> bool:
    if not os.path.isdir(folder):
        return False
    try:
        check_writable(folder)
    except OSError:
        return False
    return True


def add_steps_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--steps`, which of the measured steps to use."""
    parser.add_argument(
        "--steps",
        type=steps,
        default=slice(None),
        metavar="A:B[:S]",
        help="use only these of the sorted steps, a Python slice such as ::2 (all)",
    )


def add_seed_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=seed, default=0, metavar="S", help="random seed (0)")


def add_progress_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--progress",
        action="store_true",
        help="report progress on stderr (the default on a terminal without --json)",
    )


def add_set_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key of the job, such as layout.dp=64; can be repeated",
    )


def add_oom_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-oom", action="store_true", help="continue if the job does not fit in memory"
    )


def named_factor(text: str, option: str, example: str, *, most: float = 1e6) -> tuple[str, float]:
    """A name and a positive number, separated by `:` or `=` as in the example. A number above
    `most`, or below its inverse, is refused as a mistake; figures with it would not be finite.
    """
    separator = ":" if ":" in example else "="
    name, _, number = text.rpartition(separator)
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not name or not 1 / most <= factor <= most:
        raise ValueError(
            f"{option} `{quoted(text)}` must be a name and a positive number from {1 / most:g} "
            f"to {most:g}: `{example}`."
        )
    return name, factor


def add_job_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job",
        metavar="JOB",
        help="a shipped job (`prism-jax jobs`), a .toml file, or the folder of a profile",
    )


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for which job to simulate, with which changes, and for how many steps."""
    add_job_argument(parser)
    parser.add_argument(
        "--samples", type=count, default=65_536, metavar="N", help="steps to simulate (65536)"
    )
    add_seed_argument(parser)
    add_set_argument(parser)
    add_oom_argument(parser)
    add_progress_argument(parser)
