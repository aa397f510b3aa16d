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
  const el = (page.el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children));

  /* An SVG element. */
  page.svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  page.bytes = (count) => {
    const units = { GB: 1e9, MB: 1e6, kB: 1e3 };
    const unit = Object.keys(units).find((name) => count >= units[name]);
    return unit ? `${(count / units[unit]).toFixed(1)} ${unit}` : `${count} B`;
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
    const code = (text) => el("code", {}, text);
    const record = code("fastcar run ARTIFACT --prompt TOKENS --trace trace.npy");
    const show = code("fastcar inspect ARTIFACT --html FILE --trace trace.npy");
    return ["Record a run with ", record, " and show it with ", show, "."];
  };

  /* A framed part of a tab. */
  page.card = (title, note, ...children) => {
    const muted = note && el("p", { class: "muted" }, note);
    return el("section", { class: "card" }, el("h2", {}, title), muted, ...children);
  };

  /* A card with a table. Columns are titles, with a class behind a colon: "file | size:number"; cells are text or
     elements. */
  page.table = (title, note, columns, rows) => {
    const [titles, kinds] = [0, 1].map((part) => columns.split(" | ").map((column) => column.split(":")[part] ?? ""));
    const cell = (content, n) => el("td", { class: kinds[n] }, content);
    const head = titles.map((text, n) => el("th", { scope: "col", class: kinds[n] }, text));
    const body = rows.map((cells) => el("tr", {}, cells.map(cell)));
    const table = el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
    const look = { class: "scroll", tabindex: "0", role: "region", "aria-label": title };
    return page.card(title, note, el("div", look, table));
  };

  const list = (kind) => (facts) => {
    const lines = facts.map((f) => el("div", {}, el("dt", {}, f.label), el("dd", {}, f.value)));
    return el("dl", { class: kind }, lines);
  };

  /* Figures in large type; labels and values in two columns. */
  [page.figures, page.facts] = [list("figures"), list("facts")];

  /* A bar of parts and its key; of each part its name, text, value as text, share of the bar, and colour. */
  page.stack = (parts) => {
    const look = (part, more) => ({ style: { background: `var(${part.colour})`, ...more } });
    const bar = parts.map((p) => page.tip(el("i", look(p, { width: `${100 * p.share}%` })), `${p.text}: ${p.value}`));
    const keys = parts.map((p) =>
      el("li", {}, el("i", { class: "swatch", ...look(p) }), `${p.text} `, el("b", {}, p.value)),
    );
    const label = parts.map((p) => `${p.name} ${p.value}`).join(", ");
    return [el("div", { class: "stack", role: "img", "aria-label": label }, bar), el("ul", { class: "keys" }, keys)];
  };

  /* A share as a bar with its number; nothing for no share. */
  page.share = (value) => {
    if (value === undefined || value === null) return "";
    const bar = el("i", { style: { width: `${Math.min(100, 100 * value)}%` } });
    return el("span", { class: "share" }, bar, el("b", {}, page.percent(value)));
  };

  page.button = (text, label, onclick) =>
    el("button", { type: "button", "aria-label": label, title: label, onclick }, text);

  /* Buttons of which one is pressed: name -> text. `mark(name)` shows one as pressed. */
  page.choice = (style, kind, label, options, choose) => {
    const buttons = Object.entries(options).map(([name, text]) =>
      el("button", { type: "button", [`data-${kind}`]: name, onclick: () => choose(name) }, text),
    );
    const group = el("div", { class: style, role: "group", "aria-label": label }, buttons);
    group.mark = (name) => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset[kind] === name));
    };
    return group;
  };

  /* Gives a canvas its size; returns pixels per unit of it. */
  page.resize = (canvas, width, height) => {
    const ratio = Math.min(devicePixelRatio || 1, 2);
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    canvas.style.setProperty("height", `${height}px`);
    return ratio;
  };

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

  /* What a node is where the page's data say nothing of it. */
  const TEXTS = ["made_by", "source", "module", "args", "branch", "role", "twin", "reason"];
  const BLANK = { inputs: [], weights: [], branches: [], change: "kept", layer: null };
  for (const name of TEXTS) BLANK[name] = "";

  function index(graph, side, step) {
    const own = (node, place) => [node.id, { ...BLANK, ...node, place, side, step, users: [] }];
    const nodes = new Map(graph.nodes.map(own));
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
