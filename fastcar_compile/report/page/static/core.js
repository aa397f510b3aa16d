/* The page's data, elements and number formats. Text always goes into text nodes, never into markup. */
const page = { data: JSON.parse(document.getElementById("data").textContent), tabs: [] };

(() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
    return element;
  }

  /* An HTML element; children are elements or text. */
  page.el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

  /* An SVG element. */
  page.svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  page.bytes = (count) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let value = count;
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) {
      value /= 1024;
      unit += 1;
    }
    return `${unit && value < 100 ? value.toFixed(value < 10 ? 2 : 1) : Math.round(value)} ${units[unit]}`;
  };

  page.percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 2 : 1)} %`;

  page.time = (seconds) => {
    if (seconds >= 1) return `${seconds.toFixed(3)} s`;
    if (seconds >= 1e-3) return `${(seconds * 1e3).toFixed(3)} ms`;
    return `${(seconds * 1e6).toFixed(2)} µs`;
  };

  page.plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

  /* Where a layer's number is that of the layers, the head is meant. */
  page.layerText = (layer) => (layer < page.data.replay.layers.length ? `layer ${layer}` : "head");

  /* How to record what replays, and to show it. */
  page.recording = () => {
    const code = (text) => page.el("code", {}, text);
    const record = code("fastcar run ARTIFACT --prompt TOKENS --trace trace.npy");
    const show = code("fastcar inspect ARTIFACT --html FILE --trace trace.npy");
    return ["Record a run with ", record, " and show it with ", show, "."];
  };

  /* A table; columns are [title, class]; cells are text or elements. */
  page.table = (caption, columns, rows) => {
    const { el } = page;
    const head = columns.map(([title, kind]) => el("th", { scope: "col", class: kind }, title));
    const body = rows.map((cells) =>
      el(
        "tr",
        {},
        cells.map((cell, n) => el("td", { class: columns[n][1] }, cell)),
      ),
    );
    return el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)),
    );
  };

  /* A framed part of a tab. */
  page.card = (title, note, ...children) =>
    page.el(
      "section",
      { class: "card" },
      page.el("h2", {}, title),
      note ? page.el("p", { class: "muted" }, note) : null,
      ...children,
    );

  /* Figures in large type. */
  page.figures = (facts) =>
    page.el(
      "dl",
      { class: "figures" },
      facts.map((f) => page.el("div", {}, page.el("dt", {}, f.label), page.el("dd", {}, f.value))),
    );

  /* Labels and values in two columns. */
  page.facts = (facts) =>
    page.el(
      "dl",
      { class: "facts" },
      facts.map((f) => page.el("div", {}, page.el("dt", {}, f.label), page.el("dd", {}, f.value))),
    );

  /* Shows a text beside the pointer or the focused element. `text` may be a function of the event. */
  page.tip = (element, text) => {
    const box = document.getElementById("tip");
    const show = (event) => {
      const content = typeof text === "function" ? text(event) : text;
      box.hidden = !content;
      if (!content) return;
      box.textContent = content;
      const place =
        event.clientX === undefined ? element.getBoundingClientRect() : { left: event.clientX, bottom: event.clientY };
      const room = document.documentElement.clientWidth - box.offsetWidth - 8;
      const below = place.bottom + 14 + box.offsetHeight < innerHeight;
      box.style.setProperty("left", `${Math.max(8, Math.min(place.left + 12, room))}px`);
      box.style.setProperty("top", `${below ? place.bottom + 14 : place.bottom - box.offsetHeight - 14}px`);
    };
    const hide = () => {
      box.hidden = true;
    };
    for (const name of ["pointermove", "focus"]) element.addEventListener(name, show);
    for (const name of ["pointerleave", "blur", "pointerdown"]) element.addEventListener(name, hide);
    return element;
  };

  function index(graph, side, step) {
    const nodes = new Map(
      graph.nodes.map((node, place) => [
        node.id,
        {
          inputs: [],
          weights: [],
          branches: [],
          made_by: "",
          source: "",
          module: "",
          change: "kept",
          args: "",
          branch: "",
          role: "",
          twin: "",
          reason: "",
          layer: null,
          ...node,
          place,
          side,
          step,
          users: [],
        },
      ]),
    );
    for (const node of nodes.values()) {
      for (const id of [...node.inputs, ...node.weights]) nodes.get(id)?.users.push(node.id);
    }
    const conds = new Map([...nodes.values()].flatMap((node) => node.branches.map((branch) => [branch, node.id])));
    const results = new Map();
    for (const [name, id] of Object.entries(graph.outputs)) results.set(id, [...(results.get(id) ?? []), name]);
    const groups = graph.groups.map((group) => ({ layer: null, ...group }));
    const home = new Map(groups.flatMap((group) => group.nodes.map((id) => [id, group])));
    const operators = graph.nodes.filter((n) => n.kind === "op" || n.kind === "cond").length;
    return { side, step, nodes, conds, results, home, groups, operators };
  }

  const both = (step, before, after) => ({ before: index(before, "before", step), after: index(after, "after", step) });
  const { before, after, prefill_before, prefill_after } = page.data;
  page.steps = { decode: both("decode", before, after) };
  if (prefill_before) page.steps.prefill = both("prefill", prefill_before, prefill_after);

  /* The graphs that are shown: those of a decode step, or of a chunk of the prompt. */
  page.step = "decode";
  page.graphs = page.steps.decode;
  page.node = (side, id) => page.graphs[side].nodes.get(id);
})();
