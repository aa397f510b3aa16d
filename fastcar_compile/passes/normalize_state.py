"""Lift hidden KV caches to named inputs and outputs, and bound attention by the current position."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx

from fastcar_compile.errors import CompileError, attempt
from fastcar_compile.ir.dataflow import ancestors, evaluate
from fastcar_compile.ir.layers import mark
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, StateSpec
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import is_op, is_same, node_arg, output_nodes, placeholder, shape_of
from fastcar_compile.ir.rewrite import add_placeholder, before, set_outputs
from fastcar_compile.ir.types import StateRole
from fastcar_compile.passes.patterns import eager_attention
from fastcar_compile.passes.patterns.context_states import HEAD_VIEWS, ContextStates, is_shared, same_graph
from fastcar_compile.passes.patterns.functionalize import CacheWrite, Functionalizer, writes_in_place
from fastcar_compile.passes.patterns.spelling import spell_out

aten, fastcar = torch.ops.aten, torch.ops.fastcar


# Tables that a model reads by position, such as learnt positions: no row past the last one is read.


def short_tables(module: fx.GraphModule, position: fx.Node, max_seq_len: int) -> list[CompileError]:
    """Return one error for all tables of a decode step that lack the same row of a position below `max_seq_len`.

    The index is evaluated at every position: a table that is read by something else than the position itself, such as
    the row of a picture or a distance, needs the rows that this index has.
    """
    needed: dict[fx.Node, list[int]] = {position: list(range(max_seq_len))}
    short: dict[tuple[int, int, int], dict[str, fx.Node]] = defaultdict(dict)
    for lookup, index, rows in _lookups(module.graph, position):
        # Several tables may be read at one index, which is evaluated once.
        if index not in needed:
            values = (_largest(module, position, index, start) for start in range(max_seq_len))
            needed[index] = [-1 if value is None else value for value in values]
        beyond = [at for at, row in enumerate(needed[index]) if row >= rows]
        if beyond:
            short[rows, beyond[0], max(needed[index]) + 1].setdefault(_name(node_arg(lookup, 0)), lookup)
    return [_too_short(tables, *key, max_seq_len) for key, tables in short.items()]


def limit_table_rows(module: fx.GraphModule, position: fx.Node, max_seq_len: int, made_by: str) -> None:
    """Limit what the padding of a prompt's last chunk reads to the rows of each table.

    Positions of the padding may pass the end of a table of `max_seq_len` rows. Nothing uses what they give, but they
    must not read out of bounds. `short_tables` has checked every other position.
    """
    for lookup, index, rows in list(_lookups(module.graph, position)):
        # A chunk that starts at the last position reads furthest: all of its other tokens are padding.
        largest = _largest(module, position, index, max_seq_len - 1)
        if largest is None or largest >= rows:
            with before(lookup, made_by) as emit:
                lookup.replace_input_with(index, emit(fastcar.limit.default, index, rows - 1))


def _largest(module: fx.GraphModule, position: fx.Node, index: fx.Node, start: int) -> int | None:
    """Return the largest row that a call at position `start` reads; None: that cannot be known here."""
    try:
        found = evaluate(module, index, {position: torch.tensor([start])})
    except (IndexError, RuntimeError):  # the index stands in a table that is too short itself; `gather` raises so
        return None
    return int(found.max()) if isinstance(found, Tensor) else None


def _name(table: fx.Node) -> str:
    """Return the name of the buffer or parameter that a table is, or is computed from."""
    names = [str(n.target) for n in sorted(ancestors(table)) if n.op == "get_attr"]
    return names[-1] if names else table.name


def _too_short(tables: dict[str, fx.Node], rows: int, first: int, needed: int, max_seq_len: int) -> CompileError:
    """Return the error of tables whose `rows` end before position `first`."""
    name, *others = tables
    named = f"table '{name}' has" if not others else f"tables '{name}' and {len(others)} more have"
    what = f"{named} {rows} rows, but max_seq_len is {max_seq_len}: position {first} reads row {rows}"
    caches = f"with caches of {first} rows where the module builds its own"
    hint = f"give max_seq_len={first}, {caches}, or a table of {needed} rows"
    return error_at(tables[name], what, hint)


def _lookups(graph: fx.Graph, position: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """Yield (lookup, its int64 index, rows of its table) of every read whose index follows from the position alone."""
    for node in graph.nodes:
        for index, axis in _indices(node):
            inputs = {n for n in ancestors(index) if n.op == "placeholder"}
            if inputs == {position} and index.meta["val"].dtype == torch.int64:
                yield node, index, shape_of(node_arg(node, 0))[axis]


def _indices(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield (index, axis of the table) of a lookup."""
    if is_op(node, aten.embedding):
        yield node_arg(node, 1), 0
    elif is_op(node, aten.index_select, aten.gather):
        yield node_arg(node, 2), cast("int", node.args[1])
    elif is_op(node, aten.index):
        for axis, index in enumerate(cast("list[Any]", node.args[1])):
            if isinstance(index, fx.Node):
                yield index, axis


