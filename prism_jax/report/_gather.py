"""Runs the simulations that a page shows."""

import datetime
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from .._interrupt import interruptible
from ..analysis import (
    AbstractObjective,
    Quantile,
    criticality,
    moved,
    sample_step,
    sensitivity,
    sliders,
)
from ..calibration import epistemic
from ..data import Job
from ..diagnosis import diagnose, hypotheses, quickest_change
from ..engine import simulate
from ..law import QUANTILES
from ..prediction import memory, throughput
from ..profile import Profile, compile_profile
from ..program import Program, compile_job
from ._report import Origin, Report


T = TypeVar("T")
# Sensitivities, critical paths and sampled steps take longer per step than the law, and need fewer.
MOST_STEPS = 8_192


def gather(
    of: Job | Profile,
    program: Program | None = None,
    *,
    num_samples: int = 65_536,
    key: PRNGKeyArray,
    sampling: Literal["auto", "plain", "importance", "sobol"] = "auto",
    allocations: int | None = None,
    levels: Mapping[str, float] = QUANTILES,
    objective: AbstractObjective | None = None,
    quantile: float = 0.5,
    measured: Sequence[Float[np.ndarray, "_"]] = (),
    commands: Mapping[str, str] | None = None,
    seed: str | None = None,
    progress: bool = False,
) -> Report:
    """Runs the simulations of a page about a job: its law, sensitivities, criticality and one step.

    **Arguments:**

    - `of`: a job from `load_job`, or a profile.
    - `program`: the compiled program, if there is one already.
    - `num_samples`: how many steps to simulate for the law; all other figures use at most 8,192
        steps.
    - `key`: a `jax.random` key.
    - `sampling`, `allocations`: as in `simulate`.
    - `levels`: quantiles by name.
    - `objective`: the objective of the sensitivities; p95 by default.
    - `quantile`: the quantile, in [0, 1], of the step that is shown op by op.
    - `measured`: measured step times of a job with a model, as of `diagnose`.
    - `commands`, `seed`: the command behind each figure (`simulate`, `sensitivity`, ...) and the
        seed that the page states; by default it names functions.
    - `progress`: whether to show bars on stderr.

    **Returns:**

    A [`Report`][] for `save_html`. It says why a figure is missing, such as after Ctrl-C, and keeps
    all figures that were computed before.

    **Raises:**

    `ValueError` as `simulate` and `sample_step` do.
    """
    if not 0 <= quantile <= 1:
        raise ValueError(f"`quantile={quantile!r}` must be a number in [0, 1].")
    job = of if isinstance(of, Job) else None
    if program is None:
        program = compile_job(of) if isinstance(of, Job) else compile_profile(of)
    # With factors of one, so that all figures share the code that sensitivities need.
    alike = moved(program, {})
    with interruptible() as interrupt:
        law = simulate(
            alike,
            num_samples=num_samples,
            key=key,
            sampling=sampling,
            allocations=allocations,
            progress=progress,
        )
    missing: dict[str, str] = {}
    if law.interrupted or interrupt.late:
        missing["law"] = "interrupted; the law has the steps until then"
    steps = min(num_samples, MOST_STEPS)
    few = min(num_samples, MOST_STEPS // 2)
    same = {"num_samples": steps, "key": key, "progress": progress}
    wanted = Quantile(0.95) if objective is None else objective
    return Report(
        of=of,
        num_ops=program.num_ops,
        law=law,
        levels={**levels},
        epistemic=None if job is None or job.model is None else epistemic(job, law),
        throughput=throughput(job, law.mean),
        memory=None if job is None or job.model is None else memory(job),
        quickest=None
        if job is None or job.model is None
        else _found(missing, "first change", lambda: quickest_change(job)),
        sensitivity=_found(missing, "sensitivities", lambda: sensitivity(program, wanted, **same)),
        criticality=_found(missing, "criticality", lambda: criticality(alike, **same)),
        step=_found(missing, "timeline", lambda: sample_step(alike, quantile=quantile, **same)),
        sliders=_found(missing, "sliders", lambda: sliders(program, num_samples=few, key=key)),
        missing=missing,
        origin=_origin(num_samples, steps, key, commands or {}, seed),
        diagnosis=None
        if job is None or not len(measured)
        else _found(missing, "diagnosis", lambda: diagnose(hypotheses(job, key=key), measured)),
    )


def _found(missing: dict[str, str], name: str, make: Callable[[], T]) -> T | None:
    """A figure, or why it is missing. After Ctrl-C, no further figure is computed."""
    if any(why.startswith("interrupted") for why in missing.values()):
        missing[name] = "not begun, because the run was interrupted before"
        return None
    try:
        return make()
    except ValueError as error:
        missing[name] = str(error)
    except KeyboardInterrupt:
        missing[name] = "interrupted"
    return None


def _origin(
    num_samples: int,
    num_steps: int,
    key: PRNGKeyArray,
    commands: Mapping[str, str],
    seed: str | None,
) -> Origin:
    kinds = Counter(device.device_kind for device in jax.devices())
    devices = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    return Origin(
        num_samples=num_samples,
        num_steps=num_steps,
        seed=seed or f"key {jax.random.key_data(key).tolist()}",
        commands=commands,
        version=importlib.metadata.version("prism-jax"),
        jax=jax.__version__,
        machine=f"{platform.system()} {platform.machine()}; devices of JAX: {devices}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )
