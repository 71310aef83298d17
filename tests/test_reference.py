"""What is assumed can be read: keys of jobs, values of a job, a first job, the models."""

import pathlib
import re
import runpy

import msgspec
import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.data import job_keys, list_names


_ROOT = pathlib.Path(__file__).parents[1]
_DOCS, _TOOLS = _ROOT / "docs", _ROOT / "tools"


def test_the_page_of_keys_is_that_of_the_schema():
    page = runpy.run_path(str(_TOOLS / "job_reference.py"))["job_reference"]()
    assert (_DOCS / "job_reference.md").read_text() == page, "Run `make reference`."


def test_the_graph_of_packages_is_that_of_the_imports():
    page = runpy.run_path(str(_TOOLS / "architecture.py"))["page"]()
    assert (_DOCS / "architecture.md").read_text() == page, "Run `make reference`."


def test_the_architecture_page_names_existing_functions():
    page = (_DOCS / "architecture.md").read_text()
    rows = re.findall(r"^\| .* \| `(.*)` \| `(.*)` \|$", page, re.MULTILINE)
    assert len(rows) >= 14
    for file, name in rows:
        text = (_ROOT / file).read_text()
        assert re.search(rf"^(    )?(class|def) {name}\b", text, re.MULTILINE), (file, name)
    packages = {path.parent.name for path in (_ROOT / "prism_jax").glob("*/__init__.py")}
    told = page.partition("## The packages")[2].partition("## Where")[0]
    assert {*re.findall(r"\*\*(\w+)\*\*", told)} == packages


def test_every_job_key_has_a_description():
    keys = job_keys()
    assert len(keys) > 70
    assert [key.key for key in keys if not (key.about and key.allowed)] == []
    numbers = {key.key: key for key in keys}
    assert numbers["cluster.links[].bandwidth_bytes_per_s"].unit == "bytes/s"
    assert numbers["training.dtype"].default == '"bf16"'
    assert numbers["schedule.kind"].default is None
    for cls in (prism.Layout, prism.data.ScheduleConfig, prism.data.Training):
        for field in msgspec.structs.fields(cls):
            assert any(key.endswith(f".{field.name}") for key in numbers)


@pytest.mark.parametrize("name", list_names("job"))
def test_every_value_of_a_job_is_shown(name, answered):
    found = answered(["show", name, "--set", "schedule.blocking=true", "--json"])
    keys = {key["key"]: key for key in found["keys"]}
    job = prism.load_job(name)
    assert keys["layout.tp"]["value"] == job.layout.tp
    assert keys["schedule.blocking"]["value"] is True
    etp = {"key": "layout.etp", "value": job.layout.etp, "unit": "", "stack": ""}
    etp |= {"is_default": job.layout.etp is None}
    assert keys["layout.etp"] == etp | {"origin": "default" if etp["is_default"] else "given"}
    assert keys["schedule.blocking"]["origin"] == "given"
    assert keys["cluster.links[0].bandwidth_bytes_per_s"]["unit"] == "bytes/s"
    assert not keys["schedule.num_microbatches"]["is_default"]
    text = answered(["show", name])
    assert "tables of kernels: " in text
    assert max(map(len, text.splitlines())) < 180


def test_values_of_a_stack_of_software_are_said_to_be_from_it():
    job = prism.load_job("examples/job.toml", ["training.zero=2", "training.recompute=full"])
    origins = {key.key: key.where_from for key in prism.data.assumed_keys(job)}
    assert origins["training.launch_floor_s"] == "stack megatron-core-2024"
    assert origins["training.zero"] == "given"  # The stack has 1.
    assert origins["training.recompute"] == "given"
    assert origins["layout.ep"] == "default"


def test_a_first_job_is_valid_and_each_of_its_comments_too(tmp_path, answered, refused):
    path = tmp_path / "first.toml"
    assert main(["init", str(path), "--all"]) == 0
    assert "64 x H100" in answered(["predict", str(path)])
    assert "is there already" in refused(["init", str(path)])
    lines = path.read_text().splitlines()
    comments = [line for line in lines if line.startswith("# ") and " = " in line.split("# ")[1]]
    assert len(comments) > 25
    free = [line[2:] if line in comments and "..." not in line else line for line in lines]
    path.write_text("\n".join(free))
    assert prism.load_job(path) == prism.load_job(path, ["training.prefetch=1"])


def test_models_are_listed_with_their_parameters(answered):
    found = answered(["models", "--json"])["models"]
    assert [model["name"] for model in found] == list(list_names("model"))
    sizes = {model["name"]: model["parameters"] for model in found}
    assert 4.0e11 < sizes["llama-3.1-405b"] < 4.1e11
