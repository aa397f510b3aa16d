/* Where nodes lie. dagre ranks the nodes of one group; a `cond` has the size of its branches, which are ranked alone. */
(() => {
  "use strict";
  const HEIGHT = 36;
  const PILL = 24;
  const TITLE = 26;
  const GAP = 12;
  const measure = document.createElement("canvas").getContext("2d");
  const widths = new Map();

  function textWidth(text, font) {
    const key = font + text;
    if (!widths.has(key)) {
      measure.font = font;
      widths.set(key, measure.measureText(text).width);
    }
    return widths.get(key);
  }

  /* `linear` of `aten.linear.default`. */
  page.stem = (op) => (op.split(".").length > 2 ? op.split(".")[1] : op.replace(/^operator\./, ""));

  /* Shape as `2×1×64`; the type only where it is not float32. */
  page.shapeText = (type) =>
    type.replace(/float32 /g, "").replace(/\[([^\]]*)\]/g, (_, dims) => dims.split(", ").join("×") || "scalar");

  /* The two lines of a node. */
  page.lines = (node) => {
    const shape = page.shapeText(node.type);
    const name = node.weights.length && node.module ? node.module.split(".").pop() : "";
    return [page.stem(node.op), name && shape ? `${name}  ${shape}` : name || shape];
  };

  function sizeOf(node) {
    const [title, detail] = page.lines(node);
    const mark = node.change === "kept" ? 0 : 14;
    const width = Math.max(textWidth(title, "600 12px system-ui") + mark, textWidth(detail, "10.5px system-ui"));
    return { width: Math.max(64, Math.ceil(width * 1.04) + 22), height: HEIGHT };
  }

  const pillSize = (label) => ({ width: Math.ceil(textWidth(label, "11px system-ui") * 1.06) + 24, height: PILL });

  /* Whether an outer value is drawn once per reader: those that every layer reads would cross the whole drawing. */
  function shared(graph, node) {
    if (node.kind === "input") return true;
    const homes = new Set(node.users.map((id) => graph.home.get(id)?.title));
    return homes.size > 2;
  }

  /* Modules that are drawn as one box although a reader unfolded others: paths of those that are unfolded. */
  page.openModules = new Set();
  page.foldModules = true;

  /* Whether an operator of a module reads, over others, what the module computes: one box would then be a circle. */
  function circular(graph, own, members) {
    const seen = new Set();
    const left = own.flatMap((node) => node.users).filter((id) => members.has(id) && !own.some((n) => n.id === id));
    while (left.length) {
      const id = left.pop();
      if (seen.has(id)) continue;
      seen.add(id);
      for (const user of graph.nodes.get(id).users) {
        if (own.some((n) => n.id === user)) return true;
        if (members.has(user)) left.push(user);
      }
    }
    return false;
  }

  /* What a module without modules inside computes, such as a norm: id -> its box, where there are three operators. */
  function modules(graph, members) {
    const found = new Map();
    if (!page.foldModules) return found;
    const ids = new Set(members.map((node) => node.id));
    const groups = Map.groupBy(
      members.filter((n) => n.kind === "op" && n.module && n.change === "kept"),
      (n) => n.module,
    );
    for (const [path, own] of groups) {
      const outer = members.some((n) => n.module.startsWith(`${path}.`));
      const others = own.some((n) => page.family(n) !== "plain");
      if (own.length < 3 || outer || others || page.openModules.has(path) || circular(graph, own, ids)) continue;
      const last = own[own.length - 1];
      const [title, detail] = [path.split(".").pop(), `${own.length} operators  ${page.shapeText(last.type)}`];
      const widest = Math.max(textWidth(title, "600 12px system-ui"), textWidth(detail, "10.5px system-ui"));
      const size = { width: Math.ceil(widest * 1.04) + 36, height: HEIGHT };
      const box = { kind: "module", node: last, path, title, detail, ...size };
      for (const node of own) found.set(node.id, box);
    }
    return found;
  }

  /* What one drawing holds: boxes in a fixed order and edges between their places. */
  function content(graph, members, inside) {
    const boxes = [];
    const place = new Map();
    const edges = [];
    const add = (box) => boxes.push(box) - 1;
    const folded = modules(graph, members);
    for (const node of members) {
      const module = folded.get(node.id);
      if (module) {
        module.place ??= add(module);
        place.set(node.id, module.place);
      } else if (node.kind === "cond") place.set(node.id, add({ kind: "cond", node, ...condBox(graph, node) }));
      else if (node.kind === "op") place.set(node.id, add({ kind: "op", node, ...sizeOf(node) }));
      else place.set(node.id, add({ kind: node.kind, node, label: node.id, ...pillSize(node.id) }));
    }
    const outer = new Map();
    for (const node of members) {
      for (const id of node.inputs) {
        const source = graph.nodes.get(id);
        let from = place.get(id);
        if (from === undefined && source) {
          const key = shared(graph, source) && !inside ? `${id} ${node.id}` : id;
          const label = id.split("/").pop();
          if (!outer.has(key)) outer.set(key, add({ kind: "port", node: source, label, ...pillSize(label) }));
          from = outer.get(key);
        }
        if (from !== undefined && from !== place.get(node.id)) edges.push([from, place.get(node.id)]);
      }
    }
    if (!inside) leaving(graph, members, place, add, edges);
    return { boxes, edges };
  }

  /* Pills for what the next group reads and for the results of the step. */
  function leaving(graph, members, place, add, edges) {
    for (const node of members) {
      const leave = (kind, to, label) => {
        edges.push([place.get(node.id), add({ kind, node: to, label, ...pillSize(label) })]);
      };
      for (const name of graph.results.get(node.id) ?? [])
        leave(page.data.memory.state.some((s) => s.name === name) ? "state-out" : "result", node, name);
      const readers = node.users
        .map((id) => graph.nodes.get(id))
        .filter((user) => graph.home.get(user.id) !== graph.home.get(node.id));
      const homes = new Map(readers.map((user) => [graph.home.get(user.id)?.title, user]));
      if (homes.size > 2 || node.kind === "input" || node.kind === "state") continue; // every layer reads it: no pill
      for (const [title, user] of homes) leave("next", user, `to ${title}`);
    }
  }

  function condBox(graph, node) {
    const parts = node.branches.map((branch) => {
      const members = [...graph.nodes.values()].filter((n) => n.branch === branch && n.kind !== "weight");
      return { branch, ...arrange(content(graph, members, true)) };
    });
    const width = parts.reduce((sum, part) => sum + Math.max(part.width, 120) + GAP, GAP);
    const height = Math.max(...parts.map((part) => part.height)) + 2 * TITLE + GAP;
    return { parts, width, height };
  }

  function arrange({ boxes, edges }) {
    const graph = new dagre.graphlib.Graph({ multigraph: false });
    graph.setGraph({ rankdir: "TB", nodesep: 10, ranksep: 22, edgesep: 4, marginx: 8, marginy: 8 });
    graph.setDefaultEdgeLabel(() => ({}));
    boxes.forEach((box, place) => graph.setNode(String(place), { width: box.width, height: box.height }));
    for (const [from, to] of edges) graph.setEdge(String(from), String(to));
    dagre.layout(graph);
    const at = boxes.map((_, place) => {
      const n = graph.node(String(place));
      return { x: n.x - n.width / 2, y: n.y - n.height / 2 };
    });
    const lines = graph
      .edges()
      .map((edge) => ({ from: Number(edge.v), to: Number(edge.w), points: graph.edge(edge).points }));
    return { boxes, at, lines, width: graph.graph().width || 80, height: graph.graph().height || 40 };
  }

  const known = new Map();

  /* The drawing of a group. Layers of equal structure share their places. */
  page.layout = (graph, group) => {
    const members = group.nodes.map((id) => graph.nodes.get(id)).filter((n) => n.kind !== "weight" && !n.branch);
    const used = members.filter(
      (n) => n.kind === "op" || n.kind === "cond" || n.users.length || graph.results.has(n.id),
    );
    const parts = content(graph, used, false);
    const shape = (box) => box.kind + (box.parts ? box.parts.map((part) => part.boxes.map(shape)) : "");
    const key = [graph.step, graph.side, group.key, parts.boxes.map(shape), parts.edges].join(" ");
    const before = known.get(key);
    if (before) {
      const size = (n) => ({ width: before.boxes[n].width, height: before.boxes[n].height });
      return { ...before, boxes: parts.boxes.map((box, n) => ({ ...box, ...size(n) })) };
    }
    const found = arrange(parts);
    known.set(key, found);
    return found;
  };

  page.condTitle = TITLE;
  page.condGap = GAP;
})();
