"""What is read of the form that JAX gives to a traced function: the names of its operations and of
their parameters, which change from version to version. No other file imports them or lists them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

# From 0.11 on, JAX has one class for both.
from jax.extend.core import (
    ClosedJaxpr as ClosedJaxpr,
    DebugInfo,
    Jaxpr as Jaxpr,
    JaxprEqn as JaxprEqn,
    Literal as Literal,
    jaxpr_as_fun,
)


Function = ClosedJaxpr | Jaxpr

# What is read of the operations that have parameters. One without one of these is not known ...
_READ = {
    "bitcast_convert_type": "new_dtype",
    "broadcast_in_dim": "broadcast_dimensions",
    "concatenate": "dimension",
    "cond": "branches",
    "convert_element_type": "new_dtype",
    "cumsum": "axis reverse",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "dot_general": "dimension_numbers",
    "dynamic_slice": "slice_sizes",
    "gather": "dimension_numbers fill_value mode slice_sizes",
    "integer_pow": "y",
    "iota": "dimension dtype",
    "jit": "jaxpr name",
    "pad": "padding_config",
    "reduce_precision": "exponent_bits mantissa_bits",
    "reduce_max": "axes",
    "reduce_min": "axes",
    "reduce_or": "axes",
    "reduce_sum": "axes",
    "remat2": "jaxpr",
    "round": "rounding_method",
    "scan": "jaxpr length reverse",
    "scatter": "dimension_numbers mode",
    "scatter-add": "dimension_numbers mode",
    "scatter-mul": "dimension_numbers mode",
    "slice": "limit_indices start_indices strides",
    "split": "axis sizes",
    "stack": "axis",
    "transpose": "permutation",
    "unstack": "axis",
    "while": "body_jaxpr body_nconsts cond_jaxpr cond_nconsts",
}
# ... nor is one with any others but these, which change no value: they say how XLA computes it, or
# how JAX differentiates it, or what follows from shapes as well.
_OTHERS = (
    "accuracy bwd compiler_options_kvs ctx_mesh differentiated dimensions donated_invars dtype"
    " ft_in ft_out fwd_jaxpr_thunk in_layouts in_shardings indices_are_sorted inline jvp_jaxpr_fun"
    " keep_unused memory_space new_sizes num_carry num_consts out_dtype out_layouts out_sharding"
    " out_shardings out_trees policy precision preferred_element_type prevent_cse shape sharding"
    " symbolic_zeros unique_indices unroll update_consts update_jaxpr weak_type"
)
_CHANGE_NOTHING = frozenset(_OTHERS.split())


def is_known(equation: JaxprEqn) -> bool:
    """Whether the parameters of an operation are those that this package knows."""
    if equation.primitive.name == "reshape" and equation.params.get("dimensions") is not None:
        return False  # It also transposes.
    read = {*_READ.get(equation.primitive.name, "").split()}
    return read <= equation.params.keys() and equation.params.keys() - read <= _CHANGE_NOTHING


class Inlined(NamedTuple):
    """A call of a function whose operations might as well stand in its place."""

    function: Function


class Whole(NamedTuple):
    """A call of a function that stays one operation, as it has a derivative of its own."""

    function: Function


class Columns(NamedTuple):
    """A call of a function of each column, as `by_columns` gives."""

    function: Function


class BranchCall(NamedTuple):
    """A call of that function whose number is the first argument."""

    functions: tuple[Function, ...]


class Scan(NamedTuple):
    """A loop over slices of the last arguments, from which it stacks the last results.

    **Attributes:**

    - `function`: of constants, what is carried and a slice.
    - `length`, `reverse`: how many slices, and whether the last comes first.
    - `num_consts`, `num_carry`: how many arguments are constants, and how many are carried.
    """

    function: Function
    length: int
    reverse: bool
    num_consts: int
    num_carry: int


class While(NamedTuple):
    """A loop while a condition holds: constants of the condition, those of the body, the carry."""

    condition: Function
    body: Function
    num_of_condition: int
    num_of_body: int


Call = Inlined | Whole | Columns | BranchCall | Scan | While

# The name that JAX has for what `by_columns` gives.
COLUMNS = "columns"


def call_of(equation: JaxprEqn) -> Call | None:
    """The functions that an operation calls and how, if it calls any and is known."""
    if not is_known(equation):
        return None
    params: Any = equation.params
    match equation.primitive.name:
        case "jit" if params["name"] == COLUMNS:
            return Columns(params["jaxpr"])
        case "jit" | "remat2":
            return Inlined(params["jaxpr"])
        case "custom_jvp_call" | "custom_vjp_call":
            return Whole(params["call_jaxpr"])
        case "cond":
            return BranchCall(params["branches"])
        case "while":
            counts = params["cond_nconsts"], params["body_nconsts"]
            return While(params["cond_jaxpr"], params["body_jaxpr"], *counts)
        case "scan":
            # Slices and what is stacked have an axis less within the function. JAX had numbers of
            # constants and carries until 0.10, and has trees of them since.
            function = params["jaxpr"]
            sliced = _lacking_an_axis(equation.invars, function.invars)
            num_carry = len(equation.outvars) - _lacking_an_axis(equation.outvars, function.outvars)
            num_consts = len(equation.invars) - sliced - num_carry
            return Scan(function, params["length"], params["reverse"], num_consts, num_carry)
    return None


def _lacking_an_axis(outside: Any, within: Any) -> int:
    pairs = zip(outside, within, strict=True)
    return sum(len(y.aval.shape) < len(x.aval.shape) for x, y in pairs)


def function_of(equation: JaxprEqn) -> Callable[..., list[Any]]:
    """An operation as a function of its arguments, which JAX evaluates and differentiates."""
    variables = [*dict.fromkeys(x for x in equation.invars if not isinstance(x, Literal))]
    debug_info = DebugInfo("host", equation.primitive.name, None, None)
    alone = Jaxpr([], variables, equation.outvars, [equation], debug_info=debug_info)
    of_variables = jaxpr_as_fun(ClosedJaxpr(alone, []))

    def of_args(*args):
        # Where a variable is given twice, the second has the derivatives of both.
        pairs = zip(equation.invars, args, strict=True)
        values = {var: x for var, x in pairs if not isinstance(var, Literal)}
        return of_variables(*values.values())

    return of_args
