"""Accesses of a pipelined loop to each bank of a memory on chip, against its two ports: an iteration has two per clock.

A text check, as `lint` has them. It counts what Vitis HLS cannot rule out: an index known only at run time may be
any bank of a partitioned dimension. Loops below a pipelined one are unrolled, and what it calls is part of it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from hls.lint import block_at, code_of, functions, split_arguments

PORTS = 2
"""Of a block RAM or an UltraRAM."""

SAMPLES = 8
"""Values of the variables that are tried, all zero first: two indices that are equal for some may be one bank."""

UNKNOWN = 3
"""Turns of an unrolled loop whose bound is a parameter of a template."""

_INDICES = r"((?:\[(?:[^\[\]]|\[[^\[\]]*\])*\])+)"
_ACCESS = re.compile(rf"\b(\w+){_INDICES}\s*([-+*|&^]?=(?!=))?")
_PIPELINED = re.compile(
    r"(\w+):\s*for \(\w+ (\w+) = 0; \w+ < [^;]+; (?:\+\+\w+|\w+ \+= (\w+))\) \{\s*FASTCAR_PIPELINE\((\w+)\)"
)
_LOOP = re.compile(r"for \(\w+ (\w+) = [^;]+; \w+ < ([^;]+); [^)]*\) \{")
_NAME = re.compile(r"[A-Za-z_][\w.:]*")
_CALL = re.compile(r"\b(\w+)(?:<[^;(){}]*>)?\(")


@dataclass(frozen=True)
class Access:
    """One read or write: the array, its indices as text, and the unrolled loops around it, with their turns."""

    array: str
    indices: tuple[str, ...]
    written: bool
    loops: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Function:
    """A function of the sources."""

    name: str
    parameters: tuple[str, ...]
    body: str

    def names(self) -> list[str]:
        """Names of the parameters."""
        return [
            re.findall(r"\w+", re.sub(r"\[.*", "", parameter, flags=re.DOTALL))[-1] for parameter in self.parameters
        ]


class Sources:
    """The functions of some sources, and who calls whom with which array."""

    def __init__(self, texts: Sequence[str]) -> None:
        codes = [code_of(text) for text in texts]
        self.functions = [Function(n, tuple(p), b) for code in codes for n, p, b in functions(code)]
        values = r"(?:static const \w+|#define) (\w+) (?:= )?(\d+)\b"
        self.constants = {n: int(v) for code in codes for n, v in re.findall(values, code)}

    def findings(self) -> list[str]:
        """Loops that need more accesses to a bank than its ports have in their interval."""
        return sorted({found for function in self.functions for found in self._of(function)})

    def _clocks(self, text: str) -> int:
        return int(text) if text.isdigit() else self.constants[text]

    def _of(self, function: Function) -> Iterator[str]:
        for loop in _PIPELINED.finditer(function.body):
            body, interval, step = block_at(function.body, loop.start()), self._clocks(loop[4]), loop[3]
            by_array: dict[str, list[Access]] = {}
            for access in self._accesses(body[1:-1], ()):
                indices = tuple(
                    re.sub(rf"\b{loop[2]}\b", f"({step} * {loop[2]})", i) if step else i for i in access.indices
                )
                by_array.setdefault(access.array, []).append(replace(access, indices=indices))
            for array, accesses in by_array.items():
                elements = max(len(access.indices) for access in accesses)
                whole = [
                    access for access in accesses if len(access.indices) == elements
                ]  # others are given to a function
                for banks in self._partitions(function, array):
                    most = max(self._busiest(whole, banks), default=0)
                    if most > PORTS * interval:
                        yield f"{function.name}.{loop[1]}: {most} accesses of {array} in {interval} clock(s)"

    # What an iteration accesses.

    def _accesses(self, text: str, loops: tuple[tuple[str, int], ...]) -> Iterator[Access]:
        loop = _LOOP.search(text)
        if loop is not None:
            text = _inlined(text)
            loop = _LOOP.search(text)
            assert loop is not None
            block = block_at(text, loop.end() - 1)
            yield from self._accesses(text[: loop.start()], loops)
            yield from self._accesses(block[1:-1], (*loops, (loop[1], self._turns(loop[2]))))
            yield from self._accesses(text[loop.end() - 1 + len(block) :], loops)
            return
        text = _inlined(re.sub(r"FASTCAR_\w+\([^)]*\)", "", text))
        own = set(re.findall(r"^\s*(?:const )?[\w:]+ (\w+)(?:\[[^\]]*\])+(?: = \{\})?;", text, re.MULTILINE))
        yield from self._direct(text, loops, own)
        for call in _CALL.finditer(text):
            arguments = split_arguments(_parenthesis(text, call.end() - 1))
            for function in self.functions:
                if function.name == call[1] and len(function.parameters) == len(arguments):
                    yield from self._below(function, arguments, loops)

    def _direct(self, text: str, loops: tuple[tuple[str, int], ...], own: set[str]) -> Iterator[Access]:
        for found in _ACCESS.finditer(text):
            indices = tuple(re.findall(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]", found[2]))
            for index in indices:
                yield from self._direct(index, loops, own)
            if found[1] in own:
                continue
            if found[3] is None or found[3] != "=":
                yield Access(found[1], indices, written=False, loops=loops)
            if found[3] is not None:
                yield Access(found[1], indices, written=True, loops=loops)

    def _below(self, function: Function, arguments: list[str], loops: tuple[tuple[str, int], ...]) -> Iterator[Access]:
        """Accesses of a called function to the arrays that it is given."""
        given = dict(zip(function.names(), arguments, strict=True))
        whole = {name: _array(text) for name, text in given.items()}
        for access in self._accesses(function.body[1:-1], loops):
            root = whole.get(access.array)
            if root is not None:
                renamed = tuple(
                    re.sub(r"\w+", lambda word: f"({given.get(word[0], word[0])})", i) for i in access.indices
                )
                yield replace(access, array=root[0], indices=(*root[1], *renamed))

    def _turns(self, bound: str) -> int:
        value = _value(bound, self.constants)
        return value or UNKNOWN

    # The banks of an array.

    def _partitions(self, function: Function, array: str, depth: int = 0) -> list[dict[int, int]]:
        """Every way in which the array of this name is partitioned: dimension -> banks, 0: each element."""
        names = function.names()
        if array not in names:
            return [self._declared(function.body, array)] if self._declares(function.body, array) else []
        at, found = names.index(array), list[dict[int, int]]()
        if not re.search(rf"\b{array}\[", function.parameters[at]):  # on an AXI port, or no array
            return []
        for caller in self.functions:
            for call in re.finditer(rf"\b{function.name}(?:<[^;(){{}}]*>)?\(", caller.body):
                arguments = split_arguments(_parenthesis(caller.body, call.end() - 1))
                root = _array(arguments[at]) if len(arguments) == len(names) else None
                if root is not None and depth < 8:
                    of_caller = self._partitions(caller, root[0], depth + 1)
                    found += [{d - len(root[1]): n for d, n in p.items() if d > len(root[1])} for p in of_caller]
        return [p for n, p in enumerate(found) if p not in found[:n]]

    @staticmethod
    def _declares(body: str, array: str) -> bool:
        return re.search(rf"^\s*(?:FASTCAR_SCRATCH |static )?[\w:]+ {array}\[", body, re.MULTILINE) is not None

    def _declared(self, body: str, array: str) -> dict[int, int]:
        declaration = re.search(rf"[\w:]+ {array}((?:\[[^\]]*\])+)", body)
        dimensions = 0 if declaration is None else declaration[1].count("[")
        found = dict[int, int]()
        for dimension in re.findall(rf"FASTCAR_(?:PARTITION|RESHAPE)\({array}, (\d+)\)", body):
            found |= dict.fromkeys(range(1, dimensions + 1), 0) if dimension == "0" else {int(dimension): 0}
        for dimension, banks in re.findall(rf"FASTCAR_PARTITION_CYCLIC\({array}, (\d+), (\w+)\)", body):
            found[int(dimension)] = self._turns(banks)
        return found

    def _busiest(self, accesses: Sequence[Access], banks: Mapping[int, int]) -> Iterator[int]:
        """Accesses of every bank in an iteration; one word that is read twice counts once."""
        complete = {d for d, n in banks.items() if n == 0}
        if accesses and set(range(1, len(accesses[0].indices) + 1)) <= complete:
            return  # registers
        names = {name for access in accesses for index in access.indices for name in _NAME.findall(index)}
        for seed in range(SAMPLES):
            random = Random(seed)
            values = {name: random.randrange(16) if seed else 0 for name in sorted(names)} | self.constants
            used: dict[tuple[int | None, ...], set[tuple[bool, tuple[str, ...]]]] = {}
            for access in accesses:
                for turns in product(*(range(count) for _, count in access.loops)):
                    own = dict(zip((name for name, _ in access.loops), turns, strict=True))
                    indices = tuple(_replaced(index, own) for index in access.indices)
                    bank = tuple(self._bank(indices[d - 1], banks[d], values) for d in sorted(banks))
                    used.setdefault(bank, set()).add((access.written, indices))
            for bank in used:
                met = (words for other, words in used.items() if _may_be_one(bank, other))
                yield len(set[tuple[bool, tuple[str, ...]]]().union(*met))

    def _bank(self, index: str, banks: int, values: Mapping[str, int]) -> int | None:
        """The bank of an index; None: it may be any, because a remainder by no power of two hides it from the tool."""
        divisors = [_value(text, values) for text in re.findall(r"% \(?([\w:]+)", index)]
        value = _value(index, values)
        if value is None or any(d is None or d & (d - 1) for d in divisors):
            return None
        return value % banks if banks else value


def _may_be_one(bank: tuple[int | None, ...], other: tuple[int | None, ...]) -> bool:
    return all(own is None or its is None or own == its for own, its in zip(bank, other, strict=True))


def _inlined(text: str) -> str:
    """The text with its constants of whole numbers written out where they are used."""
    for found in re.finditer(r"const (?:u?int\w*|bool) (\w+) = ([^;?]+);", text):
        before, after = text[: found.end()], text[found.end() :]
        text = before + re.sub(rf"(?<![\w.]){found[1]}\b", lambda _, own=found: f"({own[2]})", after)
    return text


def _parenthesis(text: str, start: int) -> str:
    """What stands between the parenthesis at `start` and its end."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 1 : at]
    return text[start + 1 :]


def _array(text: str) -> tuple[str, tuple[str, ...]] | None:
    """Name and indices of an argument that is an array or a part of one."""
    found = re.fullmatch(rf"(\w+){_INDICES}?", text.strip())
    return None if found is None else (found[1], tuple(re.findall(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]", found[2] or "")))


def _replaced(text: str, values: Mapping[str, int]) -> str:
    return re.sub(r"\b[A-Za-z_]\w*", lambda word: str(values.get(word[0], word[0])), text)


def _value(text: str, values: Mapping[str, int]) -> int | None:
    """Value of an expression of whole numbers; None: it has another form, or a name that is not known."""
    named = re.sub(
        r"[A-Za-z_][\w.:]*", lambda word: str(values.get(word[0].split("::")[-1], values.get(word[0], "?"))), text
    )
    if not re.fullmatch(r"[\d\s()+\-*/%]+", named):
        return None
    try:
        return int(eval(named.replace("/", "//"), {"__builtins__": {}}))  # digits and operators only
    except (SyntaxError, ZeroDivisionError):
        return None
