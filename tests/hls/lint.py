"""Text checks of kernel sources. Each function returns its findings, one text each; none means clean."""

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from hls.keywords import RESERVED

INCLUDES = {"<stdint.h>", "<string.h>", "<ap_int.h>", "<hls_stream.h>"}
FORBIDDEN = re.compile(r"\b(?:std::|(?:new|delete|malloc|calloc|realloc|free|while|do|goto|throw|virtual|double)\b)")
KEYWORDS = {"if", "for", "switch", "return", "sizeof", "defined", "static_assert", "static_cast"}


def code_of(text: str) -> str:
    """The text without comments; strings are kept."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def block_at(code: str, start: int) -> str:
    """The braced block that opens at or after `start`."""
    first = code.index("{", start)
    depth = 0
    for at in range(first, len(code)):
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        if depth == 0:
            return code[first : at + 1]
    raise ValueError("a brace is not closed")


def split_arguments(text: str) -> list[str]:
    """Text between parentheses, at commas outside brackets of any kind."""
    depth, parts = 0, [""]
    for character in text:
        depth += {"(": 1, "[": 1, "<": 1, ")": -1, "]": -1, ">": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def functions(code: str) -> Iterator[tuple[str, list[str], str]]:
    """(name, parameters, body) of every function defined."""
    for match in re.finditer(r"\b(\w+)\s*\(((?:[^;{}()]|\(\))*)\)\s*\{", code):
        if match[1] not in KEYWORDS:
            yield match[1], split_arguments(match[2]), block_at(code, match.end() - 1)


def find_forbidden(text: str) -> list[str]:
    """Constructs that hardware has not, headers of the host, and unbounded loops."""
    code = code_of(text)
    found = [f"forbidden: {match[0]}" for match in FORBIDDEN.finditer(code)]
    for name in re.findall(r"#include\s+(\S+)", code):
        if name not in INCLUDES and not re.fullmatch(r'"fastcar_\w+\.hpp"', name):
            found.append(f"include: {name}")
    return found


def find_unbounded_loops(text: str) -> list[str]:
    """`for` loops whose bound or step is not a constant (in capitals), nor told with FASTCAR_TRIPS."""
    code = code_of(text)
    loops = re.findall(r"\bfor \(([^)]*)\) \{(?=((?:[^\n]*\n){3}))", code)
    found = [] if len(loops) == len(re.findall(r"\bfor\s*\(", code)) else ["a loop is not of the form for (...) {"]
    for head, body in loops:
        bound = re.search(r"; (\w+) < ([^;]+); (?:\+\+\1|\1 \+= [A-Z_]+)$", head)
        constant = bound is not None and re.fullmatch(r"\d+|[^a-z]*|.*(?:::[A-Z_]+)[^a-z]*", bound[2]) is not None
        if bound is None or not (constant or "FASTCAR_TRIPS" in body):
            found.append(f"loop: {head}")
    return found


def call_graph(texts: list[str]) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Function name -> parameters and bodies of the functions of this name, and -> names of those that they call."""
    bodies: dict[str, str] = {}
    for text in texts:
        for name, parameters, body in functions(code_of(text)):
            bodies[name] = bodies.get(name, "") + ", ".join(parameters) + body
    called = {name: set(re.findall(r"\b(\w+)(?:<[^;(){}]*>)?\(", body)) & set(bodies) for name, body in bodies.items()}
    return bodies, called


def find_recursion(texts: list[str]) -> list[str]:
    """A cycle in the graph of who names whom, by function name."""
    _, called = call_graph(texts)
    try:
        TopologicalSorter(called).prepare()
    except CycleError as error:
        return [f"recursion: {' -> '.join(error.args[1])}"]
    return []


def find_pragmas(name: str, text: str) -> list[str]:
    """Pragmas outside the one header of macros; interface pragmas of a top and `once` may stand."""
    if name == "fastcar_pragmas.hpp":
        return []
    raw = re.findall(r"^\s*#pragma .*$|_Pragma\(.*$", text, re.MULTILINE)
    allowed = ("#pragma once", "#pragma HLS INTERFACE mode=", "#pragma GCC diagnostic ignored")
    return [f"pragma: {line.strip()}" for line in raw if not line.strip().startswith(allowed)]


