"""A job or a profile, whichever is named."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ..data import is_profile, load_job, load_profile


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What was named on the command line.

    **Attributes:**

    - `name`, `layout`, `schedule`: of it.
    - `job`: `None` for a profile.
    - `compile`: makes the program. JAX is imported only then.
    """

    name: str
    layout: Any
    schedule: Any
    job: Any
    compile: Callable[[], Any]


def load(name: str, overrides: list[str]) -> Loaded:
    """Loads a shipped name, a `.toml` file, or the folder of a profile."""
    if is_profile(name):
        if overrides:
            raise ValueError(
                f"{name}: this is a profile, whose latencies were measured; `--set` changes jobs."
            )
        profile = load_profile(name)

        def compile_it():
            from ..program import compile_profile

            return compile_profile(profile)

        return Loaded(profile.name or name, profile.layout, profile.schedule, None, compile_it)
    job = load_job(name, overrides)

    def compile_job_():
        from ..program import compile_job

        return compile_job(job)

    return Loaded(job.name, job.layout, job.schedule, job, compile_job_)
