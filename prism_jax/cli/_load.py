"""Loads the job or the profile of a command, and what every analysis of it needs."""

import argparse
import dataclasses
import itertools as it
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .._files import shown
from ..data import Job, is_profile, load_job, notes_of
from ._devices import use_all_cores


# Steps that differ from the prediction by this factor are in another unit.
_OTHER_UNIT = 200.0


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The job or the profile that was named on the command line.

    **Attributes:**

    - `name`, `layout`, `schedule`: those of the job or the profile.
    - `of`: the job or the profile itself; `job` is `None` for a profile.
    - `compile`: compiles the program. JAX is imported only then.
    """

    name: str
    layout: Any
    schedule: Any
    of: Any
    job: Any
    compile: Callable[[], Any]


def load(arguments: argparse.Namespace, *changes: str) -> Loaded:
    """Loads a job or a profile by name: a shipped job, a `.toml` file, or the folder of a profile.

    A job that needs more memory than its devices have is not compiled, except with `--allow-oom`.
    `changes` are made after those of `--set`.
    """
    name, overrides = arguments.job, [*arguments.overrides, *changes]
    if is_profile(name):
        if overrides:
            raise ValueError(
                f"{shown(name)}: this is a profile, whose latencies were measured; `--set` changes "
                "jobs."
            )
        from ..profile import load_profile

        profile = load_profile(name)

        def compile_it():
            from ..profile import compile_profile

            return compile_profile(profile)

        return Loaded(
            profile.name or name, profile.layout, profile.schedule, profile, None, compile_it
        )
    job = load_job(name, overrides)

    def compile_job_():
        from ..prediction import check_memory
        from ..program import compile_job

        if not arguments.allow_oom:
            check_memory(job)
        return compile_job(job)

    return Loaded(job.name, job.layout, job.schedule, job, job, compile_job_)


def compiled(arguments: argparse.Namespace, job: Loaded) -> tuple[Any, dict[str, Any]]:
    """Compiles a job.

    **Returns:**

    Its program, and the options of all functions that simulate it: `num_samples`, `key`,
    `progress`.
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
    """Prints warnings on stderr, each once: which tables stand in for missing ones, and which
    settings are implausible. For a single job, also which keys have no effect; with several jobs
    this is expected.
    """
    known = [job for job in jobs if job is not None]
    notes = all_notes(known[0]) if len(known) == 1 else it.chain(*map(notes_of, known))
    for note in dict.fromkeys(notes):
        print(f"prism-jax: note: {note}", file=sys.stderr, flush=True)


def all_notes(job: Job) -> tuple[str, ...]:
    """All warnings about one job."""
    from ..prediction import idle_keys

    return (*notes_of(job), *idle_keys(job))


def tell_unit(path: str, measured: float, predicted: float) -> None:
    """Warns on stderr if, judging by their median, measured steps are not in seconds."""
    if not 1 / _OTHER_UNIT < measured / predicted < _OTHER_UNIT:
        other = "milliseconds" if measured > predicted else "a longer unit such as hours"
        print(
            f"prism-jax: note: {shown(path)}: the median step takes {measured:.4g} s, but "
            f"{predicted:.4g} s is predicted; `step_time_s` is in seconds, not in {other}.",
            file=sys.stderr,
            flush=True,
        )


def say(arguments: argparse.Namespace, what: str) -> None:
    """Prints on stderr what a command is about to do, if progress is shown."""
    if wants_progress(arguments):
        print(f"prism-jax: {what} ...", file=sys.stderr, flush=True)


def wants_progress(arguments: argparse.Namespace) -> bool:
    """Whether to show progress: on a terminal without `--json`, and with `--progress`."""
    return arguments.progress or (not arguments.json and sys.stderr.isatty())
