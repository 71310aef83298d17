"""By how much the prediction of a job is expected to be off; and its kernels as a function of the
level of its steps, whose uncertainty that is.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
from jaxtyping import Float

from .._misc import plural
from .._summary import picked_attributes
from ..data import Calibrated, Job, Kernels, generation_of, load_expected_errors, load_priors
from ..lowering import job_parts
from ..workload import Costs, has_experts, has_tables
from ._predict import constant_step


_Levelled = TypeVar("_Levelled", Kernels, Calibrated)

# Steps of finite differences: of logarithms, of seconds in units of the step, of an exponent.
LEVEL_STEPS = np.array([1e-3, 1e-2, 1e-3, 1e-3])


class ExpectedError(msgspec.Struct, frozen=True):
    """The law of the logarithm of the measured step time over `predict(job).mean`: Student's.

    **Attributes:**

    - `bias`: its median; above zero if steps take longer than predicted.
    - `spread`: its scale. A normal law's is its standard deviation.
    - `num_runs`: how many measured steps it is of; 0 if none is of this class of jobs.
    - `table`: which they are.
    - `degrees`: its degrees of freedom; infinite for a normal law.
    - `variability`: the part of `bias` that steps are longer by because they vary, as a share.
    - `at_one_site`: whether it is of runs at the site of a calibration alone. Errors of published
        runs are of many sites, so that differences between these are part of them.
    """

    bias: float
    spread: float
    num_runs: int
    table: str
    degrees: float = np.inf
    variability: float = 0.0
    at_one_site: bool = False

    @property
    def std(self) -> float:
        """The standard deviation of the logarithm; more than two degrees have one."""
        return self.spread * float(np.sqrt(1 / (1 - 2 / self.degrees)))

    def __str__(self) -> str:
        """Whose errors they are, after "90 % of such runs"."""
        if self.table.startswith("calibrated to"):
            return f"by the {plural(self.num_runs, 'step')} that the job is {self.table}"
        if self.num_runs:
            return f"by the errors of {plural(self.num_runs, 'published run')} ({self.table})"
        return "no published run is of this class, so this is wider than for its kind of job"

    def to_json(self) -> dict[str, Any]:
        """Of which runs it is, with its median and its scale."""
        return picked_attributes(self, "bias", "spread", "num_runs", "table")

    def about_sites(self) -> str:
        """By how much sites of one machine differ, and whether that is part of the law."""
        differ = f"sites of one machine differ by {100 * load_priors().sites.deviation:.2g} %"
        if self.at_one_site:
            return f"of the calibrated site; {differ} more (standard deviation)"
        return f"{differ} (standard deviation), which is part of that"

    def quantile(self, q: Any) -> Any:
        """The factor on `predict(job).mean` at the quantiles `q`, which lie between 0 and 1."""
        from scipy.special import stdtrit

        return np.exp(self.bias + self.spread * stdtrit(self.degrees, q))

    def interval(self, level: float = 0.9) -> tuple[float, float]:
        """The range of the measured mean of a step over `predict(job).mean`.

        **Arguments:**

        - `level`: the probability that the measured mean lies in the range.

        **Raises:**

        `ValueError` if the probability is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"The probability `level={level}` must lie between 0 and 1.")
        return float(self.quantile((1 - level) / 2)), float(self.quantile((1 + level) / 2))


