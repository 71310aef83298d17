"""Functions evaluated on the host equal what XLA makes of them, and compile nothing."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from prism_jax.host import _equations, _on_host, _pull_back, by_columns, on_host, vjp_on_host
from prism_jax.host._operations import OPERATIONS
from prism_jax.latency import Gamma, Weibull
from prism_jax.program import Variability
from prism_jax.replica import gradients_of, make_plan
from prism_jax.schedule import OneFOneB

from .helpers import by_numpy, compilations, lognormal, pipeline_program


_MATRIX = np.random.default_rng(0).normal(size=(4, 5))


def _pads(x):
    return lax.pad(x, jnp.asarray(2.0, x.dtype), ((1, 2, 1), (-1, -2, 2)))


def _gathers(x):
    rows = jnp.array([3, 0, 7, -2])
    kept = x.at[rows].get(mode="fill", fill_value=9), x.at[rows].get(mode="clip")
    return *kept, x[jnp.array([0, 1]), 1:4], jnp.take_along_axis(x, rows[:, None] % 4, axis=1)


def _scatters(x):
    rows = jnp.array([3, 0, 3, 9])
    few, many = x.at[rows, 2].add(1.5), x.at[rows[:3]].multiply(2.0, mode="drop")
    return few, many, x.at[1].set(0.0), jax.grad(lambda x: jnp.sum(x[rows] ** 3))(x)


def _slices(x):
    moved = lax.dynamic_update_slice(x, x[:2, :2], (jnp.int32(3), jnp.int32(-1)))
    cut = lax.dynamic_slice(x, (jnp.int32(2), jnp.int32(9)), (2, 3))
    return moved, cut, lax.slice(x, (0, 1), (4, 5), (2, 3)), lax.rev(x, (1,))


def _loops(x):
    def body(carry, row):
        return carry * 0.5 + row, jnp.sum(carry * row)

    def more(i, y):
        return 1.5 * y + i

    # Loops of one body.
    forward, backward = lax.scan(body, x[0], x), lax.scan(body, x[0], x, reverse=True)
    few, many = lax.fori_loop(0, 3, more, x), lax.fori_loop(0, 5, more, x)
    doubled = lax.while_loop(lambda y: jnp.sum(y) < 50, lambda y: 2 * y, jnp.abs(x[0]))
    each = jax.vmap(lambda y: lax.while_loop(lambda y: jnp.sum(y) < 50, lambda y: 2 * y, y))
    branch = lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
    loops = forward, backward, few, many, doubled, each(jnp.abs(x))
    return *loops, branch, lax.scan(body, x[0], x[:0])


def _draws(x):
    key = lax.fori_loop(0, 3, lambda i, key: jax.random.split(key)[0], jax.random.key(7))
    return x + jax.random.normal(key, x.shape, x.dtype)


def _sums(x):
    y = jnp.stack([x, x + 1], axis=1)
    return (
        jnp.cumsum(x, axis=1),
        lax.cumsum(x, axis=0, reverse=True),
        lax.cumprod(x, axis=0),
        jnp.max(y, axis=(0, 1)),
        jnp.einsum("abc,dbc->cad", y, y),
        jnp.any(x > 1, axis=0),
    )


def _whole_numbers(x):
    n = jnp.arange(-7, 8, dtype=jnp.int32)
    x = jnp.concatenate([x, jnp.round(x + 0.5) - 0.5])  # Halves, which round to even numbers.
    x = jnp.concatenate([x, jnp.round(x), lax.round(x)])
    mantissa, exponent = jnp.frexp(x)
    return lax.div(n, jnp.full_like(n, 3)), lax.rem(n, jnp.full_like(n, 4)), mantissa, exponent


def _special(x):
    x = jnp.abs(x) + 0.5
    special = jax.scipy.special
    shapes = special.gammainc(x, 2 * x), special.gammaln(x)
    return *shapes, special.ndtri(x / 5), special.log_ndtr(-9 * x), lax.sort(x)


def _in_another_form(x):
    columns_first = lax.reshape(x, (20,), dimensions=(1, 0))
    return columns_first, lax.reduce_precision(jnp.exp(9 * x), 5, 10), lax.reduce_precision(x, 8, 9)


_FUNCTIONS = [
    _pads, _gathers, _scatters, _slices, _loops, _draws, _sums, _whole_numbers, _special,
    _in_another_form,
]  # fmt: skip


@pytest.mark.parametrize("function", _FUNCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_on_the_host_equal_compiled_values(function, dtype):
    x = jnp.asarray(_MATRIX, dtype)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    try:
        found, compiled = on_host(function, x), jax.jit(function)(x)
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "strict")
    tolerance = 2e-5 if dtype == np.float32 else 1e-10
    for mine, whole in zip(jax.tree.leaves(found), jax.tree.leaves(compiled), strict=True):
        assert mine.dtype == whole.dtype
        np.testing.assert_allclose(mine, whole, rtol=tolerance, atol=tolerance)


def _scans(x):
    def body(carry, row):
        return carry * 0.5 + jnp.sin(row), jnp.sum(carry * row)

    backward = lax.scan(body, x[0], x, reverse=True)
    apart = lax.map(jax.checkpoint(lambda row: jnp.exp(row) * x[0]), x)
    return backward, apart, lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), lax.scan(body, x[0], x[:0])


def _elements(x):
    y = jnp.abs(x) + 0.5
    powers = y**-3, y**x, jnp.sqrt(y), jnp.cbrt(y), x / y, x[:, :1] * y, 2 * y, -y, jnp.square(x)
    logs = jnp.log(y), jnp.log1p(y), jnp.expm1(x), jnp.floor(x) * x, lax.sign(x) * x
    bounds = (
        jnp.clip(x, -0.5, 0.5),
        jnp.maximum(x, x[:1]),
        jnp.minimum(x, 0.1),
        jnp.where(x > 0, y, x),
    )
    clamped = lax.clamp(0.3 * x, x, 0.5 * y), jnp.abs(jnp.round(x)), jnp.round(x) ** 0 * x
    return *powers, *logs, *bounds, *clamped, lax.stop_gradient(x) * x


def _laws(x):
    y = jnp.abs(x) + 0.5
    special = jax.scipy.special
    normal = special.erf(x), special.erfc(x), special.ndtri(y / 5), special.log_ndtr(-9 * y)
    return *normal, special.gammaln(y), special.gammainc(y, 2 * y), special.digamma(y)


def _shapes(x):
    a, b = jnp.split(x, np.array([2]), axis=1)
    joined = jnp.concatenate([b, a], axis=1), jnp.stack([x, 2 * x], axis=1), x.T, x.reshape(2, -1)
    least = jnp.min(x, axis=1), jnp.sum(x[:, None] * x[None], axis=(0, 2))
    return *joined, *least, *(row * 2 for row in x)


@by_columns
def _two_of_each(column):
    return jnp.stack([jnp.sum(column**2), column[0] * column[1]])


@jax.custom_jvp
def _own(x):
    return 3 * x


_own.defjvp(lambda x, dx: (_own(*x), 5 * dx[0]))


@jax.custom_vjp
def _own_back(x):
    return 3 * x


_own_back.defvjp(lambda x: (_own_back(x), None), lambda _, g: (7 * g,))


def _kinds(x):
    """Each operation whose parameters are read."""
    turns = lax.while_loop(lambda n: n < 5, lambda n: n + 2, jnp.int32(0))
    bits = lax.bitcast_convert_type(jnp.exp(x[0]), jnp.int64) >> 50
    counted = turns.astype(x.dtype) + bits.astype(x.dtype) * jnp.arange(5, dtype=x.dtype)
    rows = jnp.array([2, 0, 9])
    scattered = x.at[rows].multiply(x[0, 0], unique_indices=True).at[rows].add(x[1])
    scattered = scattered.at[:2, 1].set(x[2, :2])
    taken = x.at[rows].get(mode="fill", fill_value=0) * x[:3]
    waves = jnp.fft.fft(lax.complex(jnp.cos(x), jnp.sin(x)) @ x.astype(complex).T, axis=0)
    a, b = jnp.split(x, [2], axis=1)
    joined = jnp.concatenate([b, a], axis=1), jnp.stack([x, lax.reduce_precision(x, 11, 30)])
    reduced = (
        jnp.max(x, axis=1) - jnp.min(x, axis=1),
        jnp.where(jnp.any(x > 2, axis=1)[:, None], x, 0),
    )
    own = _own(x), _own_back(x), lax.map(jax.checkpoint(jnp.exp), x), lax.scan(_add, x[0], x)
    moved = lax.dynamic_slice(x, (turns, turns), (1, 2)), _pads(x), jnp.round(x) + x**3
    branch = lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
    sums = jnp.cumsum(x, axis=0), jnp.real(jnp.cumsum(waves, axis=1)), sum(jnp.unstack(x))
    return (
        counted,
        scattered,
        taken,
        *joined,
        *reduced,
        *own,
        *moved,
        branch,
        *sums,
        _two_of_each(x),
    )


def _add(carry, row):
    return carry + row, carry * row


_DIFFERENTIABLE = [
    _kinds, _pads, _gathers, _scatters, _slices, _scans, _sums, _elements, _laws, _shapes,
    _two_of_each,
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "figures"), [*((f, 3) for f in _DIFFERENTIABLE), (_two_of_each, 1)]
)
def test_backward_as_jax(function, figures):
    x, rng = jnp.asarray(_MATRIX), np.random.default_rng(1)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    try:
        found, backward = vjp_on_host(function, x)
        of_found = jax.tree.map(lambda y: rng.normal(size=(figures, *y.shape)), found)
        (expected,) = jax.jit(lambda g: jax.vmap(jax.vjp(function, x)[1])(g))(of_found)
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "strict")
    np.testing.assert_allclose(backward(of_found), expected, rtol=1e-9, atol=1e-9)


def _names_in(function) -> set[str]:
    """The operations of a traced function and of those that it calls."""
    found = set()
    for equation in function.eqns:
        found.add(equation.primitive.name)
        for part in jax.tree.leaves(list(equation.params.values())):
            found |= _names_in(part) if hasattr(part, "eqns") else set()
    return found


_CALLS = ["cond", "custom_jvp_call", "custom_vjp_call", "jit", "remat2", "scan", "while"]
_OTHERS = [*OPERATIONS.keys() & {"add", "exp", "mul", "select_n", *_equations._READ}]


@pytest.fixture(scope="module")
def kinds():
    """What `_kinds` gives, and derivatives."""
    x = jnp.asarray(_MATRIX)
    values, backward = vjp_on_host(_kinds, x)
    rng = np.random.default_rng(1)
    of_values = jax.tree.map(lambda y: rng.normal(size=(2, *y.shape)), values)
    return x, values, of_values, backward(of_values)


def _forget():
    for known in (_on_host.flat, _pull_back._read_on_the_way_back, _on_host._calls):
        known.clear() if isinstance(known, dict) else known.cache_clear()


def test_a_call_computes_only_what_differs_from_the_one_before(monkeypatch):
    """With the bits of a call by itself."""
    laws = Variability(residual={"gemm": lognormal(0.05)}, step=lognormal(0.01))
    program = pipeline_program(OneFOneB(2, 4), variability=laws)
    leaves, structure = jax.tree.flatten(program)
    evaluate, computed = _on_host._evaluate_into, []

    def counted(values, operation):
        computed.append(operation)
        evaluate(values, operation)

    monkeypatch.setattr(_on_host, "_evaluate_into", counted)
    numbers = []
    make_plan(program)
    computed.clear()
    for place, leaf in enumerate(leaves):
        if eqx.is_inexact_array(leaf):
            changed = jax.tree.unflatten(
                structure, [*leaves[:place], 1.1 * leaf, *leaves[place:][1:]]
            )
            tables, few = make_plan(changed).tables, len(computed)
            _on_host._last_calls.clear()
            computed.clear()
            assert eqx.tree_equal(tables, make_plan(changed).tables)
            numbers.append(few / len(computed))
            computed.clear()
            make_plan(program)
            computed.clear()
    assert min(numbers) < 0.2


def test_a_call_keeps_large_constants_and_sees_numbers_that_were_changed_in_place():
    table = np.arange(2 * _on_host._LARGE) % 2

    def chosen(counts):
        return jnp.sum(jnp.where(table > 0, counts[0], 0)) + counts[1]

    def stacked(counts, more):
        return counts.reshape(3, 1) + more

    counts = np.arange(3)
    before = counts.copy()
    on_host(stacked, before, np.array([[1]]))
    before[:] = 99
    assert on_host(stacked, counts, np.array([[2]])).ravel().tolist() == [2, 3, 4]
    for first in (1, 5, 5, 7):
        counts[:2] = first, first + 1
        assert on_host(chosen, counts) == first * table.sum() + first + 1


@pytest.mark.parametrize("names", [_CALLS, pytest.param(_OTHERS, marks=pytest.mark.slow)])
def test_what_jax_renames_or_adds_it_evaluates_itself(monkeypatch, kinds, names):
    """An operation that is not known, or one that has a parameter of another name."""
    x, values, of_values, of_x = kinds

    def check():
        _forget()
        found, backward = vjp_on_host(_kinds, x)
        for y, z in zip(jax.tree.leaves(found), jax.tree.leaves(values), strict=True):
            np.testing.assert_allclose(y, z, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(backward(of_values), of_x, rtol=1e-6, atol=1e-12)

    for name in names:
        for parameter in _equations._READ.get(name, "").split():
            with monkeypatch.context() as patch:
                others = _equations._READ[name].replace(parameter, "other")
                patch.setitem(_equations._READ, name, others)
                check()
        with monkeypatch.context() as patch:
            patch.delitem(_equations._READ, name, raising=False)
            patch.delitem(OPERATIONS, name, raising=False)
            check()
    _forget()


def test_what_cannot_be_read_jax_evaluates_itself(monkeypatch):
    """As where the functions of a loop stand in another form."""

    def unreadable(equation):
        raise AttributeError(equation)

    x = _MATRIX[:, 0].astype(np.float32)
    monkeypatch.setattr(_on_host, "call_of", unreadable)
    _forget()
    values, backward = vjp_on_host(_two_and_one, jnp.asarray(x))
    assert [y.dtype for y in values] == [jnp.float32, jnp.int32]
    np.testing.assert_allclose(values[0], np.exp(x) * x[1], rtol=1e-6)
    of_values = np.ones((1, 4)), np.zeros((1,))
    expected = np.exp(x) * x[1] + np.eye(4)[1] * np.sum(np.exp(x))
    np.testing.assert_allclose(backward(of_values)[0], expected, rtol=1e-6)
    np.testing.assert_allclose(on_host(_two_and_one, jnp.asarray(x))[0], values[0], rtol=1e-6)
    _forget()


def _two_and_one(x):
    return jnp.exp(x) * x[1], jnp.argmax(x).astype(jnp.int32)


def test_single_precision_is_rounded_once():
    x = jnp.asarray(_MATRIX[0], jnp.float32)

    large = jnp.asarray(2.0**20, jnp.float32)

    def cancels(x, large):
        return (large + x) - large

    assert np.array_equal(on_host(cancels, x, large), x)
    assert not np.array_equal(cancels(x, large), x)


def test_constants_are_in_double_precision_whatever_jax_is_set_to():
    tenth = np.float32(0.1)

    def from_a_tenth(x):
        return x - 0.1

    with jax.enable_x64(False):
        found = on_host(from_a_tenth, tenth)
    assert found == np.float32(float(tenth) - 0.1)
    assert found.dtype == np.float32


def test_a_function_may_fix_its_dtype():
    def clipped(x):
        return jax.lax.min(x, jnp.full(x.shape, 0.5, jnp.float32))

    x = np.asarray(_MATRIX[0], np.float32)
    with jax.enable_x64(False):
        np.testing.assert_array_equal(on_host(clipped, x), np.minimum(x, np.float32(0.5)))


def test_a_traced_argument_is_traced_on():
    square = jax.jit(lambda x: on_host(jnp.square, x))
    assert square(jnp.asarray(3.0)) == 9
    assert jax.grad(lambda x: on_host(jnp.square, x))(jnp.asarray(3.0)) == 6


def test_another_set_of_laws_compiles_nothing():
    one = make_plan(pipeline_program(OneFOneB(2, 4), num_replicas=4))
    rank, step = lognormal(0.01), lognormal(0.02)
    families = Gamma(1.0, 0.1), Weibull(1.0, 9.0)
    with compilations() as compiled:
        for law in families:
            variability = Variability(residual={"gemm": law}, rank=rank, step=step)
            program = pipeline_program(OneFOneB(2, 4), variability=variability, num_replicas=4)
            assert make_plan(program).tables.step is not None
    assert one.tables.step is None
    assert not compiled


def test_derivatives_of_tables():
    """Those of the host are JAX's, of a program that is traced; without compiling them."""
    laws = {"residual": {"gemm": Gamma(1.0, 0.1)}, "rank": lognormal(0.01), "step": lognormal(0.02)}
    program = pipeline_program(OneFOneB(2, 4), variability=Variability(**laws), num_replicas=4)

    def weighed(program, weights):
        found = make_plan(program).tables
        parts = jax.tree.map(lambda w, x: jnp.sum(jnp.asarray(w, x.dtype) * x), weights, found)
        return sum(jax.tree.leaves(parts))

    parameters, rest = eqx.partition(program, eqx.is_inexact_array)

    def of_parameters(parameters, weights):
        return weighed(eqx.combine(parameters, rest), weights)

    traced = by_numpy(lambda *args: eqx.filter_grad(of_parameters)(*args))
    tables, rng = make_plan(program).tables, np.random.default_rng(0)
    for _ in range(2):
        weights = jax.tree.map(lambda x: rng.normal(size=x.shape), tables)
        rows = gradients_of(program, jax.tree.map(lambda x: x[None], weights))
        mine = jax.tree.map(lambda x: x[0], rows)
        whole = traced(parameters, weights)
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)
