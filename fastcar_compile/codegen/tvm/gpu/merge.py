"""Dispatches -> stages, each of which is one dispatch: lanes side by side, and small shaders one behind the other.

A shader joins the stage before it as a lane of its own where it waits for nothing there. Where it waits for small ones,
it runs behind them in their workgroup, with a barrier between. Values between shaders are in one buffer, the arena, so
that a stage binds few, and so are weights that lanes of one shader read. Where they are is data, so that equal layers
have one text.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby
from math import prod

from fastcar_compile.codegen.tvm.gpu.shaders import BINDINGS, MOST_GROUPS, Binding, Shader, prelude

THREADS = 64
"""Of a workgroup of several shaders."""

SMALL, SMALL_ROWS = 64, 8
"""Workgroups of a shader without and with barriers that one workgroup may run, one after the other."""

AHEAD = 6
"""Dispatches that wait while others, which are behind them in the program, join a stage."""

POOLED_WORDS = 1 << 25
"""Of a buffer, on every adapter."""

SHARED_WORDS = 4096
"""Of a workgroup, on every adapter."""


@dataclass(frozen=True)
class Dispatch:
    """A shader on buffers, by their numbers. when: a buffer, and whether its first word is to be true; None: always."""

    shader: Shader
    buffers: tuple[int, ...]
    when: tuple[int, bool] | None = None

    @property
    def uses(self) -> set[int]:
        """Return the buffers that it reads or writes."""
        return {*self.buffers, *(self.when or ())[:1]}

    @property
    def writes(self) -> set[int]:
        """Return the buffers that it writes."""
        return {b for b, binding in zip(self.buffers, self.shader.bindings, strict=True) if binding.writes}

    @property
    def small(self) -> bool:
        """Whether one workgroup may compute it all."""
        most = SMALL_ROWS if "Barrier()" in self.shader.body else SMALL
        return prod(self.shader.groups) <= (1 if self.shader.wide else most)

    def waits_for(self, other: "Dispatch") -> bool:
        """Whether it has to run behind one that is before it in the program."""
        return bool(self.uses & other.writes or other.uses & self.writes)


Lane = tuple[Dispatch, ...]

Inside = Mapping[int, tuple[int, int]]
"""Buffer -> the one that it is in, and its first word there."""


@dataclass(frozen=True)
class ShaderStage:
    """Lanes that are one dispatch."""

    lanes: tuple[Lane, ...]

    def __iter__(self) -> Iterator[Dispatch]:
        return chain.from_iterable(self.lanes)

    @property
    def when(self) -> tuple[int, bool] | None:
        """Return the condition of all its shaders. None: they have none, or not one."""
        conditions = {one.when for one in self}
        return conditions.pop() if len(conditions) == 1 else None

    @property
    def groups(self) -> tuple[int, int, int]:
        """Return its workgroups: those of its lanes, one behind the other."""
        return sum(_groups(lane)[0] for lane in self.lanes), *_groups(self.lanes[0])[1:]

    @property
    def teams(self) -> list[tuple[Lane, ...]]:
        """Return the lanes, those together that are one shader on other buffers."""
        return [tuple(team) for _, team in groupby(self.lanes, _kind)]

    @property
    def shared(self) -> dict[str, tuple[str, int]]:
        """Return the arrays of a workgroup, name -> kind and length: shaders share them."""
        return {name: array[1:] for one in self for name, array in one.shader.pooled().items()}

    def joined(self, one: Dispatch, temporaries: Collection[int]) -> "ShaderStage | None":
        """Return the stage with a dispatch more; None: it has to run behind it. temporaries: buffers of the arena."""
        before = [lane for lane in self.lanes if any(map(one.waits_for, lane))]
        lane = (*chain.from_iterable(before), one)
        made = ShaderStage((*(other for other in self.lanes if other not in before), lane))
        fits = (
            (len(lane) == 1 or all(each.small for each in lane))
            and len({each.small for each in made}) == 1
            and all(prod(each.shader.threads) == THREADS and each.shader.groups[1] == 1 for each in made)
            # Conditions that differ are asked within the shader: a large one would have its workgroups.
            and (made.when is not None or all(each.small for each in made if each.when))
            and len({-1 if b in temporaries else b for each in made for b in each.uses}) <= BINDINGS
            and sum(length for _, length in made.shared.values()) < SHARED_WORDS
            and made.groups[0] <= MOST_GROUPS
        )
        return made if fits else None


def staged(dispatches: Sequence[Dispatch], temporaries: Collection[int]) -> list[ShaderStage]:
    """Return the stages of dispatches. temporaries: buffers of the arena."""
    stages, left = list[ShaderStage](), list(dispatches)
    while left:
        stage, later = ShaderStage(((left.pop(0),),)), list[Dispatch]()
        while left and len(later) < AHEAD:
            one = left.pop(0)
            joined = None if any(map(one.waits_for, later)) else stage.joined(one, temporaries)
            stage, later = joined or stage, later if joined else [*later, one]
        stages.append(stage)
        left = later + left
    return stages


def pooled(stages: Sequence[ShaderStage], weights: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return weights, by their words, that are to be in one buffer: lanes of one shader read them."""
    found, known = list[tuple[int, ...]](), set[int]()
    for team in chain.from_iterable(stage.teams for stage in stages):
        for column in _columns(team):
            fresh = len({*column}) == len(column) > 1 and {*column} <= weights.keys() - known
            if fresh and sum(weights[b] for b in column) <= POOLED_WORDS:
                found.append(column)
                known |= {*column}
    return found