def find_ports_without_pragma(text: str) -> list[str]:
    """Arguments of `extern "C"` tops without the pragmas of their kind, in the mode= form."""
    found = []
    code = code_of(text)
    tops = [f for f in functions(code) if f'extern "C" void {f[0]}(' in code]
    if not tops:
        found.append('no extern "C" top')
    for _, parameters, body in tops:
        names = [re.split(r"[\s*&]+", parameter)[-1] for parameter in parameters]
        memories = [("m_axi", n) for n, parameter in zip(names, parameters, strict=True) if "*" in parameter]
        streams = [("axis", n) for n, parameter in zip(names, parameters, strict=True) if "hls::stream" in parameter]
        controls = [("s_axilite", name) for name in [*names, "return"] if ("axis", name) not in streams]
        wanted = memories + streams + controls
        pairs = re.findall(r"#pragma HLS INTERFACE mode=(\w+) port=(\w+)\s", body)
        if sorted(pairs) != sorted(wanted):
            found += [f"port: {pair}" for pair in sorted(set(pairs) ^ set(wanted))] or ["port: named twice"]
    return found


def find_reserved_arguments(text: str) -> list[str]:
    """Names of `extern "C"` tops and of their arguments that Verilog or VHDL reserves: HLS would rename the port."""
    code = code_of(text)
    tops = ((name, own) for name, own, _ in functions(code) if f'extern "C" void {name}(' in code)
    names = [word for name, own in tops for word in (name, *(re.split(r"[\s*&]+", parameter)[-1] for parameter in own))]
    return [f"reserved: {name}" for name in names if name.lower() in RESERVED]


def find_unequal_bursts(text: str) -> list[str]:
    """AXI ports without all four burst options, or whose arguments have different ones: a port has one adapter."""
    ports: dict[str, set[str]] = {}
    for bundle, options in re.findall(r"mode=m_axi port=\w+ bundle=(\w+) offset=slave depth=\d+ ?(.*)", text):
        ports.setdefault(bundle, set()).add(options)
    numbers = r"max_read_burst_length=\d+ num_read_outstanding=\d+ max_write_burst_length=\d+ num_write_outstanding=\d+"
    return [name for name, found in ports.items() if len(found) > 1 or not re.fullmatch(numbers, next(iter(found)))]


def find_shared_streams(top: str, processes: str, sizes: dict[str, int]) -> list[str]:
    """Streams of a top's DATAFLOW regions without exactly one producer and one consumer, and misused stream parameters.

    The parameters of a process whose names begin with `out` are those that it writes.

    Args:
        sizes: the constants that the top's arrays of streams are declared with.
    """
    found, parameters = [], {}
    for name, params, body in functions(code_of(processes)):
        parameters[name] = [re.findall(r"\w+", re.sub(r"\[.*", "", p))[-1] for p in params]
        for parameter in (p for p in params if "hls::stream" in p):
            own = re.findall(r"\w+", re.sub(r"\[.*", "", parameter))[-1]
            wrong = "read" if own.startswith("out") else "write"
            if re.search(rf"\b{own}(?:\[\w+\])?\.{wrong}\(", body):
                found.append(f"stream: {name} {wrong}s {own}")
    code, regions = code_of(top), 0
    for match in re.finditer("FASTCAR_DATAFLOW", code):
        region = block_at(code, code.rindex("{", 0, match.start()))
        ends = _stream_ends(region, parameters, sizes)
        regions += bool(ends)
        found += [f"stream: {s} has {sorted(e)}" for s, e in ends.items() if sorted(e) != ["consumer", "producer"]]
    return found if regions else ["no stream"]


def _stream_ends(region: str, parameters: dict[str, list[str]], sizes: dict[str, int]) -> dict[str, list[str]]:
    """Stream -> the kinds of its ends in one region."""
    ends: dict[str, list[str]] = {}
    for name, size in re.findall(r"hls::stream<[^;]*> (\w+)(?:\[([\w:/ ]+)\])?;", region):
        ends |= {f"{name}[{i}]": [] for i in range(sizes[size])} if size else {name: []}
    for process, text in re.findall(r"fastcar::(?:\w+::)?(\w+)<[^;(]*>\(([^;]*)\);", region):
        for argument, parameter in zip(split_arguments(text), parameters[process], strict=True):
            for stream in (s for s in ends if argument in (s, s.partition("[")[0])):
                ends[stream].append("producer" if parameter.startswith("out") else "consumer")
    return ends


