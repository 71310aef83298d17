"""Every mistake in a file or an override is one sentence that names the file and the key."""

import pytest

from prism_jax.data import load_cluster, load_device, load_job, load_kernels, load_model

from .helpers import lower_job


_LAYOUT = "[layout]\ntp = 2\n[schedule]\nkind = '1f1b'\nnum_microbatches = 4\n"
_JOB = "kind = 'job'\n" + _LAYOUT
_FULL = (
    "kind = 'job'\nmodel = 'llama-3.1-8b'\ncluster = 'dgx-h100'\nnum_nodes = 8\n"
    + _LAYOUT
    + "[training]\nmicrobatch_size = 1\nsequence_length = 4096\n"
)


def _sentence(raised) -> str:
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 700  # Of which the path is a part.
    # One sentence, or one and the list of what is known.
    assert message.replace(" Known: ", " ").count(". ") <= 1
    return message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("kind = 'job'\n[layout", ["not valid TOML"]),
        ('{"hidden_size": 4096}', ["this is JSON", "`prism-jax import`"]),
        ("", ["`kind` is missing"]),
        ("kind = 'cluster'", ["`kind` is 'cluster'", '"job"']),
        ("kind = 3", ["`kind` is 3"]),
        ("kind = 'job'", ["`layout` is missing"]),
        ("kind = 'job'\nlayout = 3", ["`layout` is 3"]),
        (_JOB.replace("num_microbatches = 4", ""), ["`schedule.num_microbatches` is missing"]),
        (_JOB.replace("kind = '1f1b'", "kind = ''"), ["`schedule.kind` is ''"]),
        (_JOB.replace("tp = 2", "tq = 2"), ["`layout.tq`", "did you mean `layout.tp`"]),
        (_JOB.replace("tp = 2", "tp = 0"), ["`layout.tp` is 0", ">= 1"]),
        (_JOB.replace("tp = 2", "tp = -1"), ["`layout.tp` is -1"]),
        (_JOB.replace("tp = 2", "tp = 2.0"), ["`layout.tp` is 2.0", "int"]),
        (_JOB.replace("tp = 2", "tp = true"), ["`layout.tp` is True", "bool"]),
        (_JOB.replace("tp = 2", "tp = '2'"), ["`layout.tp` is '2'", "str"]),
        (_JOB.replace("= 4", "= 0"), ["`schedule.num_microbatches` is 0"]),
        (_JOB + "layers_per_stage = [1, 2]", ["`schedule.layers_per_stage` has 2 entries"]),
        (_JOB + "layers_per_stage = [-1]", ["layers_per_stage"]),
        (_JOB + "blocking = 1", ["`schedule.blocking` is 1"]),
        ("world_size = 3\n" + _JOB, ["`world_size` is 3", "tp*pp*cp = 2*1*1 = 2"]),
        ("world_size = 3\n" + _JOB.replace("tp = 2", "dp = 2"), ["`world_size` is 3", "2 ranks"]),
        (_JOB + "[measured]\np50_s = 1.0", ["`measured.source` is missing"]),
        (_JOB + "[measured]\nsource = 'x'\np50_s = nan", ["`measured.p50_s` is nan"]),
        (_JOB + "[measured]\nsource = 'x'\np50_s = inf", ["`measured.p50_s` is inf"]),
        (_JOB + "[measured]\nsource = 'x'\np50_s = 0", ["`measured.p50_s` is 0"]),
        (_JOB + "[kernels]", ["`kernels`"]),
        ("model = 'gpt3'\n" + _JOB, ["No model `gpt3`", "gpt3-175b"]),
        ("model = 3\n" + _JOB, ["`model` is 3"]),
        ("model = 'gpt3-175b'\n" + _JOB, ["`cluster` is missing"]),
        ("cluster = 'no-such.toml'\n" + _JOB, ["no-such.toml", "no such file"]),
        ("model = { num_layers = 'x' }\n" + _JOB, ["`model.num_layers` is 'x'"]),
        ("model = { num_layers = 1 }\n" + _JOB, ["`model.hidden_size` is missing"]),
        ("model = { nun_layers = 1 }\n" + _JOB, ["`model.nun_layers`", "`model.num_layers`"]),
        (_FULL.replace("= 1\nseq", "= 0\nseq"), ["`training.microbatch_size` is 0"]),
        (_FULL + "dtype = 'fp4'", ["`training.dtype` is 'fp4'"]),
        (_FULL + "zero = 4", ["`training.zero` is 4"]),
        (_FULL + "recompute = true", ["`training.recompute` is True"]),
        (_FULL.replace("tp = 2", "tp = 2\ndp = 999"), ["1,998 ranks", "64 devices"]),
        (_FULL.replace("h100", "a100") + "dtype = 'fp8'", ["`training.dtype` is 'fp8'", "bf16"]),
    ],
)
def test_mistakes_in_a_job(tmp_path, text, parts):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        load_job(path)
    message = _sentence(raised)
    for part in parts:
        assert part in message
    if "No model" not in message and "no-such" not in message:
        assert str(path) in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("layout.dp", ["`layout.dp`", "layout.dp=64"]),
        ("=3", ["`=3`"]),
        ("layout.dp=", ["`layout.dp=`"]),
        ("layout..dp=3", ["`layout..dp=3`"]),
        ("layout.dq=3", ["`layout.dq`", "did you mean"]),
        ("lay=3", ["`lay`", "did you mean `layout`"]),
        ("layout.dp=abc", ["override `layout.dp=abc`", "int"]),
        ("layout.dp=true", ["override `layout.dp=true`", "bool"]),
        ("layout.dp=1.5", ["override `layout.dp=1.5`", "float"]),
        ("layout.dp=-4", ["override `layout.dp=-4`", ">= 1"]),
        ("layout.dp.x=3", ["`layout.dp` is a value"]),
        ("layout=3", ["`layout` is 3"]),
        ("name=3", ["`name` is 3"]),
        ("training.microbatch_size=nan", ["microbatch_size=nan"]),
        ("cluster.device.memory_bytes=inf", ["`cluster.device.memory_bytes` is inf"]),
        ("cluster.links.nvlink.group=0", ["override `cluster.links.nvlink.group=0`", ">= 1"]),
        ("cluster.links.nvlonk.group=3", ["nvlonk", "nvlink"]),
        ("cluster.links.nvlink=3", ["`cluster.links.nvlink` is a table"]),
        ("cluster=dgx", ["No cluster `dgx`"]),
        ("model=7", ["`model` is 7"]),
        ("layout.dp=1000", ["32,000 ranks", "4,096 devices"]),
        ("kernels.all_gathr.sigma=0.1", ["all_gathr", "did you mean `all_gather`"]),
        ("kernels.all_gather.sigmo=0.1", ["sigmo", "did you mean `sigma`"]),
        ("kernels.all_gather=0.1", ["kernels.all_gather.sigma=0.1"]),
        ("kernels.rank.sigma=-0.1", ["not negative"]),
        ("kernels.rank.sigma=nan", ["finite"]),
        ("kernels.rank.sigma=wide", ["'wide'", "number"]),
        ("kernels.rank.sigma=true", ["True", "number"]),
    ],
)
def test_mistakes_in_an_override(override, parts):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        load_job("gpt3-175b-h100-4096", (override,))
    message = _sentence(raised)
    for part in parts:
        assert part in message


