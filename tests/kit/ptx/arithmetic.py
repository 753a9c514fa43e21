"""Instructions of numbers: arithmetic, comparisons, choices and conversions."""

import re
from collections.abc import Callable

import numpy as np

from atoll.probe.interpreter import to_bf16
from atoll.probe.ptx import E4M3FN_AS_FP16, bit_mask
from tests.kit.ptx.matrix import widened
from tests.kit.ptx.parse import Instruction
from tests.kit.ptx.program import Program, unknown
from tests.kit.ptx.registers import BITS, VALUES

Values = np.ndarray

# They change nothing here: roundings that numpy has anyway, the low half that its products are, and approximations, for which the exact value stands.
_IDLE = {"rn", "approx", "full", "lo"}
_SMALLEST_NORMAL = np.float32(2.0**-126)

_FLOAT: dict[str, Callable[..., Values]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    # In float64 the product is exact, and the sum is rounded twice, which no bound here sees.
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    # NaN gives way to a number.
    "max": np.fmax,
    "min": np.fmin,
    "max.NaN": np.maximum,
    "min.NaN": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
}
_INTEGER: dict[str, Callable[..., Values]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "max": np.maximum,
    "max.relu": lambda a, b: np.maximum(np.maximum(a, b), 0),
    "min.relu": lambda a, b: np.maximum(np.minimum(a, b), 0),
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "bmsk.clamp": bit_mask,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "div": lambda a, b: _quotient(a, b),
    "rem": lambda a, b: a - _quotient(a, b) * b,
}
_COMPARISONS: dict[str, Callable[[Values, Values], Values]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}

ARITHMETIC = frozenset(name.split(".")[0] for name in (*_FLOAT, *_INTEGER))


def _quotient(a: Values, b: Values) -> Values:
    """Towards zero; of zero, which PTX leaves open, zero."""
    # The least number has no absolute value of its own width.
    over, under = (x.astype(np.int64) if x.itemsize < 8 else x for x in (a, np.where(b == 0, 1, b)))
    quotient = np.abs(over) // np.abs(under)
    return np.where(b == 0, 0, np.where((over < 0) != (under < 0), -quotient, quotient)).astype(a.dtype)