def find_floats_below(texts: list[str], root: str) -> list[str]:
    """Floating point in `root` or in anything that it calls, directly or not."""
    bodies, called = call_graph(texts)
    reached, queue = {root}, [root]
    while queue:
        below = called.get(queue.pop(), set()) - reached
        queue += sorted(below)
        reached |= below
    if root not in bodies or reached == {root}:
        return [f"{root} is not there, or calls nothing"]
    pattern = r"\b(?:float|double|half)\b|\b\d+\.\d*f?\b"
    return [f"{name}: {match}" for name in sorted(reached) for match in re.findall(pattern, bodies[name])]


SCALARS = {"int", "bool", "float", "uint32_t", "int32_t", "uint64_t"}


def find_bad_dataflow(texts: list[str]) -> list[str]:
    """DATAFLOW regions that are not canonical.

    A region holds declarations, pragmas and calls, no control flow. An argument is a name, or an element of an array of
    streams: no expression, no member, no struct by value; a loop's bound is an argument of its function or a constant.
    An array of a region is written by one call and read by one later call, which takes it as const; streams are checked
    by `find_shared_streams`.
    """
    parameters: dict[str, list[str]] = {}
    for text in texts:
        for name, own, _ in functions(code_of(text)):
            parameters[name] = own
    found, regions = [], 0
    for text in texts:
        for name, _, body in functions(code_of(text)):
            for at in (m.start() for m in re.finditer("FASTCAR_DATAFLOW", body)):
                regions += 1
                problems = [*_region_problems(body, at, parameters), *_bound_problems(body, at, parameters[name])]
                found += [f"dataflow in {name}: {problem}" for problem in problems]
    return found if regions else ["no dataflow region"]


def _bound_problems(body: str, at: int, own: list[str]) -> list[str]:
    """What is wrong with the bound of the loop whose body is a region."""
    head = re.search(r"for \(int \w+ = 0; \w+ < ([^;]+); \+\+\w+\) \{\s*$", body[:at])
    if (
        head is None
        or head[1] in {parameter.split()[-1] for parameter in own}
        or re.fullmatch(r"\d+|[A-Z_:]+", head[1])
    ):
        return []
    return [f"the bound {head[1]} is no argument"]


def _region_problems(body: str, at: int, parameters: dict[str, list[str]]) -> list[str]:
    start = body.rindex("{", 0, at)
    region = block_at(body, start)
    before = re.sub(r"#[^\n]*|FASTCAR_NO_INLINE", "", body[start + 1 : at])
    found = [] if not before.strip() else ["the pragma does not come first"]
    statements = re.sub(r"^\s*#[^\n]*", "", region, flags=re.MULTILINE)
    found += [f"control flow: {word}" for word in re.findall(r"\b(?:if|for|switch|return)\b", statements)]
    arrays = re.findall(r"^\s*[\w:]+ (\w+)(?:\[[^;\n]*\])+;$", region, re.MULTILINE)
    uses: dict[str, list[str]] = {array: [] for array in arrays}
    for process, text in re.findall(r"\b(\w+)<[^;(){}]*>\(([^;]*)\);", region):
        arguments = split_arguments(text)
        if len(arguments) != len(parameters[process]):
            found.append(f"{process} has default arguments")
        for argument, parameter in zip(arguments, parameters[process], strict=False):
            found += _argument_problems(process, argument, parameter)
            if argument in uses:
                uses[argument].append("read" if parameter.startswith("const ") else "write")
    return found + [f"{array} has {use}" for array, use in uses.items() if use != ["write", "read"]]


def _argument_problems(process: str, argument: str, parameter: str) -> list[str]:
    found = []
    if not re.fullmatch(r"\w+(?:\[\d+\])?", argument):
        found.append(f"{process} takes the expression {argument}")
    by_value = not re.search(r"[\[*&]", parameter)
    if by_value and parameter.removeprefix("const ").split()[0] not in SCALARS:
        found.append(f"{process} takes {parameter} by value")
    return found


def find_bound_operators(text: str) -> list[str]:
    """Operators that are bound to a DSP one by one: the tool forms no multiply-add and no cascade of them."""
    return [f"bound operator: {line.strip()}" for line in code_of(text).splitlines() if "BIND_OP" in line]