class NormalizeState(Pass):
    """Lift hidden KV caches to named inputs and outputs, in both graphs.

    1. In-place writes become functional ones; a write along the sequence axis becomes `fastcar.cache_write`. A product
       by `torch.einsum` for every row and head becomes transposes and a matmul.
    2. Attention over such a cache with a causal mask becomes `fastcar.attention`, which the position bounds; with a
       sliding window in the mask, `fastcar.window_attention`. It may be PyTorch's operator, or written out as product,
       scale, soft-cap, mask, softmax and product.
    3. Each cache becomes the state `key_cache_<l>` or `value_cache_<l>`, in the order of the attentions.
    4. Attention to what follows from the input `context` alone becomes `fastcar.context_attention`. Its keys, values
       and mask become states that the graphs only read, `context_key_<l>`, `context_value_<l>` and `context_mask_<l>`.
       What computes them leaves the graphs: it is the context graph, which runs once per video.
    5. A table that is read by position must have a row for each position. The padding of a prompt's last chunk, which
       may pass its end, reads the last row instead.
    Mask, write index and the sharing of key/value heads are proved: their subgraphs depend on the position only, and
    are evaluated at several positions. Nothing is inferred from names.
    """

    name = "normalize-state"
    reason = (
        "KV caches that the model hides in buffers become named inputs and outputs, and attention reads the "
        "filled part of the cache only."
    )

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError with every cache or attention that cannot be normalised."""
        modified = False
        for module in program.graphs():
            # Attention is recognised by its matmuls and its softmax.
            modified |= spell_out(module.graph, self.name)
            if eager_attention.attention_calls(module.graph) or any(writes_in_place(n) for n in module.graph.nodes):
                normalizer = _Normalizer(module, program.config.max_seq_len)
                state = normalizer.run()
                modified = True
                names = ["logits", *[s.name for s in state]]
                if module is program.graph_module:
                    program.state, program.outputs = [*normalizer.context.states, *state], names
                    program.context = normalizer.context_graph
                    program.context_outputs = [s.name for s in normalizer.context.states]
                else:
                    program.prefill_outputs = names
                    # Both graphs read one set of states, which one context graph makes.
                    if not same_graph(program.context, normalizer.context_graph):
                        raise CompileError("the prefill chunk reads another context than the decode step")
        return modified


class _Normalizer:
    def __init__(self, module: fx.GraphModule, max_seq_len: int) -> None:
        self.module, self.graph, self.max_seq_len = module, module.graph, max_seq_len
        self.position = placeholder(module.graph, "position")
        self.functional = Functionalizer(module, self.position)
        self.problems = self.functional.problems
        self._windows: dict[tuple[eager_attention.Mask, int, int], int | str] = {}
        self.context_graph: fx.GraphModule | None = None

    def run(self) -> list[StateSpec]:
        # Writes go first: the attentions below are found by the functional writes that they read.
        self.functional.run()
        writes = {w.node: w for w in self.functional.writes}
        self._check_indices()
        # Only the decode step is judged. The padding of a chunk passes the end of a table, see `limit_table_rows`.
        if shape_of(next(iter(self.graph.nodes)))[1] == 1:
            self.problems += short_tables(self.module, self.position, self.max_seq_len)
        self.context = ContextStates(self.module, NormalizeState.name)
        used: list[tuple[CacheWrite, StateRole, int]] = []
        layer = -1
        for site in eager_attention.attention_calls(self.graph):
            # Cross-attention belongs to the layer of the self-attention in front of it, and does not count as a layer.
            if self.context.reads(site):
                attempt(self.problems, partial(self.context.rewrite, site, layer))
                continue
            layer += 1
            used += self._attention(layer, site, writes)
        if not self.problems:
            # A refused attention leaves its caches without one, so they are only reported where nothing else was.
            read = ancestors(self.graph.output_node())
            lifted = {write.node for write, _, _ in used}
            left = {n: w.root for n, w in writes.items() if n in read and n not in lifted}
            self.problems += eager_attention.unrecognised(self.graph, left)
        if not self.problems:
            self.context_graph = attempt(self.problems, self.context.finish)
        CompileError.raise_all(self.problems)
        # The signature changes last, when nothing can be refused any more.
        state = [self._lift(write, role, layer) for write, role, layer in used]
        self.graph.eliminate_dead_code()
        # Masks and write indices are dead by now, and gone: their lookups need no limit.
        limit_table_rows(self.module, self.position, self.max_seq_len, NormalizeState.name)
        return state

    def _probe_positions(self, capacity: int, steps: int) -> list[int]:
        # Both ends and the middle: an index that is constant, or off by one, differs at one of them.
        last = capacity - steps
        return sorted({min(start, last) for start in (0, 1, capacity // 2, last)})

    def _at(self, node: fx.Node, position: int) -> Tensor | None:
        return evaluate(self.module, node, {self.position: torch.tensor([position])})

    def _check_indices(self) -> None:
        """Note the buffers of another size or index than caches have: one problem for all that are wrong alike."""
        wrong: dict[tuple[str, str], dict[str, fx.Node]] = defaultdict(dict)
        for write in self.functional.writes:
            capacity, steps = shape_of(write.buffer)[2], shape_of(node_arg(write.node, 1))[2]
            if capacity != self.max_seq_len:
                what = f"holds {capacity} positions, but max_seq_len is {self.max_seq_len}"
                hint = f"give max_seq_len={capacity}, or build the module with {self.max_seq_len} positions"
                wrong[what, hint].setdefault(write.root, write.origin)
            elif not all(self._is_written_at(write, start, steps) for start in self._probe_positions(capacity, steps)):
                key = "is not written at cache_position", "write new keys and values at cache_position"
                wrong[key].setdefault(write.root, write.origin)
        for (what, hint), (first, *others) in ((key, list(found)) for key, found in wrong.items()):
            more = f" (and {len(others)} more)" if others else ""
            self._problem(wrong[what, hint][first], f"buffer '{first}'{more} {what}", hint)

    def _is_written_at(self, write: CacheWrite, start: int, steps: int) -> bool:
        index = self._at(write.index, start)
        return index is not None and torch.equal(index.reshape(-1), torch.arange(start, start + steps))

    def _attention(
        self, layer: int, site: eager_attention.AttentionCall, writes: dict[fx.Node, CacheWrite]
    ) -> list[tuple[CacheWrite, StateRole, int]]:
        node, query = site.node, site.query
        keys, values = (self._cache_of(n, writes) for n in (site.key, site.value))
        if keys is None or values is None:
            self._refuse_keys(layer, site)
            return []
        window = self._window(site, keys.node)
        if isinstance(window, str):
            hint = "use a causal mask over cache positions, with or without a sliding window, and no dropout"
            self._problem(node, f"layer {layer}: {window}", hint)
            return []
        arguments: tuple[Any, ...] = (query, keys.node, values.node, self.position, site.scale)
        target, softcap = torch.ops.fastcar.attention.default, () if site.softcap is None else (site.softcap,)
        # A window as long as the cache hides nothing, and is plain causal attention.
        if window < shape_of(keys.node)[2]:
            target, arguments = torch.ops.fastcar.window_attention.default, (*arguments, 0, window)
            # `sink_query` stands before `softcap` in the schema of `window_attention`.
            softcap = (None, *softcap) if softcap else ()
        site.replace(NormalizeState.name, target, *arguments, *softcap)
        return [(keys, StateRole.KEY_CACHE, layer), (values, StateRole.VALUE_CACHE, layer)]

    def _refuse_keys(self, layer: int, site: eager_attention.AttentionCall) -> None:
        """Say what is attended to instead of a cache: a context that does not follow from the tokens, or other keys."""
        inputs = {n for n in ancestors(site.key) if n.op == "placeholder"} - {self.position}
        if inputs:
            what = f"layer {layer}: the key or value of this attention is not a static cache written in this step"
            hint = "attend over the whole written static cache"
        else:
            what = "cross-attention: its keys are a fixed context, which does not follow from the tokens of the step"
            hint = "take the context as the input `context` [B, L, C] of forward, or put it in front of the prompt"
        self._problem(site.node, what, hint)

    def _cache_of(self, node: fx.Node, writes: dict[fx.Node, CacheWrite]) -> CacheWrite | None:
        """The write behind a key or value, seen through the views that share key/value heads among query heads."""
        current = node
        # `repeat_kv` may stand between the write and attention: the views are proved below, all at once.
        while current not in writes:
            if not is_op(current, *HEAD_VIEWS) and not is_same(current):
                return None
            current = node_arg(current, 0)
        if node is not current and not is_shared(self.module, node, current, shape_of(node)[1]):
            return None
        return writes[current]

    def _window(self, site: eager_attention.AttentionCall, cache: fx.Node) -> int | str:
        """Return how many positions a query sees, itself included: at most the cache's. A text: what is wrong."""
        if site.problem:
            return site.problem
        if site.mask is None:
            return "attention has no mask, so it sees cache rows that were not written yet"
        key = (site.mask, shape_of(cache)[2], shape_of(site.query)[2])
        if key not in self._windows:
            self._windows[key] = self._window_of_mask(*key)
        return self._windows[key]

    def _window_of_mask(self, mask: eager_attention.Mask, capacity: int, steps: int) -> int | str:
        unknown = "the attention mask depends on more than the position"
        last = self._mask_at(mask, capacity - steps)
        if last is None:
            return unknown
        # The last position sees as many positions as the window has.
        window = max(1, int(_seen(last)[..., -1, :].reshape(-1, capacity)[0].sum()))
        # Where the position reaches the window's length, the first
        # key leaves it: a mask that is off by one differs there.
        for start in [*self._probe_positions(capacity, steps), window - 1, window, window + 1]:
            value = self._mask_at(mask, min(start, capacity - steps))
            if value is None:
                return unknown
            if problem := _mask_problem(value, min(start, capacity - steps), steps, window):
                return problem
        return window

    def _mask_at(self, mask: eager_attention.Mask, start: int) -> Tensor | None:
        """Return a mask at a position: bool, True where a query sees, or what is added."""
        value = self._at(mask.node, start)
        if value is None or not mask.hidden:
            return value
        return ~value if value.dtype == torch.bool else -value

    def _lift(self, write: CacheWrite, role: StateRole, layer: int) -> StateSpec:
        name = f"{role}_{layer}"
        val = write.buffer.meta["val"]
        node = add_placeholder(self.graph, name, val.shape, val.dtype, NormalizeState.name)
        mark(node, layer, role)
        # The buffer is the module's attribute, or its transpose. The placeholder [B, heads, S, D] replaces both.
        write.node.replace_input_with(write.buffer, node)
        set_outputs(self.graph, [*output_nodes(self.graph), write.node])
        return StateSpec(name, tuple(val.shape), val.dtype, role, layer)

    def _problem(self, node: fx.Node, what: str, hint: str) -> None:
        self.problems.append(error_at(node, what, hint))


def _seen(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > eager_attention.MASKED


def _mask_problem(mask: Tensor, start: int, steps: int, window: int) -> str:
    """Return what is wrong with a mask at a position, if a query sees the last `window` positions; else nothing."""
    seen, capacity = _seen(mask), mask.shape[-1]
    columns, rows = torch.arange(capacity)[None, :], torch.arange(start, start + steps)[:, None]
    expected = (columns <= rows) & (columns > rows - window)
    if not torch.equal(seen.expand(*seen.shape[:-2], steps, capacity), expected.expand(*seen.shape[:-2], -1, -1)):
        return f"the attention mask at position {start} is not causal over the cache, with or without a sliding window"
    # An additive mask must add 0 where a query sees: ALiBi adds a slope there.
    if mask.dtype != torch.bool and bool((mask[seen] != 0).any()):
        return "the attention mask adds a bias, which is not supported"
    return ""
