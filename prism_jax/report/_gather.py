"""The contents of a page: the simulations that they come from, and what they say in sentences."""

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jaxtyping import Float

from .._interrupt import interruptible
from .._misc import runs_of
from ..analysis import (
    P95,
    SHARED,
    AbstractObjective,
    Criticality,
    Quantile,
    SampledStep,
    Sensitivity,
    Sliders,
    criticality,
    moved,
    sample_step,
    sensitivity,
    sliders,
)
from ..calibration import Epistemic, epistemic
from ..data import Job
from ..diagnosis import (
    Diagnosis,
    Setting,
    StepPart,
    diagnose,
    hypotheses,
    measured_beside,
    quickest_change,
    settings_of,
)
from ..engine import simulate
from ..law import QUANTILES, Law
from ..prediction import Memory, Throughput, memory, throughput
from ..profile import Profile, compile_profile
from ..program import Program, compile_job
from ..trace import Contents


T = TypeVar("T")
# Sensitivities, critical paths and sampled steps take longer per step than the law, and need fewer.
MOST_STEPS = 8_192
# The sliders of a page, without those of what one can set, and with them.
_SLIDERS, _FEWER_SLIDERS = 6, 3
# Laws that are the same for all jobs, so that they do not say what is special about one.
_OF_TABLES = ("step", "worker_step")


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """The results that a page shows. `missing` says why a result is `None`.

    **Attributes:**

    - `of`: the job, or the profile of a measured one.
    - `num_ops`: the number of ops of a replica.
    - `law`: the law of the step time.
    - `levels`: quantiles by name.
    - `epistemic`: the laws of possible runs; `None` without a model.
    - `throughput`, `memory`: those of the job; `None` for a profile, which has only latencies.
    - `settings`: what one can set; of a job with a model.
    - `sliders`, `sensitivity`, `criticality`, `step`: those of the simulated step time.
    - `quickest`: the cheap setting that shortens a step most, and by which share, if there is any.
    - `measured`: measured step times, in seconds, if there are any.
    - `diagnosis`: of these, if there are any.
    - `beside`: the parts of a profiled step beside those predicted, if there is a profile.
    - `tokens`, `price`: the tokens of the training, and the price of an hour of one GPU, if they
        are known.
    - `missing`: why a figure is missing, by its name.
    - `num_steps`: the most steps of sensitivities, criticality and the sampled step.
    - `seed`: how the key was made, in words.
    - `commands`: the command that prints a figure again, for each figure; empty for a report made
        from Python.
    """

    of: Job | Profile
    num_ops: int
    law: Law
    levels: dict[str, float]
    epistemic: Epistemic | None
    throughput: Throughput | None
    memory: Memory | None
    quickest: tuple[tuple[str, ...], float] | None
    settings: tuple[Setting, ...]
    sliders: Sliders | None
    sensitivity: Sensitivity | None
    criticality: Criticality | None
    step: SampledStep | None
    missing: dict[str, str]
    num_steps: int
    seed: str
    commands: Mapping[str, str]
    measured: Float[np.ndarray, " steps"] | None = None
    diagnosis: Diagnosis | None = None
    beside: tuple[StepPart, ...] | None = None
    tokens: float | None = None
    price: float | None = None

    @property
    def job(self) -> Job | None:
        """The job; `None` for a profile."""
        return self.of if isinstance(self.of, Job) else None