def compute(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    registers, kind = program.registers, instruction.type
    output, *inputs = instruction.operands
    modifiers = [modifier for modifier in instruction.modifiers[:-1] if modifier not in _IDLE]
    flush = "ftz" in modifiers
    name = ".".join([instruction.name, *(modifier for modifier in modifiers if modifier != "ftz")])
    if kind in ("s32", "u32", "s16", "u16") and name in ("mul.wide", "mad.wide", "mul.hi"):
        wide = np.int64 if kind[0] == "s" else np.uint64
        product = np.multiply(*(registers.values(operand, kind).astype(wide) for operand in inputs[:2]))
        num_bits = 8 * np.dtype(BITS[kind]).itemsize
        if name == "mul.hi":
            product >>= num_bits
        product = product.astype(f"{np.dtype(wide).kind}{num_bits // 8 if name == 'mul.hi' else num_bits // 4}")
        if name == "mad.wide":
            product = product + registers.read(inputs[2], f"b{2 * num_bits}").view(product.dtype)
        registers.write(output, product.view(f"u{product.itemsize}"), mask)
        return
    table = _FLOAT if kind == "f32" else _INTEGER
    if name not in table or kind not in VALUES or (flush and kind != "f32"):
        raise unknown(instruction)
    result = table[name](*(registers.values(operand, kind) for operand in inputs))
    if flush:
        result = np.where(np.abs(result) < _SMALLEST_NORMAL, np.copysign(np.float32(0), result), result)
    registers.write(output, result.astype(VALUES[kind]).view(BITS[kind]), mask)


def shift(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    """What is shifted out is gone, however far."""
    registers, kind = program.registers, instruction.type
    if instruction.modifiers != (kind,) or kind not in VALUES:
        raise unknown(instruction)
    output, operand, by = instruction.operands
    num_bits = 8 * np.dtype(BITS[kind]).itemsize
    amount = registers.read(by, "u32")
    signed = kind[0] == "s" and instruction.name == "shr"
    value = registers.values(operand, kind) if signed else registers.read(operand, kind)
    few = np.minimum(amount, num_bits - 1).astype(value.dtype)
    result = value << few if instruction.name == "shl" else value >> few
    registers.write(output, (result if signed else np.where(amount < num_bits, result, 0)).astype(value.dtype).view(BITS[kind]), mask)


def extract(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    """A field of bits."""
    (output, operand, position, length), kind = instruction.operands, instruction.type
    num_bits = 8 * np.dtype(BITS[kind]).itemsize
    known = instruction.text in ("bfe.u32", "bfe.s32", "bfe.u64", "bfe.s64") and position.isdigit() and length.isdigit()
    if not known or not 0 < int(length) <= num_bits - int(position):
        raise unknown(instruction)
    # To the top, and down again: a signed one is filled up with its first bit.
    field = program.registers.values(operand, kind) << (num_bits - int(position) - int(length)) >> (num_bits - int(length))
    program.registers.write(output, field.astype(VALUES[kind]).view(BITS[kind]), mask)


def compare(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    registers, kind = program.registers, instruction.type
    output, left, right, *further = instruction.operands
    comparison, *rest = [modifier for modifier in instruction.modifiers[:-1] if modifier != "ftz"]
    a, b = registers.values(left, kind), registers.values(right, kind)
    if kind == "f32":
        unordered = np.isnan(a) | np.isnan(b)
        if comparison in ("nan", "num"):
            result = unordered == (comparison == "nan")
        elif comparison.removesuffix("u") in _COMPARISONS:
            result = np.where(unordered, comparison.endswith("u"), _COMPARISONS[comparison.removesuffix("u")](a, b))
        else:
            raise unknown(instruction)
    elif comparison in _COMPARISONS:
        result = _COMPARISONS[comparison](a, b)
    else:
        raise unknown(instruction)
    if rest not in ([], ["and"], ["or"]) or bool(rest) != bool(further):
        raise unknown(instruction)
    if rest:
        with_ = registers.read(further[0], "pred")
        result = result & with_ if rest == ["and"] else result | with_
    registers.write(output, result, mask)


def choose(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    output, yes, no, by = instruction.operands
    registers, kind = program.registers, instruction.type
    registers.write(output, np.where(registers.read(by, "pred"), registers.read(yes, kind), registers.read(no, kind)), mask)


def permute(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    """Four of the eight bytes of two registers."""
    if instruction.text != "prmt.b32":
        raise unknown(instruction)
    output, *inputs = instruction.operands
    a, b, selector = (program.registers.read(operand, "b32") for operand in inputs)
    pieces = np.concatenate([np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in (a, b)], 1)
    chosen = selector[:, None] >> (4 * np.arange(4, dtype=np.uint32)) & 0xF
    if (chosen > 7).any():
        raise unknown(instruction)
    program.registers.write(output, np.take_along_axis(pieces, chosen.astype(np.int64), 1).reshape(-1).view(np.uint32), mask)


def convert(program: Program, instruction: Instruction, mask: np.ndarray | None) -> None:
    registers = program.registers
    output, *inputs = instruction.operands
    *how, to, source = instruction.modifiers
    words = set(how)
    if to in ("f16x2", "bf16x2") and source == "f32" and words == {"rn"}:
        high, low = (_narrowed(registers.values(operand, "f32"), to.removesuffix("x2")).astype(np.uint32) for operand in inputs)
        result = low | high << 16
    elif instruction.text == "cvt.rn.f16x2.e4m3x2":
        low, high = (E4M3FN_AS_FP16[byte].astype(np.uint32) for byte in registers.read(inputs[0], "b16").view(np.uint8).reshape(-1, 2).T)
        result = low | high << 16
    elif to in ("f16", "bf16") and source == "f32" and words == {"rn"}:
        result = _narrowed(registers.values(inputs[0], "f32"), to)
    elif to == "f32" and source in ("f16", "bf16") and not words:
        result = widened(registers.read(inputs[0], source), source).view(np.uint32)
    elif to == source == "f32" and words <= {"rpi", "ftz"} and "rpi" in words:
        result = np.ceil(registers.values(inputs[0], "f32")).view(np.uint32)
    elif to == "f32" and words == {"rn"} and re.fullmatch(r"[su](16|32|64)", source):
        result = registers.values(inputs[0], source).astype(np.float32).view(np.uint32)
    elif not words and all(re.fullmatch(r"[su](16|32|64)", kind) for kind in (to, source)):
        result = registers.values(inputs[0], source).astype(VALUES[to]).view(BITS[to])
    else:
        raise unknown(instruction)
    registers.write(output, result, mask)


def _narrowed(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 rounded to the nearest float16 or bfloat16, ties to even; there is one NaN."""
    rounded = values.astype(np.float16).view(np.uint16) if kind == "f16" else to_bf16(values)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)