def test_an_override_of_kernels_needs_a_cluster(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(_JOB)
    with pytest.raises(ValueError, match="names no cluster") as raised:
        load_job(path, ("kernels.rank.sigma=0.1",))
    _sentence(raised)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("layout.tp=64",), ["`layout.tp` = 64", "`model.num_heads` = 96"]),
        (("model.num_kv_heads=2",), ["`layout.tp` = 4", "`model.num_kv_heads` = 2"]),
        (("schedule.virtual_stages=13",), ["8*13 = 104", "`model.num_layers` = 96"]),
        (("layout.ep=2",), ["`layout.ep` is 2", "dense"]),
        (("training.sequence_length=2049",), ["2049", "tp*cp = 4"]),
        (("training.sequence_length=2049", "layout.cp=2", "layout.dp=64"), ["tp*cp = 8"]),
        (("model.hidden_size=12289",), ["`model.hidden_size` = 12289"]),
        (("schedule.head_counts_as_layer=true",), ["head counted: 97"]),
        (
            ("schedule.virtual_stages=1", "schedule.layers_per_stage=[12,12,12,12,12,12,12,13]"),
            ["adds up to 97", "`model.num_layers` is 96"],
        ),
    ],
)
def test_layouts_that_do_not_fit_the_model(overrides, parts):
    overrides = ("num_nodes=100000", *overrides)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        lower_job(load_job("gpt3-175b-h100-4096", overrides))
    message = _sentence(raised)
    for part in parts:
        assert part in message


