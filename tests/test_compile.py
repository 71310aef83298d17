import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.data import Variation


@pytest.fixture(scope="module")
def job():
    return prism.load_job("megatron-22b-a100-8")


def _compile(job, **changes):
    parts = {name: getattr(job, name) for name in ("model", "layout", "schedule", "cluster")}
    options = {name: getattr(job, name) for name in ("training", "kernels")}
    for name, change in changes.items():
        into = parts if name in parts else options
        into[name] = msgspec.structs.replace(into[name], **change)
    return prism.compile_program(*parts.values(), **options)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layout": {"tp": 0}}, "Layout"),
        ({"layout": {"dp": 1000}}, "8,000 ranks"),
        ({"layout": {"tp": 3}}, "does not divide"),
        ({"training": {"dtype": "fp5"}}, "Training"),
        ({"training": {"zero": 4}}, "Training"),
        ({"training": {"recompute": "typo"}}, "Training"),
        ({"schedule": {"num_microbatches": -1}}, "ScheduleConfig"),
        ({"schedule": {"kind": "1b1f"}}, "1b1f"),
        ({"schedule": {"kind": "1f1b", "virtual_stages": 2}}, "`1f1b` has no `virtual_stages`"),
        ({"model": {"num_layers": 0}}, "Model"),
        ({"model": {"ffn_size": np.float64(7)}}, "Model .*numpy.float64.* give plain values"),
        (
            {"schedule": {"kind": "interleaved-1f1b", "blocking": True, "virtual_stages": 2}},
            "block",
        ),
    ],
)
def test_impossible_parts_are_refused(job, changes, match):
    with pytest.raises(ValueError, match=match):
        _compile(job, **changes)


@pytest.mark.parametrize(
    ("law", "message"),
    [
        (
            ("gemm", "residual", "norml", {"sigma": 0.1}),
            "residual of `gemm`: No latency .*`normal`",
        ),
        (("gemm", "residual", "lognormal", {"sgma": 0.1}), "`sgma`; did you mean `sigma`"),
        (("", "rank", "lognormal", {}), "the law of the rank: .* lacks `sigma`"),
        (("gemm", "stall", "gamma", {"rate": 0, "median_s": 1}), "stall of `gemm`: .* lacks `cv`"),
    ],
)
def test_laws_that_no_family_has_are_refused(job, law, message):
    with pytest.raises(ValueError, match=message):
        _compile(job, kernels={"variability": (Variation(*law),)})


def test_compiling_a_job_without_a_model_names_the_missing_keys(written):
    path = written(
        "trace.toml",
        'kind = "job"\n[layout]\npp = 4\n[schedule]\nkind = "1f1b"\nnum_microbatches = 4\n',
    )
    with pytest.raises(ValueError, match="add `model`, `cluster` and `training`"):
        prism.compile_job(prism.load_job(path))


def test_send_recv_blocks_by_default_in_1f1b_only(job):
    def levels(**schedule):
        schedule = {"num_microbatches": 8, **schedule}
        return _compile(job, layout={"pp": 4, "tp": 2}, schedule=schedule).levels

    assert levels() == levels(blocking=True)
    assert levels() != levels(blocking=False)
    assert levels(kind="gpipe") == levels(kind="gpipe", blocking=False)
