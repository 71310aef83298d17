"""Programs and laws as files: what is read is what was saved, and damage is one sentence."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from prism_jax import latency
from prism_jax.program import digest

from .helpers import lognormal, refusal, rich_program
from .test_extensions import Uniform


def _program(**changes):
    """One with everything in it, and laws of many families."""
    laws = {
        "residual": {
            "gemm": latency.Gamma(1.0, 0.05),
            "send_recv": latency.ShiftedLogNormal(0.5, 0.5, 0.3),
            "optimizer": latency.Mixture([0.9, 0.1], (lognormal(0.1), latency.Constant(1.2))),
        },
        "rank": latency.Normal(1.0, 0.02),
        "worker_step": lognormal(0.05),
        "step": latency.Scaled(latency.Weibull(1.0, 20.0), 3.0),
    }
    return rich_program(4, **(laws | changes))


def _programs():
    samples = np.random.default_rng(0).gamma(4.0, 0.25, 500)
    yield _program()
    yield _program(residual={"gemm": latency.empirical_from_samples(samples)})
    uniform = Uniform(jnp.ones(()), jnp.asarray(0.5))
    yield _program(residual={"gemm": latency.ThreeMoment(1.0, 0.1, 0.5)}, step=uniform)
    yield prism.slow_rank(_program(), 1, 1.2).program
    yield prism.compile_job(prism.load_job("megatron-22b-a100-8"))


def test_a_saved_program_is_read_back(tmp_path):
    path = tmp_path / "program.npz"
    for program in _programs():
        prism.save_program(program, path)
        again = prism.load_program(path)
        assert digest(again) == digest(program)
        assert eqx.tree_equal(again, program)
        assert jax.tree.structure(again) == jax.tree.structure(program)
    assert [file.name for file in tmp_path.iterdir()] == ["program.npz"]


@pytest.mark.slow
def test_a_saved_program_is_simulated_alike(tmp_path):
    program, options = _program(), {"num_samples": 500, "key": jax.random.key(0)}
    prism.save_program(program, tmp_path / "program.npz")
    again = prism.load_program(tmp_path / "program.npz")
    assert prism.simulate(again, **options) == prism.simulate(program, **options)


def test_damaged_and_foreign_programs_are_one_sentence(tmp_path):
    path, bad = tmp_path / "program.npz", tmp_path / "bad.npz"
    program = _program()
    prism.save_program(program, path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for bit in rng.integers(8 * len(whole), size=100).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        bad.write_bytes(damaged)
        _sound_or_one_sentence(prism.load_program, bad, lambda p: digest(p) == digest(program))
    with np.load(path) as archive:
        fields = dict(archive)
    about = json.loads(str(fields["about"]))
    for change in (
        {"format": 1},
        {"digest": "0"},
        {"program": None},
        {"program": {"class": "prism_jax.program._program.Program", "fields": {}}},
        {"program": {"class": "prism_jax.program._program.Program", "fields": 3}},
        {"program": {"tuple": [1, 2]}},
        {"program": {"array": "array0"}},
        {"program": {}},
    ):
        np.savez(bad, **{**fields, "about": np.array(json.dumps({**about, **change}))})
        refusal(lambda: prism.load_program(bad), "is not a program")
    text = json.dumps(about)
    np.savez(bad, **{**fields, "about": np.array(text.replace('._gamma.Gamma"', '._gamma.Gama"'))})
    refusal(lambda: prism.load_program(bad), "Gama`, which is not known here")
    np.savez(bad, a=np.zeros(2))
    refusal(lambda: prism.load_program(bad), "is not a program")
    with pytest.raises(FileNotFoundError):
        prism.load_program(tmp_path / "nowhere.npz")


def test_a_program_that_jax_would_cut_is_refused(tmp_path):
    prism.save_program(_program(), tmp_path / "program.npz")
    jax.config.update("jax_enable_x64", False)
    try:
        refusal(lambda: prism.load_program(tmp_path / "program.npz"), "jax_enable_x64")
    finally:
        jax.config.update("jax_enable_x64", True)


def test_a_changed_law_is_one_sentence(tmp_path):
    law = prism.simulate(_program(), num_samples=3000, key=jax.random.key(0))
    path, bad = tmp_path / "law.npz", tmp_path / "bad.npz"
    prism.save_law(law, path)
    assert prism.load_law(path) == law
    with np.load(path) as archive:
        fields = dict(archive)
    about = json.loads(str(fields.pop("about")))
    wrong = [None, "x", -1, [], {}, True, float("nan"), [[1]], 1e400]
    changes = [{name: value} for name in about for value in wrong]
    of_errors = about["errors"]
    changes += [{"errors": {**of_errors, name: x}} for name in of_errors for x in wrong]
    changes += [{"allocations": {"means": [1.0, x], "std": 0.1}} for x in wrong]
    changes += [{"allocations": {"means": [1.0, 2.0], "std": x}} for x in wrong]
    for change in changes:
        np.savez(bad, **fields, about=np.array(json.dumps({**about, **change})))
        _sound_or_one_sentence(prism.load_law, bad, _is_usable)
    for name, array in fields.items():
        for value in (array[:-1], array.astype(str), array[None], -1 - array, array * np.nan):
            np.savez(bad, **{**fields, name: value}, about=np.array(json.dumps(about)))
            _sound_or_one_sentence(prism.load_law, bad, _is_usable)
        rest = {other: x for other, x in fields.items() if other != name}
        np.savez(bad, **rest, about=np.array(json.dumps(about)))
        refusal(lambda: prism.load_law(bad), "is not a law")


def _is_usable(law) -> bool:
    """Whether all that one may ask of a law has an answer."""
    figures = [law.mean, law.std, law.cdf(law.mean), *law.quantile(np.linspace(0, 1, 11))]
    prism.merge_laws([law])
    return bool(repr(law)) and bool(np.all(np.isfinite(figures)))


def _sound_or_one_sentence(load, path, is_sound) -> None:
    sentence = None
    try:
        found = load(path)
    except ValueError as error:
        sentence = str(error)
    if sentence is None:
        assert is_sound(found)
    else:
        assert sentence.count(". ") == 0
        assert str(path) in sentence