def test_files_that_cannot_be_read(tmp_path):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    null = tmp_path / "null.toml"
    null.write_bytes(b"kind = 'job'\x00\n")
    table = tmp_path / "table.csv"
    table.write_text("a,b\n1,2\n")
    for path, part in [
        (tmp_path, "folder"),
        (tmp_path / "absent.toml", "no such file"),
        (binary, "UTF-8"),
        (null, "not valid TOML"),
        (table, "not valid TOML"),
    ]:
        for load in (load_job, load_model, load_cluster, load_device):
            with pytest.raises(ValueError, match=part) as raised:
                load(path)
            assert str(path) in _sentence(raised)


def test_unknown_names_show_the_near_ones():
    for load, name, near in [
        (load_job, "gpt3-175b-h100", "gpt3-175b-h100-768"),
        (load_model, "llama-3.1-7b", "llama-3.1-8b"),
        (load_cluster, "dgx-h10", "dgx-h100"),
        (load_device, "h100", "h100-sxm"),
    ]:
        with pytest.raises(ValueError, match=f"`{name}`") as raised:
            load(name)
        assert near in _sentence(raised)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("num_nodes = 2", "num_nodes = 0"), ["`num_nodes` is 0"]),
        (("group = 8", "group = 99"), ["`infiniband` is 16", "innermost first"]),
        (("name = 'infiniband'", "name = 'nvlink'"), ["two links with one name"]),
        (("bandwidth_bytes_per_s = 5e10", "bandwidth_bytes_per_s = -1"), ["links[1].bandwidth"]),
        (("bandwidth_bytes_per_s = 5e10", "bandwidth_gb_s = 50"), ["links[1].bandwidth_gb_s"]),
        (("device = 'h100-sxm'", "device = 'h100'"), ["No device `h100`"]),
        (("device = 'h100-sxm'", "device = 3"), ["`device` is 3"]),
    ],
)
def test_mistakes_in_a_cluster(tmp_path, change, parts):
    text = (
        "kind = 'cluster'\ndevice = 'h100-sxm'\nnum_nodes = 2\ndevices_per_node = 8\n"
        "[[links]]\nname = 'nvlink'\ngroup = 8\nbandwidth_bytes_per_s = 4e11\n"
        "[[links]]\nname = 'infiniband'\ngroup = 16\nbandwidth_bytes_per_s = 5e10\n"
    )
    path = tmp_path / "machine.toml"
    path.write_text(text)
    assert load_cluster(path).num_devices == 16
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        load_cluster(path)
    message = _sentence(raised)
    for part in parts:
        assert part in message


@pytest.fixture
def own_profile(tmp_path, monkeypatch):
    """A copy of the folder of kernels, which a test may spoil."""
    import shutil

    from prism_jax.data import _load_kernels, _read

    original = _read.data_folder

    def data_folder(kind):
        return tmp_path / "kernels" if kind == "kernels" else original(kind)

    shutil.copytree(original("kernels"), tmp_path / "kernels")
    monkeypatch.setattr(_read, "data_folder", data_folder)
    monkeypatch.setattr(_load_kernels, "data_folder", data_folder)
    return tmp_path / "kernels"


