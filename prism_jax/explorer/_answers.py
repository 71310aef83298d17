"""What follows from what was moved: the step without variability, at once; its law, in seconds."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from .._misc import OutOfMemoryWarning, quoted
from .._summary import GIB, plain
from ..analysis import LEVELS, moved, slider_parameters
from ..data import Job, load_job
from ..engine import simulate
from ..prediction import expected_error, memory, predict, throughput
from ..program import compile_job
from ._controls import FACTORS, Control, controls_of


Settings = Mapping[str, str]
# What follows from the GPUs, the batch and the layout, also where the job says it.
_FOLLOWING = (
    "layout.dp",
    "num_nodes",
    "schedule.num_microbatches",
    "training.global_batch_size",
    "world_size",
)
_QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclasses.dataclass(frozen=True)
class Explored:
    """A job, and what can be moved of it.

    **Attributes:**

    - `source`, `overrides`: as `load_job` takes them.
    - `job`, `controls`: the job as it is, and its controls.
    - `num_samples`, `seed`: of its laws.
    """

    source: str
    overrides: tuple[str, ...]
    job: Job
    controls: tuple[Control, ...]
    num_samples: int
    seed: int


def explored(
    source: str, overrides: tuple[str, ...] = (), *, num_samples: int = 4096, seed: int = 0
) -> Explored:
    """Loads a job with its controls.

    **Raises:**

    `ValueError` as `load_job`, or if the job has no model.
    """
    job = load_job(source, overrides)
    if job.model is None:
        raise ValueError(
            f"{source}: this job has no `model`; give one of which steps are predicted."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfMemoryWarning)
        controls = controls_of(job, compile_job(job))
        every = Explored(source, (*overrides,), job, controls, num_samples, seed)
        movable = tuple(control for control in controls if _moves(every, control))
    return dataclasses.replace(every, controls=movable)


def _moves(of: Explored, control: Control) -> bool:
    """Whether a degree of the layout can have another value, if nothing else is moved."""
    other_values = (value for value in control.values if value != control.own)
    if control.group != "layout" and control.name != "world_size":
        return True
    return any(
        "refused" not in _answered(_step, of, {control.name: value}) for value in other_values
    )


def answer(of: Explored, question: Any) -> dict[str, Any]:
    """Answers a question of the page or the widget: a dictionary with `what`, one of `controls`,
    `step` and `law`, and `settings`, values by the names of controls. What cannot be answered is
    `refused` in a sentence.
    """
    try:
        if not isinstance(question, dict) or not isinstance(question.get("settings"), dict):
            raise ValueError("A question has `what` and `settings`.")
        settings = _checked(of, question["settings"])
        if question.get("what") == "controls":
            return {"controls": plain(of.controls), "levels": LEVELS.tolist()}
        answers = {"step": _step, "law": _law}
        if question.get("what") not in [*answers]:
            raise ValueError("`what` of a question is `controls`, `step` or `law`.")
    except ValueError as error:
        return {"refused": str(error)}
    return _answered(answers[question["what"]], of, settings)


def _answered(
    compute: Callable[[Explored, Settings], dict[str, Any]], of: Explored, settings: Settings
) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The page shows whether the job fits.
            return compute(of, settings)
    except ValueError as error:
        return {"refused": str(error)}
    except Exception as error:  # Such as no memory left: the page goes on.
        return {"refused": f"This cannot be computed: {quoted(error, 300)}."}


def _checked(of: Explored, settings: Mapping[Any, Any]) -> Settings:
    """Refuses all that the page does not offer, such as paths of files."""
    values = {control.name: control.values for control in of.controls}
    for name, value in settings.items():
        if value not in values.get(name, ()):
            allowed = ", ".join(values[name]) if name in values else "the controls of the job"
            raise ValueError(f"`{quoted(name)}` got `{quoted(value)}`; allowed are {allowed}.")
    return settings


def moved_job(of: Explored, settings: Settings) -> Job:
    """The job with what was moved. The GPUs and the batch stay as many as they are, unless they
    were moved, so replicas, nodes and microbatches follow.
    """
    overrides = [word for word in of.overrides if word.partition("=")[0].strip() not in _FOLLOWING]
    words: dict[str, Any] = {
        "world_size": of.job.layout.world_size,
        "training.global_batch_size": of.job.batch_size,
    }
    for control in of.controls:
        value = settings.get(control.name, control.own)
        if control.group != FACTORS and (value != control.own or control.name in words):
            words[control.name] = value
    return load_job(of.source, [*overrides, *(f"{key}={value}" for key, value in words.items())])


def _step(of: Explored, settings: Settings) -> dict[str, Any]:
    job = moved_job(of, settings)
    prediction, needed, error = predict(job), memory(job), expected_error(job)
    per_gpu = throughput(job, prediction=prediction)
    assert per_gpu is not None  # The job has a model.
    token = job.unit == "token"
    rate = prediction.tokens_per_s if token else prediction.samples_per_s
    many, unit = (1e9, "billion tokens") if token else (1e6, "million samples")
    return plain(
        {
            "header": job.header,
            "step_s": prediction.mean,
            "interval_s": [prediction.mean * factor for factor in error.interval()],
            "error": str(error),
            "breakdown_s": prediction.breakdown,
            "rate": per_gpu.rate(),
            "mfu": prediction.mfu,
            "memory_gib": needed.fullest.bytes / GIB,
            "usable_gib": needed.usable_bytes / GIB,
            "fits": needed.fits,
            "gpu_hours": job.layout.world_size * many / rate / 3600,
            "gpu_hours_of": unit,
        }
    )


def _law(of: Explored, settings: Settings) -> dict[str, Any]:
    program = compile_job(moved_job(of, settings))
    parameters, values = slider_parameters(program), {}
    for control in of.controls:
        # Another layout may lack a collective, and has other numbers.
        if control.group == FACTORS and control.name in settings and control.name in parameters:
            value_of_job, *_ = parameters[control.name]
            values[control.name] = value_of_job * float(settings[control.name])
    key = jax.random.key(of.seed)
    law = simulate(moved(program, values), num_samples=of.num_samples, key=key)
    figures = {name: law.quantile(level) for name, level in _QUANTILES.items()}
    return plain(
        {"mean": law.mean, **figures, "quantiles_s": np.asarray(law.quantile(LEVELS)).tolist()}
    )
