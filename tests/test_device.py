"""The devices of a command, where there is an accelerator, and where there is none."""

import json
import os
from types import SimpleNamespace

import jax
import pytest

from prism_jax.cli import _load, main
from prism_jax.cli._device import MANY, rather_on_cpu, reckoned_s


_COMMANDS = ("simulate", "sensitivity", "whatif")
_WORDS = ["simulate", "megatron-22b-a100-8", "--samples", "300", "--json"]


@pytest.mark.parametrize("command", _COMMANDS)
def test_a_command_is_done_where_it_is_done_first(command):
    """The CPU does little, and never much; more cores do no less there."""
    assert rather_on_cpu(command, 0, 2)
    for cores in (2, 16, 10**6):
        where = [
            rather_on_cpu(command, evaluations, cores) for evaluations in range(0, MANY, 10**8)
        ]
        assert where == sorted(where, reverse=True)
        assert not rather_on_cpu(command, MANY, cores)
    for evaluations in (10**6, 10**9, MANY - 1):
        accelerator, cpu = reckoned_s(command, evaluations, 2)
        assert rather_on_cpu(command, evaluations, 2) == (cpu <= accelerator)
        assert reckoned_s(command, evaluations, 8)[1] < cpu


@pytest.mark.parametrize("command", [_WORDS, ["explore", "examples/job.toml"]])
def test_a_gpu_that_is_not_there_is_refused(refused, command):
    assert "JAX sees no GPU here" in refused([*command, "--device", "gpu"])


def test_a_device_is_not_one_of_the_workers(refused):
    words = ["sweep", _WORDS[1], "--over", "layout.dp=1", "--ray", "--device", "cpu"]
    assert "`--worker-gpus`" in refused(words)


def test_beside_a_gpu_little_is_done_on_the_cpu(monkeypatch, capsys):
    """Which a line says, unless it was asked for; afterwards JAX's setting is as before."""

    def figures(*words):
        assert main([*_WORDS, *words]) == 0
        printed = capsys.readouterr()
        return json.loads(printed.out)["step_time_s"], printed.err

    without, silence = figures()
    gpu = SimpleNamespace(platform="gpu")
    monkeypatch.setattr(_load, "devices_of_jax", lambda: [gpu])
    monkeypatch.setattr(jax, "devices", lambda name=None: here if name == "cpu" else [gpu])
    here = jax.local_devices(backend="cpu")
    asked, again = figures("--device", "cpu"), figures()
    assert (asked[0], again[0]) == (without, without)
    assert silence == asked[1]
    assert (
        f"with its {os.cpu_count()} cores, and 6.1 s on a GPU; `--device gpu` uses it" in again[1]
    )
    assert jax.config.jax_default_device is None  # pyright: ignore
