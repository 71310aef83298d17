"""The instructions of a GPU's kernel, run on a CPU: each as a statement of C.

For kernels without shared memory and barriers, whose threads can run one after the other. What a
GPU rounds to a unit in the last place, such as `div.full`, is rounded correctly here.

    python -m tests.ptx          # prints by program how far ends are from those of the loops of XLA
"""

import ctypes
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import numpy as np


# Of an instruction, with its operands as numbers. Registers hold bits: `F` reads them as a float,
# and `U` is the way back.
_STATEMENTS = {
    "add.s32": "{0} = {1} + {2}",
    "sub.s32": "{0} = {1} - {2}",
    "and.b32": "{0} = {1} & {2}",
    "or.b32": "{0} = {1} | {2}",
    "xor.b32": "{0} = {1} ^ {2}",
    "shl.b32": "{0} = {1} << {2}",
    "shr.u32": "{0} = {1} >> {2}",
    "shr.s32": "{0} = (int32_t){1} >> {2}",
    "not.b32": "{0} = ~{1}",
    "mul.lo.s32": "{0} = {1} * {2}",
    "mad.lo.s32": "{0} = {1} * {2} + {3}",
    "mul.wide.s32": "{0} = (int64_t)(int32_t){1} * (int32_t){2}",
    "mul.wide.u32": "{0} = (uint64_t)(uint32_t){1} * (uint32_t){2}",
    "add.s64": "{0} = {1} + {2}",
    "or.b64": "{0} = {1} | {2}",
    "shl.b64": "{0} = {1} << {2}",
    "cvt.u32.u64": "{0} = (uint32_t){1}",
    "cvt.s64.s32": "{0} = (int64_t)(int32_t){1}",
    "cvt.u64.u32": "{0} = (uint32_t){1}",
    "max.s32": "{0} = (int32_t){1} > (int32_t){2} ? {1} : {2}",
    "min.s32": "{0} = (int32_t){1} < (int32_t){2} ? {1} : {2}",
    "shf.l.wrap.b32": "{0} = {3} ? ({2} << {3}) | ({1} >> (32 - {3})) : {2}",
    "bfe.u32": "{0} = ({1} >> {2}) & ((1u << {3}) - 1)",
    "selp.b16": "{0} = {3} ? {1} : {2}",
    "and.b16": "{0} = {1} & {2}",
    "or.b16": "{0} = {1} | {2}",
    "xor.b16": "{0} = {1} ^ {2}",
    "shl.b16": "{0} = {1} << {2}",
    "shr.u16": "{0} = {1} >> {2}",
    "mov.b16": "{0} = {1}",
    "mov.u16": "{0} = {1}",
    "cvt.u16.u32": "{0} = (uint16_t){1}",
    "cvt.u32.u16": "{0} = (uint32_t)(uint16_t){1}",
    "mov.b32": "{0} = {1}",
    "mov.u32": "{0} = {1}",
    "both": "{0} = {1} | (uint32_t){2} << 16",
    "halves": "{{ {0} = (uint16_t){2}; {1} = {2} >> 16; }}",
    "mov.b64": "{0} = {1}",
    "mov.pred": "{0} = {1}",
    "and.pred": "{0} = {1} && {2}",
    "or.pred": "{0} = {1} || {2}",
    "not.pred": "{0} = !{1}",
    "selp.b32": "{0} = {3} ? {1} : {2}",
    "selp.f32": "{0} = {3} ? {1} : {2}",
    "add.rn.f32": "{0} = U(F({1}) + F({2}))",
    "sub.rn.f32": "{0} = U(F({1}) - F({2}))",
    "mul.rn.f32": "{0} = U(F({1}) * F({2}))",
    "fma.rn.f32": "{0} = U(fmaf(F({1}), F({2}), F({3})))",
    "div.full.f32": "{0} = U(F({1}) / F({2}))",
    "sqrt.approx.f32": "{0} = U(sqrtf(F({1})))",
    "sqrt.rn.f32": "{0} = U(sqrtf(F({1})))",
    "neg.s32": "{0} = -{1}",
    "neg.f32": "{0} = U(-F({1}))",
    "max.f32": "{0} = U(fmaxf(F({1}), F({2})))",
    "min.f32": "{0} = U(fminf(F({1}), F({2})))",
    "max.NaN.f32": "{0} = U(maxnan(F({1}), F({2})))",
    "min.NaN.f32": "{0} = U(minnan(F({1}), F({2})))",
    "cvt.rn.f32.s32": "{0} = U((float)(int32_t){1})",
    "cvt.rn.f32.u32": "{0} = U((float)(uint32_t){1})",
    "cvt.rmi.f32.f32": "{0} = U(floorf(F({1})))",
    "cvt.rni.f32.f32": "{0} = U(rintf(F({1})))",
    "cvt.rzi.s32.f32": "{0} = toint(F({1}))",
    "cvta.to.global.u64": "{0} = {1}",
    "griddepcontrol.wait": "",
    "griddepcontrol.launch_dependents": "",
    "ret": "return",
}
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SIGNS |= {"equ": "==", "neu": "!="}
_CASTS = {"b32": "(uint32_t)", "u32": "(uint32_t)", "s32": "(int32_t)", "f32": "F"}
_CASTS |= {"b16": "(uint16_t)", "u16": "(uint16_t)", "s16": "(int16_t)"}
_TYPES = {"pred": "int", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t"}
_SPECIAL = {"tid": "tid", "ctaid": "cta", "ntid": "ntid", "nctaid": "ncta"}
_HEAD = """
#include <math.h>
#include <stdint.h>
#include <string.h>
static inline float F(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
static inline uint32_t U(float f) { uint32_t x; memcpy(&x, &f, 4); return x; }
static inline float maxnan(float a, float b) { return isnan(a) || isnan(b) ? NAN : fmaxf(a, b); }
static inline float minnan(float a, float b) { return isnan(a) || isnan(b) ? NAN : fminf(a, b); }
static inline uint32_t toint(float f) {
  return isnan(f) ? 0 : f >= 2147483648.f ? 2147483647 : f < -2147483648.f ? 0x80000000u
    : (uint32_t)(int32_t)f;
}
static void thread(char **args, uint32_t tid0, uint32_t cta0) {
const uint32_t ntid0 = THREADS; (void)ntid0; (void)cta0;
"""
_TAIL = """
}
void run(char **args, uint32_t blocks) {
  for (uint32_t b = 0; b < blocks; b++)
    for (uint32_t t = 0; t < THREADS; t++) thread(args, t, b);
}
"""


def run_kernel(text: str, name: str, arrays: Sequence[np.ndarray], blocks: int) -> None:
    """Runs a kernel of some PTX on a grid of blocks: arrays, as its parameters, are written in
    place.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, library = (pathlib.Path(folder) / file for file in ("kernel.c", "kernel.so"))
        source.write_text(in_c(text, name))
        flags = ["-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
        subprocess.run(["gcc", *flags, str(source), "-o", str(library), "-lm"], check=True)
        pointers = (ctypes.c_void_p * len(arrays))(*[x.ctypes.data for x in arrays])
        ctypes.CDLL(str(library)).run(pointers, blocks)


def in_c(text: str, name: str) -> str:
    """A kernel in C."""
    threads = re.search(rf"\.entry {name}\(.*?\.reqntid (\d+)", text, re.S)[1]
    kernel = _HEAD + "\n".join(map(_statement, lines_of(text, name))) + _TAIL
    return kernel.replace("THREADS", threads)


def lines_of(text: str, name: str) -> list[str]:
    """The declarations of a kernel, which begin with a dot, its labels and its instructions."""
    body = text[text.index(f".entry {name}(") :]
    body = body[body.index("{") + 1 :].split("\n}")[0]
    body = "\n".join(line.split("//")[0] for line in body.splitlines())
    # Inline assembly has several instructions to a line.
    lines = (" ".join(line.split()) for line in body.replace(":\n", ":;\n").split(";"))
    return [line for line in lines if line and not line.startswith((".loc", ".file"))]


def _statement(line: str) -> str:
    if register := re.match(r"\.reg \.(\w+) %(\w+)<(\d+)>", line):
        names = ", ".join(f"{register[2]}{i}" for i in range(int(register[3])))
        return f"{_TYPES[register[1]]} {names};"
    if label := re.match(r"\$(\w+):", line):
        return f"{label[1]}:;"
    guard = ""
    if guarded := re.match(r"@(!?)%(p\d+) (.*)", line):
        guard, line = f"if ({guarded[1]}{guarded[2]}) ", guarded[3]
    op, _, after = line.partition(" ")
    if op.startswith("bra"):
        return f"{guard}goto {after.strip('$ ')};"
    if op.startswith("ld.param"):
        target, number = re.match(r"%(\w+), \[\w+_param_(\d+)\]", after).groups()
        return f"{target} = (uint64_t)args[{number}];"
    if memory := re.match(r"(ld|st)\.global(?:\.nc)?(?:\.\w+?)*?(?:\.v\d)?\.b(8|16|32|64)$", op):
        return guard + "{ " + _moved(memory[1], memory[2], after) + " }"
    operands = [_operand(x) for x in after.split(",")] if after else []
    if compared := re.fullmatch(r"setp\.(\w+)\.([bsuf]\d+)", op):
        a, b = (f"{_CASTS[compared[2]]}({x})" for x in operands[1:])
        if compared[1] == "nan":
            return f"{guard}{operands[0]} = isnan({a}) || isnan({b});"
        return f"{guard}{operands[0]} = {a} {_SIGNS[compared[1]]} {b};"
    if op == "mov.b32" and len(operands) == 3:  # Two halves to a register, or out of one.
        op = "halves" if after.startswith("{") else "both"
    if op not in _STATEMENTS:
        raise NotImplementedError(line)
    return guard + _STATEMENTS[op].format(*operands) + ";"


def _moved(kind: str, bits: str, after: str) -> str:
    """Values from or to memory, one after the other."""
    place, offset = re.search(r"\[ *%(\w+)(?: *\+ *(-?\d+))? *\]", after).groups()
    values = re.sub(r"\[.*?\]", "", after).strip(" ,{}").split(",")
    pairs = [
        (_operand(x), f"((uint{bits}_t*)({place} + {int(offset or 0)}))[{i}]")
        for i, x in enumerate(values)
    ]
    return " ".join(f"{x} = {at};" if kind == "ld" else f"{at} = {x};" for x, at in pairs)


def _operand(text: str) -> str:
    text = text.strip(" {}")
    if text.startswith("0f"):
        return f"0x{text[2:]}u"
    if special := re.fullmatch(r"%(\w+)\.([xyz])", text):
        return f"{_SPECIAL[special[1]]}{'xyz'.index(special[2])}"
    return text[1:] if text.startswith("%") else f"({text})"


def main() -> None:
    """A JSON object: by program, the largest relative difference and the share of equal choices;
    and the largest difference of derivatives, relative to the largest of their table.
    """
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))
    import compile_for

    compile_for.prepare_jax()
    import jax

    from prism_jax.maxplus import _grid
    from prism_jax.maxplus._kernel import one_kernel
    from prism_jax.maxplus._kernel_back import one_kernel_back

    from .test_kernel import BACK, PROGRAMS, latencies_of, loops, loops_back, paths_of

    device = compile_for.device_for("h200")[1]
    pallas_call = _grid.pallas.pallas_call

    def translated(kernel, *, interpret, name, grid, out_shape, **options):
        """A kernel that runs by its instructions."""
        options |= {"name": name, "grid": grid, "out_shape": out_shape}

        def run(*leaves):
            arrays = [np.array(x) for x in leaves]
            # A kernel must not count on zeros.
            results = [np.ones(x.shape, x.dtype) for x in out_shape]
            text = _ptx(pallas_call(kernel, **options), name, arrays, device)
            run_kernel(text, name, [*arrays, *results], *grid)
            return results

        return run

    _grid.pallas.pallas_call = translated

    def apart(a, b):
        a, b = np.asarray(a), np.asarray(b)
        return float(np.max(np.abs(a - b)) / max(np.abs(b).max(), 1e-30))

    differences = {}
    for name, make in PROGRAMS.items():
        args = latencies_of(make())
        ends, (choices, choice) = loops(*args)
        by_kernel, (choices_by_kernel, choice_by_kernel) = one_kernel(
            *args, keep=True, interpret=False
        )
        number = int(args[3].num_levels)
        pairs = (choices_by_kernel[:number], choices[:number]), (choice_by_kernel, choice)
        row = {"ends": apart(by_kernel, ends)}
        row["choices"] = min(float(np.mean(a == b)) for a, b in pairs)
        if name in BACK:
            args = paths_of(make())
            derivatives = one_kernel_back(*args, interpret=False), loops_back(*args)
            row["derivatives"] = max(map(apart, *map(jax.tree.leaves, derivatives)))
        differences[name] = row
    print(json.dumps(differences))


def _ptx(function, name: str, arrays, device) -> str:
    """What a function of one kernel is compiled to."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from prism_jax import _devices

    here, _devices.platform = _devices.platform, lambda: "gpu"
    there = SingleDeviceSharding(device)
    with tempfile.TemporaryDirectory() as folder:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        call = jax.jit(function, in_shardings=there, out_shardings=there)
        call.lower(*shapes).compile(compiler_options={"xla_dump_to": folder})
        _devices.platform = here
        texts = [file.read_text() for file in pathlib.Path(folder).glob("*.ptx")]
    return next(text for text in texts if f".entry {name}(" in text)


if __name__ == "__main__":
    main()
