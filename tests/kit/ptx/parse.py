"""The text of a kernel in PTX as a list of instructions, with every name that a scope declares made unique."""

import re
from dataclasses import dataclass

from tests.kit.ptx.faults import Fault

_LOCATION = re.compile(r"\.loc\s.*//\s*(\S+)")
_LABEL = re.compile(r"([$\w]+)\s*:(?!:)")
_STATEMENT = re.compile(r"(?:@(?P<negated>!?)(?P<guard>[%\w@]+)\s+)?(?P<text>[\w.:]+)\s*(?P<operands>.*)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align \d+ )?\.(?P<type>\w+)[^,\n]*?\s(?P<name>\w+)(?:\[(?P<num_bytes>\d+)\])?\s*[,\n)]")


@dataclass(frozen=True)
class Parameter:
    """One of a kernel's parameters: a number, or a struct of bytes (a tensor map)."""

    name: str
    type: str  # "u64", "f32"; "b8" of a struct


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    text: str  # "ld.global.b32"
    operands: tuple[str, ...]  # "%r1", "[%r1+16]", "{%r1, %r2}"
    guard: str | None  # the predicate that it goes by
    negated: bool  # it goes where the guard is false
    line: int  # of the PTX, from 1
    source: str  # file, line and column of the kernel, as the compiler has it

    @property
    def name(self) -> str:
        return self.text.split(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.text.split(".")[1:])

    @property
    def type(self) -> str:
        return self.modifiers[-1]


@dataclass(frozen=True)
class Code:
    """A kernel's instructions, and what they name."""

    parameters: tuple[Parameter, ...]
    num_threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # place among the instructions
    types: dict[str, str]  # of registers, by name or, where they are numbered, by what stands before the number

    def type_of(self, register: str) -> str:
        return self.types.get(register) or self.types[register.rstrip("0123456789")]


def parse(ptx: str) -> Code:
    """The one kernel in a text."""
    head, _, _ = ptx[ptx.index(".entry") :].partition("{")
    threads = re.search(r"\.reqntid (\d+)", head)
    if threads is None:
        raise Fault("the kernel does not say how many threads it has (.reqntid)")
    parameters = tuple(Parameter(found["name"], found["type"]) for found in _PARAMETER.finditer(head))
    body = _Body()
    before = ptx[: ptx.index(".entry")].count("\n") + head.count("\n")
    for number, line in enumerate(ptx.splitlines()[before:], before + 1):
        body.read(line[line.index("{") :] if number == before + 1 else line, number)
        if body.ended:
            break
    return Code(parameters, int(threads[1]), tuple(body.instructions), body.labels, body.types)


class _Body:
    """What has been read so far between a kernel's braces."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.types: dict[str, str] = {}
        self.ended = False
        self._scopes: list[tuple[int, set[str]]] = []  # number, names declared in it
        self._num_scopes = 0
        self._unfinished = ""
        self._source = ""

    def read(self, line: str, number: int) -> None:
        if location := _LOCATION.match(line.strip()):
            self._source = location[1]
        rest = line.split("//")[0].strip()
        # Directives that end without a semicolon are the debugger's.
        if not self._unfinished and rest.startswith(".") and not rest.startswith(".reg"):
            return
        while rest and not self.ended:
            rest = self._read_one(rest, number).lstrip()

    def _read_one(self, rest: str, number: int) -> str:
        """Take one brace, label or statement off a line."""
        if not self._unfinished:
            if rest[0] == "{":
                self._scopes.append((self._num_scopes, set()))
                self._num_scopes += 1
                return rest[1:]
            if rest[0] == "}":
                self._scopes.pop()
                self.ended = not self._scopes
                return rest[1:]
            if label := _LABEL.match(rest):
                self.labels[self._label(label[1])] = len(self.instructions)
                return rest[label.end() :]
        statement, semicolon, after = rest.partition(";")
        self._unfinished += statement + " "
        if semicolon:
            whole, self._unfinished = self._unfinished.strip(), ""
            self._statement(whole, number)
        return after

    def _statement(self, text: str, number: int) -> None:
        if text.startswith(".reg"):
            self._declare(text)
            return
        if not text or text.startswith("."):
            return
        if len(self._scopes) > 1:
            text = re.sub(r"(?<![\w$%.:])[A-Za-z_]\w*", lambda found: self._unique(found[0]), text)
        found = _STATEMENT.fullmatch(text)
        if found is None:
            raise Fault(f"line {number}: {text!r} is no statement that is known")
        operands = split_operands(found["operands"])
        if found["text"].split(".")[0] == "bra":
            operands = (self._label(operands[0]),)
        # The same by another name; compilers write either.
        name = found["text"].replace(".shared::cta", ".shared")
        self.instructions.append(Instruction(name, operands, found["guard"], bool(found["negated"]), number, self._source))

    def _declare(self, text: str) -> None:
        _, kind, names = text.split(maxsplit=2)
        number, declared = self._scopes[-1]
        for name in split_operands(names):
            if numbered := re.fullmatch(r"(%\w+)<\d+>", name):
                self.types[numbered[1]] = kind[1:]
            else:
                declared.add(name)
                self.types[f"{name}@{number}"] = kind[1:]

    def _unique(self, name: str) -> str:
        for number, declared in reversed(self._scopes):
            if name in declared:
                return f"{name}@{number}"
        return name

    def _label(self, name: str) -> str:
        return name if name.startswith("$") else f"{name}@{self._scopes[-1][0]}"


def split_operands(text: str) -> tuple[str, ...]:
    """What stands between the commas that are in no bracket."""
    return tuple(part.strip() for part in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\[{])+", text) if part.strip())


def members(operand: str) -> list[str]:
    """What stands in a vector's braces, or the operand alone."""
    return [part.strip() for part in operand.strip("{}").split(",")]
