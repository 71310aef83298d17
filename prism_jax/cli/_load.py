"""A job or a profile, whichever is named, and what every analysis of it needs."""

import argparse
import dataclasses
import itertools as it
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .._files import shown
from ..data import Job, is_profile, load_job, notes_of
from ._devices import use_all_cores


# Steps that are off by as much are in another unit.
_OTHER_UNIT = 200.0


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What was named on the command line.

    **Attributes:**

    - `name`, `layout`, `schedule`: of it.
    - `of`: the job or the profile; `job` is `None` for a profile.
    - `compile`: makes the program. JAX is imported only then.
    """

    name: str
    layout: Any
    schedule: Any
    of: Any
    job: Any
    compile: Callable[[], Any]


def load(arguments: argparse.Namespace, *changes: str) -> Loaded:
    """Loads what the command line names: a shipped job, a `.toml` file, or the folder of a profile.

    To compile a job that needs more memory than its devices have is refused, unless
    `--allow-oom`. `changes` are made after those of `--set`.
    """
    name, overrides = arguments.job, [*arguments.overrides, *changes]
    if is_profile(name):
        if overrides:
            raise ValueError(
                f"{shown(name)}: this is a profile, whose latencies were measured; `--set` changes "
                "jobs."
            )
        from ..program import load_profile

        profile = load_profile(name)

        def compile_it():
            from ..program import compile_profile

            return compile_profile(profile)

        return Loaded(
            profile.name or name, profile.layout, profile.schedule, profile, None, compile_it
        )
    job = load_job(name, overrides)

    def compile_job_():
        from ..program import check_memory, compile_job

        if not arguments.allow_oom:
            check_memory(job)
        return compile_job(job)

    return Loaded(job.name, job.layout, job.schedule, job, job, compile_job_)


def compiled(arguments: argparse.Namespace, job: Loaded) -> tuple[Any, dict[str, Any]]:
    """Compiles a job.

    **Returns:**

    Its program, and the options that all that simulate it take: `num_samples`, `key`, `progress`.
    """
    import jax

    use_all_cores()
    say(arguments, f"compiling {job.name}")
    program = job.compile()
    tell_notes([job.job])
    number = "" if arguments.samples is None else f"{arguments.samples:,} "
    say(arguments, f"simulating {number}steps of {program.num_ops:,} ops")
    return program, {
        "num_samples": arguments.samples,
        "key": jax.random.key(arguments.seed),
        "progress": wants_progress(arguments),
    }


def tell_notes(jobs: Iterable[Any]) -> None:
    """Prints on stderr, once each, what stands in for tables that the machines of jobs lack, and
    what in jobs is implausible; of one job also which of its keys have no effect, which among
    several is no wonder.
    """
    known = [job for job in jobs if job is not None]
    notes = all_notes(known[0]) if len(known) == 1 else it.chain(*map(notes_of, known))
    for note in dict.fromkeys(notes):
        print(f"prism-jax: note: {note}", file=sys.stderr, flush=True)


def all_notes(job: Job) -> tuple[str, ...]:
    """What should be said of one job."""
    from ..program import idle_keys

    return (*notes_of(job), *idle_keys(job))


def tell_unit(path: str, measured: float, predicted: float) -> None:
    """Says on stderr where measured steps cannot be in seconds, for their median."""
    if not 1 / _OTHER_UNIT < measured / predicted < _OTHER_UNIT:
        print(
            f"prism-jax: note: {shown(path)}: the median step takes {measured:.4g} s, but "
            f"{predicted:.4g} s is predicted; `step_time_s` is in seconds, not in milliseconds.",
            file=sys.stderr,
            flush=True,
        )


def say(arguments: argparse.Namespace, what: str) -> None:
    """Prints on stderr what a command is about to do, if somebody looks."""
    if wants_progress(arguments):
        print(f"prism-jax: {what} ...", file=sys.stderr, flush=True)


def wants_progress(arguments: argparse.Namespace) -> bool:
    """Whether to tell of progress: on a terminal without `--json`, and with `--progress`."""
    return arguments.progress or (not arguments.json and sys.stderr.isatty())
