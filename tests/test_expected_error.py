"""By how much predictions are expected to be off."""

import itertools as it
from typing import Any

import jax.random as jr
import msgspec
import numpy as np

import prism_jax as prism
from prism_jax.calibration import epistemic
from prism_jax.data import (
    Calibrated,
    Layer,
    Uncertainty,
    generation_of,
    load_expected_errors,
)
from prism_jax.data._priors import ErrorClass
from prism_jax.prediction import ExpectedError, class_of, levels_of_law

from .helpers import refusal


def _job(**training) -> prism.Job:
    job: Any = prism.load_job("gpt3-175b-h100-768")
    return msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, **training))


def _on(job: prism.Job, device: str) -> prism.Job:
    assert job.cluster is not None
    renamed = msgspec.structs.replace(job.cluster.device, name=device)
    return msgspec.structs.replace(
        job, cluster=msgspec.structs.replace(job.cluster, device=renamed)
    )


def test_classes_have_enough_runs_and_one_above_them():
    shipped = load_expected_errors().classes
    keys = [one.key for one in shipped]
    assert len(set(keys)) == len(keys)
    for one in shipped:
        assert one.num_runs >= 20
        assert (*one.key[:2], "", "") in keys
        assert not one.software or (*one.key[:3], "") in keys
    assert {key[:2] for key in keys} == set(it.product(("dense", "experts"), (False, True)))


def test_a_job_has_the_smallest_class_that_it_is_of():
    laws = {one.key: one for one in load_expected_errors().classes}

    def same(found: ExpectedError, law: ErrorClass) -> bool:
        return (found.bias, found.spread, found.num_runs) == (law.bias, law.spread, law.num_runs)

    hopper = ("dense", False, "Hopper")
    assert same(prism.expected_error(_job()), laws[(*hopper, "")])
    for stack, known in (("nemo-2024", "nemo-2024"), ("automodel", "")):
        assert same(prism.expected_error(_job(software=stack)), laws[(*hopper, known)])
    assert same(prism.expected_error(_job(zero=3)), laws[("dense", True, "Hopper", "")])


def test_steps_whose_layers_are_all_frozen_are_of_no_class():
    job, forward = _job(), _job(forward_only=True)
    model: Any = job.model

    def with_frozen(number: int) -> prism.Job:
        counts = ((number, True), (96 - number, False))
        layers = tuple(Layer(("attention", "mlp"), n, frozen=one) for n, one in counts if n)
        return msgspec.structs.replace(job, model=msgspec.structs.replace(model, layers=layers))

    assert prism.expected_error(with_frozen(95)) == prism.expected_error(job)
    assert prism.expected_error(with_frozen(96)) == prism.expected_error(forward)
    assert prism.expected_error(forward).spread > prism.expected_error(job).spread
    assert class_of(with_frozen(96)) == class_of(forward)


def test_a_class_without_runs_is_wider_than_others_of_its_kind():
    found = prism.expected_error(_on(_job(), "tpu-v5p"))
    low, high = found.interval()
    assert found.num_runs == 0
    for device in ("a100-80g-sxm", "h100-sxm", "gb200"):
        known = prism.expected_error(_on(_job(), device)).interval()
        assert high / low > known[1] / known[0]


def test_generations_are_read_off_the_names_of_devices():
    devices = {"A100": ["a100-40g-sxm", "a800"], "Hopper": ["h20", "h200-sxm", "gh200", "my H100"]}
    devices |= {"Blackwell": ["b200", "gb300"], "other": ["mi300x", "v100"], "TPU": ["tpu-v5p"]}
    for generation, names in devices.items():
        assert {generation_of(name) for name in names} == {generation}


def test_intervals_hold_as_much_of_their_law_as_they_say():
    found = prism.expected_error(_job())
    draws = np.exp(found.bias + found.spread * np.random.default_rng(0).standard_t(3, 100_000))
    for level in (0.5, 0.9, 0.99):
        low, high = found.interval(level)
        np.testing.assert_allclose(np.mean((low < draws) & (draws < high)), level, atol=0.005)
        np.testing.assert_allclose(np.sqrt(low * high), np.exp(found.bias))
    refusal(lambda: found.interval(1.5), "`level=1.5` must lie between 0 and 1")


def test_a_calibrated_job_has_the_error_of_its_calibration():
    job = _job()
    rows = np.diag([0.01**2, 0.0, 0.0, 0.0]).tolist()
    covariance = tuple(tuple(row) for row in rows)
    uncertainty = Uncertainty(covariance, level=0.02, num_steps=57)  # pyright: ignore[reportArgumentType]
    known = msgspec.structs.replace(job, calibrated=Calibrated("mine", uncertainty=uncertainty))
    found = prism.expected_error(known)
    # A step is not of compute alone, so less than the one per cent of compute is added.
    assert 0.02 < found.spread < np.hypot(0.02, 0.01)
    assert (found.table, found.num_runs) == ("mine", 57)
    np.testing.assert_allclose(levels_of_law(found, 0.5), 1)
    np.testing.assert_allclose(found.std, found.spread)


def test_a_calibrated_job_of_another_class_has_the_error_of_that_class():
    row = (0.0, 0.0, 0.0, 0.0)
    uncertainty = Uncertainty((row, row, row, row), level=0.02, num_steps=57, of=class_of(_job()))
    calibrated = Calibrated("mine", uncertainty=uncertainty)

    def found(job):
        return prism.expected_error(msgspec.structs.replace(job, calibrated=calibrated))

    assert found(_job()).table == "mine"
    for other in (_job(zero=3), _job(forward_only=True), _on(_job(), "b200")):
        assert found(other) == prism.expected_error(other)


def test_the_level_of_steps_of_further_runs_has_the_expected_error():
    job = prism.load_job("megatron-22b-a100-8")
    law = prism.simulate(prism.compile_job(job), num_samples=256, key=jr.key(0), sampling="plain")
    found, error = epistemic(job, law), prism.expected_error(job)
    each = np.median(found.steps, axis=1) / float(law.quantile(0.5))
    for q in (0.2, 0.5, 0.8):
        np.testing.assert_allclose(np.quantile(each, q), levels_of_law(error, q), rtol=0.01)