def arranged(stages: Sequence[ShaderStage], words: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Return where in the arena buffers of so many words begin, and its words: those used at a time are apart."""
    spans: dict[int, tuple[int, int]] = {}
    for now, stage in enumerate(stages):
        for buffer in sorted(words.keys() & set().union(*(one.uses for one in stage))):
            spans[buffer] = (spans.get(buffer, (now,))[0], now)
    found, live = dict[int, int](), list[tuple[int, int, int]]()
    for buffer, (first, last) in spans.items():
        begin = 0
        for other, end, until in sorted(live):
            if until >= first and begin + words[buffer] > other:
                begin = max(begin, end)
        found[buffer] = begin
        live.append((begin, begin + words[buffer], last))
    return found, max((end for _, end, _ in live), default=0)


def _kind(lane: Lane) -> Lane:
    one = replace(lane[0], shader=replace(lane[0].shader, groups=(1, 1, 1)), buffers=())
    return (one,) if len(lane) == 1 else lane


def _columns(team: Sequence[Lane]) -> list[tuple[int, ...]]:
    """Return by binding the buffers of all lanes, of which the first shader is looked at."""
    return list(zip(*(lane[0].buffers for lane in team), strict=True))


def _groups(lane: Lane) -> tuple[int, int, int]:
    return lane[0].shader.groups if len(lane) == 1 else (1, 1, 1)


@dataclass
class StageWriter:
    """Writes a stage as WGSL with the entry `main`.

    Attributes:
        inside: of the buffers that are in others.
        buffers: by binding; behind them is the uniform buffer of `places`, where there are any.
        _places: buffers and their words. _kinds: type of each buffer's elements.
    """

    stage: ShaderStage
    inside: Inside
    buffers: list[int] = field(default_factory=list[int])
    _places: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _kinds: list[str] = field(default_factory=list[str])
    _parts: list[str] = field(default_factory=list[str])

    @property
    def places(self) -> list[int]:
        """Return what the uniform buffer holds."""
        return [word for _, word in self._places]

    def text(self) -> str:
        """Return the shader."""
        lanes = "".join(self._teams())
        written = {self.inside.get(b, (b, 0))[0] for one in self.stage for b in one.writes}
        access = ["read_write" if b in written else "read" for b in self.buffers]
        head = [
            f"@group(0) @binding({i}) var<storage, {a}> buffer_{i} : array<{kind}>;"
            for i, (a, kind) in enumerate(zip(access, self._kinds, strict=True))
        ]
        if self._places:
            head.append(f"struct Places {{ {', '.join(f'at_{i} : i32' for i in range(len(self._places)))} }}")
            head.append(f"@group(0) @binding({len(head) - 1}) var<uniform> places : Places;")
        head += [f"var<workgroup> {n} : array<{kind}, {length}>;" for n, (kind, length) in self.stage.shared.items()]
        head += ["var<workgroup> guard : i32;"] if "&guard" in lanes else []
        code = "\n".join([*head, *self._parts])
        return f"""{prelude(code)}{code}
@compute @workgroup_size({prod(self.stage.lanes[0][0].shader.threads)}, 1, 1)
fn main(@builtin(workgroup_id) group : vec3<u32>, @builtin(local_invocation_index) thread : u32) {{
{lanes}}}
"""

    def _teams(self) -> Iterator[str]:
        """Yield what a workgroup does, by its number."""
        begin, teams = 0, list[tuple[Lane, ...]]()
        for team in self.stage.teams:
            wholes = [{self.inside.get(b, (b, 0))[0] for b in column} for column in _columns(team)]
            teams += [team] if all(len(whole) == 1 for whole in wholes) else [(lane,) for lane in team]
        for team in teams:
            begin, *ends = accumulate((_groups(lane)[0] for lane in team), initial=begin)
            # Software adapters mask what is in a branch, which takes half as long again: one team has none.
            yield f"if (group.x >= {begin}u && group.x < {ends[-1]}u) {{\n" if len(teams) > 1 else "{\n"
            for i, one in enumerate(team[0]):
                yield "storageBarrier();\nworkgroupBarrier();\n" if i else ""
                alone = [begin, *ends[:-1]] if len(team[0]) == 1 else None
                yield self._guarded(one, self._calls([lane[i] for lane in team], alone))
            yield "}\n"
            begin = ends[-1]

    def _calls(self, team: Sequence[Dispatch], begins: Sequence[int] | None) -> str:
        """Return a shader's call for one workgroup of lanes that begin there, or without, its calls for all it has."""
        x, y, _ = team[0].shader.threads
        part, thread = self._part(team), f"vec3<u32>(thread % {x}u, thread / {x}u % {y}u, thread / {x * y}u)"
        if begins is None:
            each = f"{part}(vec3<u32>(i, 0u, 0u), {thread}, 0);"
            return f"for (var i = 0u; i < {team[0].shader.groups[0]}u; i++) {{ {each} workgroupBarrier(); }}\n"
        lane = " + ".join(["0", *(f"i32(group.x >= {begin}u)" for begin in begins[1:])])
        begin = _chosen([f"{begin}u" for begin in begins])
        return f"let lane = {lane};\n{part}(vec3<u32>(group.x - {begin}, group.yz), {thread}, lane);\n"

    def _guarded(self, one: Dispatch, calls: str) -> str:
        """Return calls that run only at the shader's condition, where it is not that of the whole stage."""
        if one.when is None or self.stage.when is not None:
            return calls
        asked = "if (thread == 0u) { guard = condition[0i]; }\n"
        asked = self._bound(asked, one.when[:1], Binding("condition", "i32"))
        holds = f"(workgroupUniformLoad(&guard) != 0i) == {'true' if one.when[1] else 'false'}"
        return f"{{\n{asked}}}\nif ({holds}) {{\n{calls}}}\n"

    def _part(self, team: Sequence[Dispatch]) -> str:
        """Write the shader of lanes as a function, and return its name."""
        body = team[0].shader.body
        for name, (own, *_) in team[0].shader.pooled().items():
            body = re.sub(rf"\b{own}\b", name, body)
        columns = zip(*(one.buffers for one in team), strict=True)
        for column, binding in zip(columns, team[0].shader.bindings, strict=True):
            body = self._bound(body, column, binding)
        name = f"part_{len(self._parts)}"
        self._parts.append(f"fn {name}(blockIdx : vec3<u32>, threadIdx : vec3<u32>, lane : i32) {{\n{body}}}")
        return name

    def _bound(self, body: str, column: Sequence[int], binding: Binding) -> str:
        """Return a body that has the stage's name of a buffer, which is in another place for each lane."""
        first, is_whole = column[0], column[0] not in self.inside
        whole = first if is_whole else self.inside[first][0]
        if whole not in self.buffers:
            self.buffers.append(whole)
            self._kinds.append(binding.kind if is_whole else "u32")
        name = f"buffer_{self.buffers.index(whole)}"
        if is_whole:
            return re.sub(rf"\b{binding.name}\b", name, body)
        self._places += dict.fromkeys(self.inside[b] for b in column if self.inside[b] not in self._places)
        place = _chosen([f"places.at_{self._places.index(self.inside[b])}" for b in column])
        return f"let {binding.name}_at = {place};\n{_moved(body, binding, name)}"


def _chosen(each: Sequence[str]) -> str:
    """Return the expression for what lanes have each."""
    found = each[0]
    for i, one in enumerate(each[1:]):
        found = found if one == each[i] else f"select({found}, {one}, lane > {i})"
    return found


def _moved(body: str, binding: Binding, whole: str) -> str:
    """Return a body whose elements of a buffer are words of the one that it is in."""
    # From the last one on: what is in its index and what is written to it are done then.
    for begin in reversed([found.end() for found in re.finditer(rf"\b{binding.name}\[", body)]):
        end, depth = begin, 1
        while depth := depth + {"[": 1, "]": -1}.get(body[end], 0):
            end += 1
        word, behind = f"{whole}[{binding.name}_at + {body[begin:end]}]", body[end + 1 :]
        if behind.startswith(" = "):
            value, _, behind = behind[3:].partition(";")
            word = f"{word} = bitcast<u32>({value});"
        else:
            word = f"bitcast<{binding.kind}>({word})"
        body = body[: begin - len(binding.name) - 1] + word + behind
    return body
