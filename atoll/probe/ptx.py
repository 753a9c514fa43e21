"""A reader of the few PTX instructions that our Gluon kernels write inline.

Registers are NumPy arrays of unsigned integers, a lane for each run of the text. An instruction that is not known is an error that names it.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from atoll.probe.gluon_values import NotInterpretedError
from atoll.probe.interpreter import E4M3FN
from atoll.probe.watch import watch

_REGISTER_BITS = {"h": 16, "r": 32, "l": 64}
_DECLARED_BITS = {".pred": 1, ".b16": 16, ".b32": 32}
_HOLDERS = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
E4M3FN_AS_FP16 = E4M3FN.astype(np.float16).view(np.uint16)

# Order among kernels, which one by one they keep anyway.
_NO_EFFECT = ("griddepcontrol.wait", "griddepcontrol.launch_dependents")
_PREFETCH = "cp.async.bulk.prefetch.L2.global"


def run_ptx(text: str, constraints: str, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs, given the inputs as registers of the constraints' widths; `$0` and on are first outputs, then inputs."""
    operands = [c for c in constraints.replace(" ", "").split(",") if not c.startswith("~")]
    if any(not re.fullmatch("=?[hrl]", c) for c in operands):
        raise NotInterpretedError(f"PTX constraints {constraints!r} are not interpreted: only h, r and l are, with = or without")
    num_outputs = sum(c.startswith("=") for c in operands)
    if any(c.startswith("=") != (i < num_outputs) for i, c in enumerate(operands)) or len(operands) - num_outputs != len(inputs):
        raise TypeError(f"PTX constraints {constraints!r} do not fit {len(inputs)} inputs")
    widths = {f"${i}": _REGISTER_BITS[c[-1]] for i, c in enumerate(operands)}
    registers = {f"${num_outputs + i}": array for i, array in enumerate(inputs)}
    for name, array in registers.items():
        if array.dtype != _HOLDERS[widths[name]]:
            raise TypeError(f"PTX operand {name} is {array.dtype}, its constraint says {widths[name]} bits")
    for statement in _statements(text):
        _step(statement, registers, widths)
    missing = [name for name in list(widths)[:num_outputs] if name not in registers]
    if missing:
        raise TypeError(f"PTX never writes {missing[0]}: {text!r}")
    return [registers[f"${i}"] for i in range(num_outputs)]


def _statements(text: str) -> list[str]:
    body = text.strip()
    # A scope of its own for all of it; braces inside are vectors.
    if body.startswith("{") and body.endswith("}"):
        body = body[1:-1]
    return [statement.strip() for statement in body.split(";") if statement.strip()]


def _step(statement: str, registers: dict[str, np.ndarray], widths: dict[str, int]) -> None:
    guard, _, statement = statement.partition(" ") if statement.startswith("@") else ("", "", statement)
    opcode, _, rest = statement.partition(" ")
    if opcode == _PREFETCH:
        addresses, num_bytes = (_read(operand.strip("[]"), registers) for operand in _operands(rest))
        _prefetch(addresses, num_bytes, _read(guard[1:], registers) if guard else np.asarray(True))
        return
    if guard:
        raise NotInterpretedError(f"PTX instruction {statement!r} is not interpreted under a predicate, where it may leave a register as it was")
    if opcode in _NO_EFFECT and not rest:
        return
    if opcode == ".reg":
        kind, _, names = rest.strip().partition(" ")
        if kind not in _DECLARED_BITS:
            raise NotInterpretedError(f"PTX registers of {kind} are not interpreted")
        widths.update((name.strip(), _DECLARED_BITS[kind]) for name in names.split(","))
        return
    if opcode not in _INSTRUCTIONS:
        raise NotInterpretedError(f"PTX instruction {statement!r} is not interpreted")
    target, *sources = _operands(rest)
    result = _INSTRUCTIONS[opcode](*(_read(source, registers) for source in sources))
    _write(target, result, registers, widths)


def _operands(text: str) -> list[str]:
    return re.findall(r"\{[^}]*\}|[^,\s]+", text)


def _read(operand: str, registers: dict[str, np.ndarray]) -> np.ndarray:
    if operand.startswith("{"):
        low, high = (_read(name.strip(), registers) for name in operand.strip("{}").split(","))
        return low.astype(np.uint32) | high.astype(np.uint32) << 16
    if re.fullmatch(r"0[xX][0-9a-fA-F]+|\d+", operand):
        return np.asarray(int(operand, 0), np.uint32)
    if operand not in registers:
        raise NotInterpretedError(f"PTX operand {operand!r} is not interpreted, or read before it is written")
    return registers[operand]


def _write(operand: str, result: np.ndarray, registers: dict[str, np.ndarray], widths: dict[str, int]) -> None:
    if operand.startswith("{"):
        low, high = (name.strip() for name in operand.strip("{}").split(","))
        _write(low, (result & 0xFFFF).astype(np.uint16), registers, widths)
        _write(high, (result >> 16).astype(np.uint16), registers, widths)
        return
    if operand not in widths:
        raise NotInterpretedError(f"PTX register {operand!r} is not declared")
    if result.dtype != _HOLDERS[widths[operand]]:
        raise TypeError(f"PTX register {operand!r} of {widths[operand]} bits is written with {result.dtype}")
    registers[operand] = result


def _widen_e4m3_pair(pair: np.ndarray) -> np.ndarray:
    """Each byte as fp16, the lower one in the lower half."""
    return E4M3FN_AS_FP16[pair & 0xFF].astype(np.uint32) | E4M3FN_AS_FP16[pair >> 8].astype(np.uint32) << 16


def _permute_bytes(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: four of the eight bytes, chosen by a digit each."""
    digits = [int(selector) >> 4 * i & 0xF for i in range(4)] if selector.ndim == 0 else [8]
    if max(digits) > 7:
        raise NotInterpretedError("prmt with a selector in a register, or one that repeats signs, is not interpreted")
    both = np.stack((low, high), -1).view(np.uint8)
    return np.ascontiguousarray(both[..., digits]).view(np.uint32)[..., 0]


def _prefetch(addresses: np.ndarray, num_bytes: np.ndarray, lanes: np.ndarray) -> None:
    """cp.async.bulk.prefetch: changes nothing, but all that it names must be there, in whole units of 16 bytes."""
    for address, size, wanted in zip(*(array.ravel().tolist() for array in np.broadcast_arrays(addresses, num_bytes, lanes)), strict=True):
        if not wanted:
            continue
        if address % 16 or size % 16:
            raise ValueError(f"a prefetch of {size} bytes at {address:#x}, which are not both multiples of 16")
        watch.check_range(address, size, "prefetch")


def bit_mask(start: np.ndarray, num: np.ndarray) -> np.ndarray:
    """bmsk.clamp: as many ones from bit `start` on, up to the last bit."""
    first, end = np.minimum(start, 32).astype(np.uint64), np.minimum(start.astype(np.uint64) + num, 32)
    return ((1 << end) - (1 << first)).astype(np.uint32)


_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": lambda source: source,
    "and.b32": np.bitwise_and,
    "bmsk.clamp.b32": bit_mask,
    "max.s32": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
    "setp.ne.b32": np.not_equal,
    "cvt.rn.f16x2.e4m3x2": _widen_e4m3_pair,
    "prmt.b32": _permute_bytes,
}
