"""What is compiled for devices that are not there: see docs/accelerators.md. Without the compilers,
which `make test-accelerators` installs, these tests are skipped.
"""

import json
import pathlib
import subprocess
import sys

import pytest


_ROOT = pathlib.Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (_ROOT / ".venv-accelerators").exists(), reason="needs `make .venv-accelerators`"
    ),
]


def _printed(*command: str):
    """What a script prints as JSON, in a process whose JAX has not started."""
    command = (sys.executable, *command)
    run = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert run.stdout, run.stderr
    return json.loads(run.stdout)


def test_the_instructions_of_the_kernels_give_what_the_loops_give():
    """To 1e-6, for a GPU rounds other last bits; the choices of joins are the same."""
    differences = _printed("-m", "tests.ptx")
    assert len(differences) == 3
    for of_program in differences.values():
        assert of_program["ends"] < 1e-6
        assert of_program["choices"] == 1
    derivatives = [row["derivatives"] for row in differences.values() if "derivatives" in row]
    assert len(derivatives) == 2
    assert max(derivatives) < 1e-6


# A TPU is left to the script: XLA takes minutes for each function.
@pytest.mark.parametrize("target", ["h200", "h100"])
def test_what_runs_in_tiles_compiles_and_fits(target):
    rows = _printed("tools/compile_for.py", target, "--json", "--jobs", "megatron-22b-a100-8")
    assert {row["function"] for row in rows} >= {"_replica_tile", "_replica_vjp", "step_tile"}
    assert [row["problem"] for row in rows if row["problem"]] == []
    # That of `until_reduced`, where a turn writes a row.
    assert max(row["by the host"] for row in rows) <= 1
