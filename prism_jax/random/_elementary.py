"""Elementary functions that are cheaper than XLA's on a CPU: polynomials that vectorise.

Coefficients interpolate at Chebyshev nodes. In float32 errors are below 3e-7 of the value; in
float64 the library's functions are used where there are any.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


# log(1 + t) / t between sqrt(1/2) - 1 and sqrt(2) - 1, from the constant up.
_LOG = (
    0.99999994039535522,
    -0.50000375509262085,
    0.33334606885910034,
    -0.24968907237052917,
    0.19913348555564880,
    -0.17278206348419189,
    0.16126248240470886,
    -0.098953507840633392,
)
# (exp(x) - 1) / x between -log(2) / 2 and log(2) / 2, so that exp(0) is 1.
_EXP = (
    1.0,
    0.4999937209211393,
    0.16666577018961287,
    0.0418756521988861,
    0.008363174179929484,
)
# sin(pi s) / s in s^2 up to 1/4.
_SIN = {
    32: (
        3.141592640077202,
        -5.16771007666818,
        2.5500773865265396,
        -0.5982904112689449,
        0.07765591224733671,
    ),
    64: (
        3.1415926535897976,
        -5.167712780052046,
        2.55016404004661,
        -0.5992645348544159,
        0.08214598004979053,
        -0.007371335283096414,
        0.00047150868922472003,
        -3.9499998092651356e-05,
        3.2901763916015625e-05,
        -2.44140625e-05,
    ),
}
# cos(pi s) in s^2 up to 1/4.
_COS = {
    32: (
        0.9999999530275124,
        -4.934792802489462,
        4.058410790762693,
        -1.3318729727882108,
        0.21968242357693846,
    ),
    64: (
        1.0,
        -4.934802200544679,
        4.058712126416768,
        -1.3352627688545549,
        0.235330630357995,
        -0.025806891376592964,
        0.0019295741872812349,
        -0.00010463741681752138,
        4.300724172734847e-06,
        -1.34352129509532e-07,
    ),
}
_WHOLE = np.float32(1.5 * 2**23)
_SQRT_HALF = np.uint32(0x3F3504F3)  # The bits of sqrt(1/2) in float32.


def _polynomial(coefficients, x):
    value = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + x.dtype.type(coefficient)
    return value


def log(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The natural logarithm of a positive normal number. Not differentiable in float32."""
    if x.dtype != jnp.float32:
        return jnp.log(x)
    shifted = lax.bitcast_convert_type(x, jnp.uint32) - _SQRT_HALF
    exponent = lax.bitcast_convert_type(shifted, jnp.int32) >> np.int32(23)
    mantissa = (shifted & np.uint32(0x7FFFFF)) + _SQRT_HALF
    t = lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(1)
    return exponent.astype(jnp.float32) * np.float32(np.log(2)) + t * _polynomial(_LOG, t)


@jax.custom_jvp
def exp(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The exponential. Beyond +-87 in float32 it stays what it is there. Differentiable."""
    if x.dtype != jnp.float32:
        return jnp.exp(x)
    x = jnp.clip(x, -87, 87)
    # To the nearest whole number, which is in the last bits of a sum with 1.5 * 2^23.
    whole = lax.bitcast_convert_type(x * np.float32(1 / np.log(2)) + _WHOLE, jnp.int32)
    powers = (whole - _WHOLE.view(np.int32)).astype(jnp.float32)
    # log(2) in two parts, of which the first has few bits: whole * log(2) keeps all of its own.
    remainder = (x - powers * np.float32(0.693359375)) - powers * np.float32(-2.12194440e-4)
    bits = lax.bitcast_convert_type(1 + remainder * _polynomial(_EXP, remainder), jnp.int32)
    return lax.bitcast_convert_type(bits + (whole << np.int32(23)), jnp.float32)


exp.defjvps(lambda tangent, value, x: tangent * value)


def sin_half_turns(s: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`sin(pi s)` for `s` between -1/2 and 1/2."""
    return s * _polynomial(_SIN[64 if s.dtype == jnp.float64 else 32], s * s)


def cos_half_turns(s: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`cos(pi s)` for `s` between -1/2 and 1/2."""
    return _polynomial(_COS[64 if s.dtype == jnp.float64 else 32], s * s)