def expected_error(job: Job) -> ExpectedError:
    """By how much the measured step of a job is expected to differ from `predict`.

    The errors are those of published steps of the same class: the generation of the machine, a
    model with or without experts, parameters that are sharded (FSDP) or not, and the software. A
    class with fewer than 20 steps has the law of the class above it. A class without any, as that
    of models without words (images, recommenders), of models whose layers are guessed, or of steps
    whose layers have no backward, has one 2.5 times as wide as that of its kind of model and
    sharding on other machines, and `num_runs` 0. A job that is calibrated has the uncertainty of
    its calibration, linear in its parameters, unless it has become one of another class since then.

    Not differentiable. The source is `kernels/expected_errors.toml`.

    **Arguments:**

    - `job`: from `load_job`, with a model and a cluster.

    **Returns:**

    An [`ExpectedError`][prism_jax.prediction.ExpectedError].

    **Raises:**

    `ValueError` if the job has no model, or if its layout does not fit the model.
    """
    parts = job_parts(job)
    model, training = parts.model, parts.training
    shipped = load_expected_errors()
    uncertainty = None if job.calibrated is None else job.calibrated.uncertainty
    if (
        job.calibrated is not None
        and uncertainty is not None
        and uncertainty.of in ((), class_of(job))
    ):
        slope = slope_of_level(constant_step(job), parts.kernels)
        spread = float(
            np.sqrt(slope @ np.array(uncertainty.covariance) @ slope + uncertainty.level**2)
        )
        longer = uncertainty.variability
        bias, source = float(np.log1p(longer)), job.calibrated.source
        of_job = bias, spread, uncertainty.num_steps, source
        return ExpectedError(*of_job, variability=longer, at_one_site=True)
    kind = ("experts" if has_experts(model) else "dense", training.zero == 3)
    machine = (*kind, generation_of(parts.cluster.device.name))
    laws = {law.key: law for law in shipped.classes}
    unknown = _runs_forward(parts) or model.vocab_size == 0 or model.guessed
    keys = () if unknown else ((*machine, training.software or ""), (*machine, ""))
    law = next((laws[key] for key in keys if key in laws), None)
    if law is None:
        law, table = laws[(*kind, "", "")], "none of its class"
        law = msgspec.structs.replace(
            law, spread=law.spread * shipped.unknown, num_runs=0, table=table
        )
    of_law = law.bias, law.spread, law.num_runs, law.table
    return ExpectedError(*of_law, shipped.degrees, shipped.variability)


def class_of(job: Job) -> tuple[str, ...]:
    """The class of a job with a model and a cluster: its kind of model, whether parameters are
    sharded, the generation of its machine, its software, and whether its layers have a backward.
    """
    parts = job_parts(job)
    model, training = parts.model, parts.training
    return (
        ("guessed " if model.guessed else "")
        + ("tables" if has_tables(model) else "experts" if has_experts(model) else "dense"),
        "FSDP" if training.zero == 3 else "no FSDP",
        generation_of(parts.cluster.device.name),
        training.software or "no stack",
        "forward only" if _runs_forward(parts) else "training",
    )


def _runs_forward(parts: Costs) -> bool:
    """Whether no layer has a backward."""
    layers = parts.model.layers
    frozen = layers is not None and all(layer.frozen for layer in layers)
    return parts.training.forward_only or frozen


def levels_of_law(error: ExpectedError, q: Any) -> Any:
    """Factors on the median of `simulate`, whose steps vary and so take longer than `predict` says,
    at the quantiles `q` of an expected error.
    """
    return error.quantile(q) / (1 + error.variability)


def with_level(of: _Levelled, values: Float[np.ndarray, "4"], num_replicas: int) -> _Levelled:
    """Kernels, or their changes, with these values of the level; see `calibration.Level`."""
    compute, network, constant, growth = (float(x) for x in values)
    return msgspec.structs.replace(
        of,
        compute=float(np.exp(compute)),
        network=float(np.exp(network)),
        constant_s=max(constant, 0.0),
        growth=growth,
        num_replicas=num_replicas,
    )


def slope_of_level(seconds: Callable[[Kernels], float], kernels: Kernels) -> Float[np.ndarray, "4"]:
    """The derivatives of the logarithm of a step with respect to the parameters of its level."""
    numbers = (np.log(kernels.compute), np.log(kernels.network))
    values = np.array([*numbers, kernels.constant_s, kernels.growth])

    def logs(values):
        return np.log([seconds(with_level(kernels, values, kernels.num_replicas))])

    now = logs(values)
    return slopes_of_level(logs, values, now, LEVEL_STEPS * np.array([1, 1, np.exp(now[0]), 1]))[0]


def slopes_of_level(
    logs: Callable[[Float[np.ndarray, "4"]], Float[np.ndarray, " points"]],
    values: Float[np.ndarray, "4"],
    now: Float[np.ndarray, " points"],
    apart: Float[np.ndarray, "4"],
) -> Float[np.ndarray, "points 4"]:
    """The derivatives of several logarithms by finite differences.

    **Arguments:**

    - `logs`: gives the logarithms for values of the level.
    - `values`: where.
    - `now`: the logarithms there.
    - `apart`: the step of each parameter.
    """
    moved = [(logs(values + step) - now) / step.sum() for step in np.diag(apart)]
    return np.stack(moved, axis=1)
