"""Text checks of kernel sources. Each function returns its findings, one text each; none means clean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

INCLUDES = {"<stdint.h>", "<string.h>", "<ap_int.h>", "<hls_stream.h>"}
FORBIDDEN = re.compile(r"\b(?:std::|(?:new|delete|malloc|calloc|realloc|free|while|do|goto|throw|virtual|double)\b)")
KEYWORDS = {"if", "for", "switch", "return", "sizeof", "defined", "static_assert", "static_cast"}
RUN_SPECIFIC = re.compile(
    r"__DATE__|__TIME__|__FILE__|\b20\d\d-\d\d-\d\d|\b\d\d:\d\d:\d\d\b"
    r"|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}|(?:-I|(?<![\w.)>]))/(?:tmp|home|work|usr|root|opt|mnt|var)\b"
)


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


def find_recursion(texts: list[str]) -> list[str]:
    """A cycle in the graph of who names whom, by function name."""
    bodies: dict[str, str] = {}
    for text in texts:
        for name, _, body in functions(code_of(text)):
            bodies[name] = bodies.get(name, "") + body
    called = {name: set(re.findall(r"\b(\w+)(?:<[^;(){}]*>)?\(", body)) & set(bodies) for name, body in bodies.items()}
    try:
        TopologicalSorter(called).prepare()
    except CycleError as error:
        return [f"recursion: {' -> '.join(error.args[1])}"]
    return []


def find_pragmas(name: str, text: str) -> list[str]:
    """Pragmas outside the one header of macros; interface pragmas of a top may stand."""
    if name == "fastcar_pragmas.hpp":
        return []
    raw = re.findall(r"^\s*#pragma .*$|_Pragma\(.*$", text, re.MULTILINE)
    allowed = (
        "#pragma HLS INTERFACE mode=",
        "#pragma HLS interface mode=m_axi port=",
        "#pragma GCC diagnostic ignored",
    )
    return [f"pragma: {line.strip()}" for line in raw if not line.strip().startswith(allowed)]


def find_ports_without_pragma(text: str) -> list[str]:
    """Arguments of `extern "C"` tops that have not the pragmas of their kind, all in the mode= form."""
    found = []
    code = code_of(text)
    tops = [f for f in functions(code) if f'extern "C" void {f[0]}(' in code]
    if not tops:
        found.append('no extern "C" top')
    for _, parameters, body in tops:
        lines = re.findall(r"#pragma HLS INTERFACE mode=(\w+) port=(\w+) ", body)
        wanted = [("s_axilite", "return")]
        for parameter in parameters:
            port = re.split(r"[\s*&]+", parameter)[-1]
            wanted += [("s_axilite", port)] + ([("m_axi", port)] if "*" in parameter else [])
        if sorted(lines) != sorted(wanted):
            found += [f"port: {pair}" for pair in sorted(set(lines) ^ set(wanted))] or ["port: named twice"]
    return found


def find_shared_streams(top: str, processes: str, sizes: dict[str, int]) -> list[str]:
    """Streams of a DATAFLOW top without exactly one producer and one consumer, and misused stream parameters.

    Args:
        sizes: the constants that the top's arrays of streams are declared with.
    """
    found, parameters = [], {}
    for name, params, body in functions(code_of(processes)):
        parameters[name] = [re.findall(r"\w+", re.sub(r"\[.*", "", p))[-1] for p in params]
        for parameter in (p for p in params if "hls::stream" in p):
            own = re.findall(r"\w+", re.sub(r"\[.*", "", parameter))[-1]
            wrong = "read" if own == "out" else "write"
            if re.search(rf"\b{own}(?:\[\w+\])?\.{wrong}\(", body):
                found.append(f"stream: {name} {wrong}s {own}")
    code = code_of(top)
    ends: dict[str, list[str]] = {}
    for name, size in re.findall(r"hls::stream<[^;]*> (\w+)\[([\w:]+)\];", code):
        ends |= {f"{name}[{i}]": [] for i in range(sizes[size])}
    for process, text in re.findall(r"fastcar::(\w+)<[^;(]*>\(([^;]*)\);", code):
        for argument, parameter in zip(split_arguments(text), parameters[process], strict=True):
            for stream in (s for s in ends if argument in (s, s.partition("[")[0])):
                ends[stream].append("producer" if parameter == "out" else "consumer")
    found += [f"stream: {s} has {sorted(e)}" for s, e in ends.items() if sorted(e) != ["consumer", "producer"]]
    return found if ends else ["no stream"]


def find_floats_below(texts: list[str], root: str) -> list[str]:
    """Floating point in `root` or in anything that it calls, directly or not."""
    bodies: dict[str, str] = {}
    for text in texts:
        for name, parameters, body in functions(code_of(text)):
            bodies[name] = bodies.get(name, "") + ", ".join(parameters) + body
    reached, queue = {root}, [root]
    while queue:
        called = set(re.findall(r"\b(\w+)(?:<[^;(){}]*>)?\(", bodies.get(queue.pop(), ""))) & set(bodies)
        queue += sorted(called - reached)
        reached |= called
    if root not in bodies or reached == {root}:
        return [f"{root} is not there, or calls nothing"]
    pattern = r"\b(?:float|double|half)\b|\b\d+\.\d*f?\b"
    return [f"{name}: {match}" for name in sorted(reached) for match in re.findall(pattern, bodies[name])]


def find_bad_dataflow(texts: list[str]) -> list[str]:
    """DATAFLOW regions that are not canonical.

    A region holds declarations, pragmas and calls, no control flow. An array of a region is written by one call and
    read by one later call, which takes it as const; streams are checked by `find_shared_streams`.
    """
    constant: dict[str, list[bool]] = {}
    for text in texts:
        for name, parameters, _ in functions(code_of(text)):
            constant[name] = [p.startswith("const ") for p in parameters]
    found, regions = [], 0
    for text in texts:
        for name, _, body in functions(code_of(text)):
            for at in (m.start() for m in re.finditer("FASTCAR_DATAFLOW", body)):
                regions += 1
                found += [f"dataflow in {name}: {problem}" for problem in _region_problems(body, at, constant)]
    return found if regions else ["no dataflow region"]


def _region_problems(body: str, at: int, constant: dict[str, list[bool]]) -> list[str]:
    start = body.rindex("{", 0, at)
    region = block_at(body, start)
    found = [] if re.fullmatch(r"[{\s]*(?:#pragma[^\n]*\s*)*", body[start:at]) else ["the pragma does not come first"]
    statements = re.sub(r"#pragma[^\n]*", "", region)
    found += [f"control flow: {word}" for word in re.findall(r"\b(?:if|for|switch|return)\b", statements)]
    arrays = re.findall(r"^\s*[\w:]+ (\w+)(?:\[[^;\n]*\])+;$", region, re.MULTILINE)
    uses: dict[str, list[str]] = {array: [] for array in arrays}
    for process, arguments in re.findall(r"\b(\w+)<[^;(){}]*>\(([^;]*)\);", region):
        for argument, reads in zip(
            split_arguments(arguments), constant[process], strict=False
        ):  # defaults are left out
            if argument in uses:
                uses[argument].append("read" if reads else "write")
    return found + [f"{array} has {use}" for array, use in uses.items() if use != ["write", "read"]]


def find_run_specific(text: str) -> list[str]:
    """Times, UUIDs and absolute paths."""
    return [f"run specific: {match[0]}" for match in RUN_SPECIFIC.finditer(text)]