def find_unlabelled_loops(text: str) -> list[str]:
    """Loops without a label that cannot be unrolled: their bound is no constant."""
    lines = [line.strip() for line in code_of(text).splitlines()]
    loops = (line for before, line in pairwise(["", *lines]) if line.startswith("for (") and not before.endswith(":"))
    return [f"label: {line}" for line in loops if not re.search(r"; \w+ < (?:\w+::|[A-Z\d_ /*])+; ", line)]


def find_initialised_uram(text: str) -> list[str]:
    """Arrays that may be in UltraRAM and have initial values, as every static one has."""
    code, found = code_of(text), []
    for match in re.finditer(r"^\s*FASTCAR_(?:TILE|ROW)_MEMORY\((\w+)\)", code, re.MULTILINE):
        declaration = re.findall(rf"([\w:<> ]+\b{match[1]}\[[^;]*);", code[: match.start()])[-1].strip()
        if declaration.startswith("static ") or "=" in declaration:
            found.append(f"UltraRAM: {declaration}")
    return found


def pipelined_loops(texts: list[str]) -> Iterator[tuple[str, str]]:
    """(function.label, body) of every pipelined loop."""
    for text in texts:
        for name, _, body in functions(code_of(text)):
            for loop in re.finditer(r"(\w+):\s*for \([^)]*\) \{\s*FASTCAR_PIPELINE", body):
                yield f"{name}.{loop[1]}", block_at(body, loop.start())


def recurrences(texts: list[str]) -> dict[tuple[str, str], str]:
    """(function.label, variable) -> distance, as pipelined loops declare them."""
    return {
        (loop, variable): distance
        for loop, body in pipelined_loops(texts)
        for variable, distance in re.findall(r"FASTCAR_RECURRENCE\((\w+), ([\w:]+)\)", body)
    }


def find_slow_recurrences(texts: list[str], config: str, listed: list[tuple[str, str, int, int]]) -> list[str]:
    """Declared distances that are below a latency, above a real distance, or not in the list, and the other way round.

    Args:
        config: fastcar_config.hpp, and fastcar_step_config.hpp of a kernel of whole steps.
        listed: loop, variable, distance and latency of every recurrence of the design.
    """
    constants = {name: int(value) for name, value in re.findall(r"#define (FASTCAR_\w+) (\d+)", config)}
    declared, found = recurrences(texts), []
    for loop, variable, distance, latency in listed:
        if (loop, variable) not in declared:
            found.append(f"{variable} of {loop} is not declared")
            continue
        text = declared[loop, variable]
        said = constants[text] if text in constants else int(text)
        if said < latency:
            found.append(f"{variable} of {loop}: {said} iterations, {latency} clocks")
        if said > distance:
            found.append(f"{variable} of {loop}: {said} iterations, at least {distance}")
    names = {(loop, variable) for loop, variable, *_ in listed}
    return found + [
        f"{variable} of {loop} is not listed" for loop, variable in declared if (loop, variable) not in names
    ]


def find_undeclared_recurrences(texts: list[str]) -> list[str]:
    """What a `_step` function changes, or gives back to its own argument, and outlives its iteration undeclared."""
    state = {}
    for text in texts:
        for name, parameters, _ in functions(code_of(text)):
            if name.endswith("_step"):
                changed = {
                    i for i, p in enumerate(parameters) if re.search(r"[\[&*]", p) and not p.startswith("const ")
                }
                state[name] = state.get(name, set()) | changed
    found, declared = [], recurrences(texts)
    for loop, body in pipelined_loops(texts):
        carried = set(re.findall(r"\b(\w+)\[\w+\] = \w+_step\(\1\[", body))
        for name, text in re.findall(r"\b(\w+_step)(?:<[^;(){}]*>)?\(([^;]*)\);", body):
            arguments = split_arguments(text)
            carried |= {re.split(r"\[", arguments[i].lstrip("&"))[0] for i in state.get(name, set())}
        own = {v for v in carried if re.search(rf"^\s*[\w:]+ {v}\[", body, re.MULTILINE)}
        found += [f"recurrence: {v} of {loop}" for v in sorted(carried - own) if (loop, v) not in declared]
    return found