@pytest.mark.parametrize(
    ("file", "line", "parts"),
    [
        ("variability.csv", "gemm,nonsense,lognormal,sigma=1,x", ["`component`", "nonsense"]),
        ("variability.csv", "gemm,stall,lognormal,rate=1;sigma=1,x", ["no `median_s`"]),
        ("variability.csv", ",network,two-regimes,slow=1,x", ["`slow`", "`slowdown`"]),
        ("variability.csv", ",network,two-regimes,step=1,x", ["`step`", "`step_excess`"]),
        ("variability.csv", ",network,lognormal,sigma=1,x", ["takes `two-regimes`"]),
        ("variability.csv", "gemm,residual,lognormal,sigma=nan,x", ["`sigma=nan`", "finite"]),
        ("variability.csv", "gemm,residual,lognormal,sigma=-1,x", ["`sigma=-1`"]),
        ("variability.csv", "gemm,residual,lognormal,sigma,x", ["`sigma`", "name=value"]),
        ("variability.csv", "gemm,rank,normal,sigma=1,x", ["`rank`", "empty"]),
        ("variability.csv", ",residual,lognormal,sigma=1,x", ["`residual`", "needs a `kernel`"]),
        ("variability.csv", "gemm,residual,lognormal,sigma=1,", ["`source` is missing"]),
        ("variability.csv", "gemm,residual,normal", ["cells"]),
        ("variability.csv", "gemm,residual,lognormal,sigma=1,x", ["two rows"]),
        ("efficiency.csv", "gemm,bf16,-1,0.5,0", ["`size`", "-1"]),
        ("efficiency.csv", "gemm,bf16,1e9,many,0", ["`efficiency`", "many"]),
        ("efficiency.csv", "gemm,bf16,1e+09,0.5,0", ["two rows of one size"]),
        ("source.toml", "nonsense = 1", ["nonsense"]),
    ],
)
def test_mistakes_in_a_profile(own_profile, file, line, parts):
    path = own_profile / "h100-sxm" / file
    if file == "source.toml":
        path.write_text(path.read_text().replace("who =", f"{line}\nwho ="))
    else:
        path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        load_kernels(load_cluster("dgx-h100", 1))
    message = _sentence(raised)
    for part in parts:
        assert part in message
    assert file in message


def test_constant_laws_have_no_parameters_to_override(own_profile):
    path = own_profile / "dgx-h100" / "variability.csv"
    rows = path.read_text().splitlines()
    rows = [row if ",network," not in row else ",network,constant,,for a test" for row in rows]
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(ValueError, match="`network` is constant here") as raised:
        load_job("gpt3-175b-h100-768", ("kernels.network.probability=0.1",))
    _sentence(raised)


def test_a_name_that_is_known_twice_is_listed_once():
    from prism_jax._misc import plural, unknown_name

    said = unknown_name("op", "gemn", ["gemm", "copy", "gemm"])
    assert said == "No op `gemn`; did you mean `gemm`? Known: copy, gemm."
    assert (plural(1, "row"), plural(0, "row")) == ("1 row", "0 rows")


def test_a_stall_has_a_rate_and_a_size(own_profile):
    path = own_profile / "dgx-h100" / "variability.csv"
    row = "all_gather,stall,lognormal,rate=1e-6;median_s=0.3;sigma=1,chosen for a test\n"
    path.write_text(path.read_text() + row)
    job = load_job("gpt3-175b-h100-768", ("kernels.all_gather.stall.rate=2e-6",))
    assert job.kernels is not None
    stall = job.kernels.find_variation("stall", "all_gather")
    assert stall is not None
    assert stall.parameters == {"rate": 2e-6, "median_s": 0.3, "sigma": 1.0}
    residual = job.kernels.find_variation("residual", "all_gather")
    assert residual is not None
    assert residual.parameters == {"sigma": 0.02}