def gather(
    of: Job | Profile,
    program: Program | None = None,
    *,
    num_samples: int = 65_536,
    key: "jax.Array",
    sampling: Literal["auto", "plain", "importance"] = "auto",
    allocations: int | None = None,
    levels: Mapping[str, float] = QUANTILES,
    objective: AbstractObjective | None = None,
    quantile: float = 0.5,
    measured: Any = (),
    profiled: Contents | None = None,
    tokens: float | None = None,
    price: float | None = None,
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
    - `profiled`: a profile of such a job, from `trace.contents`.
    - `tokens`, `price`: of how many tokens the page says how long training takes, and what an hour
        of one GPU costs.
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
    modelled = None if job is None or job.model is None else job
    if program is None:
        program = compile_job(of) if isinstance(of, Job) else compile_profile(of)
    # With factors of one, so that all figures share the code that sensitivities need.
    alike = moved(program, {})
    with interruptible() as interrupt:
        options = {"sampling": sampling, "allocations": allocations, "progress": progress}
        law = simulate(alike, num_samples=num_samples, key=key, **options)
    missing: dict[str, str] = {}
    if law.interrupted or interrupt.handled:
        missing["law"] = "interrupted; the law has the steps until then"
    attempt = ft.partial(_attempt, missing)
    steps, half_steps = min(num_samples, MOST_STEPS), min(num_samples, MOST_STEPS // 2)
    of_steps = {"num_samples": steps, "key": key, "progress": progress}
    wanted = Quantile(0.95) if objective is None else objective
    runs = runs_of(measured)
    ranks = [] if profiled is None else [*profiled.by_rank] or [profiled]
    settings = () if modelled is None else settings_of(modelled)
    most = _FEWER_SLIDERS if settings else _SLIDERS
    return Report(
        of=of,
        num_ops=program.num_ops,
        law=law,
        levels={**levels},
        epistemic=modelled and epistemic(modelled, law),
        throughput=throughput(job, law.mean),
        memory=modelled and memory(modelled),
        quickest=modelled and attempt("first change", lambda: quickest_change(modelled)),
        sensitivity=attempt("sensitivities", lambda: sensitivity(program, wanted, **of_steps)),
        criticality=attempt("criticality", lambda: criticality(alike, **of_steps)),
        step=attempt("timeline", lambda: sample_step(alike, quantile=quantile, **of_steps)),
        settings=settings,
        sliders=attempt(
            "sliders", lambda: sliders(program, most=most, num_samples=half_steps, key=key)
        ),
        missing=missing,
        num_steps=steps,
        seed=seed or f"key {jax.random.key_data(key).tolist()}",
        commands=commands or {},
        measured=np.concatenate(runs) if runs else None,
        diagnosis=None
        if job is None or not (runs or ranks)
        else attempt("diagnosis", lambda: diagnose(hypotheses(job, key=key), runs, ranks)),
        beside=None
        if modelled is None or profiled is None
        else attempt("parts of a profile", lambda: measured_beside(modelled, profiled)),
        tokens=tokens,
        price=price,
    )


def _attempt(missing: dict[str, str], name: str, make: Callable[[], T]) -> T | None:
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


def headline(report: Report) -> list[str]:
    """What was measured, if anything was; what to expect, what makes it slow or wide, and what to
    change first: a sentence for each.
    """
    measured = [] if report.diagnosis is None else [report.diagnosis.sentence()]
    return [*measured, _expected(report), _slow(report), _first(report)]


def _expected(report: Report) -> str:
    law, future = report.law, report.epistemic
    sure = ""
    if future is not None:
        low, high = future.intervals({"p95": 0.95})["p95"]
        sure = f"; p95 of nine in ten such runs lies within {low:.4g} to {high:.4g} s"
    return (
        f"Expect a step of {law.quantile(0.5):.4g} s (p50), and one in twenty that takes more than "
        f"{law.quantile(0.95):.4g} s (p95){sure}."
    )


def _slow(report: Report) -> str:
    parts = [] if report.throughput is None else [*report.throughput.breakdown.items()]
    parts = sorted((-seconds, name) for name, seconds in parts if name != "compute")
    share = f"{-100 * parts[0][0] / report.law.mean:.3g} %" if parts else ""
    slow = f"Besides compute, {parts[0][1]} takes most: {share} of the mean" if parts else ""
    sensitivity = report.sensitivity
    parts = sensitivity.parts if sensitivity else ()
    gains = [(p.gain.value, p.name) for p in parts if p.gain and p.name not in _OF_TABLES]
    if not sensitivity or not gains:
        return f"{slow or 'What makes steps slow is not known'}."
    gain, name = max(gains)
    unit = "s" if sensitivity.unit == "s" else ""
    source = SHARED.get(name, f"variability of {name}")
    wide = f"without the {source}, {sensitivity.objective} would fall by {gain:.2g} {unit}"
    return f"{slow}; {wide.strip()}." if slow else f"{wide[0].upper()}{wide[1:].strip()}."


def _first(report: Report) -> str:
    p95 = report.law.quantile(0.95)
    if report.quickest is not None:
        change, share = report.quickest
        keys = " ".join(f"--set {text}" for text in change)
        return (
            f"Change first: {keys}, which needs no other hardware and makes steps "
            f"{100 * share:.2g} % shorter, about {share * p95:.2g} s at p95 (if p95 falls as a "
            "step without variability does)."
        )
    best = _best_slower(report.sliders)
    tried = ""
    if report.memory is not None and "first change" not in report.missing:
        tried = "No setting by itself makes steps 0.2 % shorter"
    if best is None:
        return f"{tried or 'What to change first is not known'}."
    name, gain = best
    least = f"lower the {name} by a tenth first, which is worth {gain:.2g} s at p95"
    return f"{tried}; {least}." if tried else f"Change first: {least}."


def _best_slower(parameters: Sliders | None) -> tuple[str, float] | None:
    """Which parameter to lower by a tenth for the most at p95, and by how many seconds."""
    gains = [
        (-float(slider.change(0.9 * slider.own)[P95]), slider.name)
        for slider in (parameters.sliders if parameters else ())
        if slider.own and slider.name not in {SHARED[name] for name in _OF_TABLES}
    ]
    gain, name = max(gains, default=(0.0, ""))
    return (name, gain) if gain > 0 else None
