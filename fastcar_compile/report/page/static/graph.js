/* The two graphs side by side: groups that unfold together, runs of equal layers, zoom. */
(() => {
  "use strict";
  const { el } = page;
  const SIDES = ["before", "after"];
  const TITLES = { before: "Before the passes", after: "After the passes" };
  const SMALLEST = 0.78;
  const NARROW = matchMedia("(max-width: 900px)");
  const shown = () => (NARROW.matches ? "after" : "both");
  const open = new Set();
  const panes = {};
  const GRAPHS = { before: "before", both: "both", after: "after" };
  const MARKS = { added: "+ inserted", replaced: "~ replaced", removed: "− removed" };
  const sides = page.choice("which", "side", "Graph shown", GRAPHS, showSide);
  const steps = page.choice("which steps", "step", "Step shown", { decode: "decode", prefill: "prefill" }, setStep);
  let zoom = 1;
  let fit = true;

  /* Groups and runs: of equal layers in a row, all behind the first are one line. */
  function rows(side) {
    const found = [];
    const seen = new Map();
    for (const group of page.graphs[side].groups) {
      const last = found[found.length - 1];
      const like = group.layer === null ? undefined : seen.get(group.key);
      if (like !== undefined && last?.run && last.key === group.key) last.run.push(group);
      else if (like !== undefined) found.push({ key: group.key, like, run: [group] });
      else found.push({ group });
      if (group.layer !== null && like === undefined) seen.set(group.key, group.layer);
    }
    return found;
  }

  function changes(side, group) {
    const nodes = group.nodes.map((id) => page.node(side, id)).filter((node) => node.kind !== "weight");
    return Object.entries(MARKS).map(([kind, text]) => {
      const [count, [mark, word]] = [nodes.filter((node) => node.change === kind).length, text.split(" ")];
      return count ? el("span", { class: `chip ${kind}`, title: `${count} ${word}` }, `${mark}${count}`) : null;
    });
  }

  function note(side, group) {
    const ops = group.nodes.filter((id) => ["op", "cond"].includes(page.node(side, id).kind)).length;
    const line = page.data.replay.layers[group.layer ?? -1];
    const replays = side === "after" && page.step === "decode" && line?.replays;
    return `${page.plural(ops, "operator")}${replays ? ` · replays at ${line.calibrated || line.threshold}` : ""}`;
  }

  function header(name, title, detail, chips) {
    const look = { type: "button", class: "fold", "aria-expanded": "false", "data-group": name };
    const parts = [
      el("span", { class: "arrow", "aria-hidden": "true" }, "▸"),
      el("span", { class: "group-title" }, title),
      el("span", { class: "muted" }, detail),
      el("span", { class: "chips" }, chips),
    ];
    return el("h3", {}, el("button", { ...look, onclick: () => page.toggle(name) }, parts));
  }

  function groupElement(side, group, like) {
    const detail = like === undefined ? note(side, group) : `equal to layer ${like}`;
    const head = header(group.title, group.title, detail, changes(side, group));
    return el("section", { class: "group", "data-name": group.title }, head, el("div", { class: "canvas" }));
  }

  function runElement(side, row) {
    const [first, last] = [row.run[0], row.run[row.run.length - 1]];
    if (row.run.length === 1) return groupElement(side, first, row.like);
    const name = `layers ${first.layer} to ${last.layer}`;
    const title = `layers ${first.layer} – ${last.layer}`;
    const detail = `${row.run.length} layers, equal to layer ${row.like}`;
    const members = row.run.map((group) => groupElement(side, group, row.like));
    const head = header(name, title, detail, changes(side, first));
    return el("section", { class: "run", "data-name": name }, head, el("div", { class: "members" }, members));
  }

  function drawPane(side) {
    const groups = rows(side).map((row) => (row.group ? groupElement(side, row.group) : runElement(side, row)));
    const body = el("div", { class: "pane-body", tabindex: "-1" }, el("div", { class: "groups" }, groups));
    const count = el("span", { class: "muted" }, `${page.graphs[side].operators} operators`);
    const title = el("h2", {}, TITLES[side], count);
    panes[side] = el("section", { class: `pane ${side}`, "aria-label": TITLES[side] }, title, body);
    panes[side].body = body;
    return panes[side];
  }

  const inPanes = (selector) => panes.after?.querySelector(selector) ?? panes.before?.querySelector(selector);

  /* The run that holds a group, or nothing. */
  const runOf = (name) => {
    const member = inPanes(`.members > [data-name="${CSS.escape(name)}"]`);
    return member?.closest(".run").dataset.name;
  };

  /* Unfolds or folds a group or a run in both panes. */
  page.toggle = (name, wanted = !open.has(name)) => {
    if (wanted) open.add(name);
    else open.delete(name);
    for (const side of SIDES) {
      const section = panes[side].querySelector(`[data-name="${CSS.escape(name)}"]`);
      if (!section) continue;
      section.classList.toggle("open", wanted);
      section.querySelector(".fold").setAttribute("aria-expanded", String(wanted));
      const canvas = section.querySelector(":scope > .canvas");
      if (canvas && wanted && !canvas.firstChild) fillCanvas(side, name, canvas);
    }
    resize();
  };

  function fillCanvas(side, name, canvas) {
    const graph = page.graphs[side];
    const group = graph.groups.find((g) => g.title === name);
    const choose = (box) => (box.kind === "module" ? unfoldModule(box) : page.select(side, box.node.id));
    canvas.replaceChildren(page.draw(page.layout(graph, group), `${side}-${group.layer ?? group.key}`, choose));
  }

  /* Draws groups again; those that are folded are drawn when they are unfolded. */
  function redraw(names) {
    for (const side of SIDES) {
      for (const section of panes[side].querySelectorAll(".group")) {
        if (names && !names.has(section.dataset.name)) continue;
        const canvas = section.querySelector(":scope > .canvas");
        canvas.replaceChildren();
        if (open.has(section.dataset.name)) fillCanvas(side, section.dataset.name, canvas);
      }
    }
    resize();
  }

  function unfoldModule(box) {
    page.openModules.add(box.path);
    const homes = SIDES.map(
      (side) => page.graphs[side].home.get(box.node.id) ?? page.graphs[side].home.get(box.node.twin),
    );
    redraw(new Set(homes.filter(Boolean).map((home) => home.title)));
    inPanes(`[data-id="${CSS.escape(box.node.id)}"]`)?.focus();
  }

  function foldModules(button) {
    page.foldModules = !page.foldModules;
    page.openModules.clear();
    button.setAttribute("aria-pressed", String(page.foldModules));
    redraw();
  }

  function resize() {
    for (const side of SIDES) {
      const room = panes[side].body.clientWidth - 26;
      for (const drawing of panes[side].querySelectorAll(".canvas > svg")) {
        const { width, height } = drawing.fastcar;
        const scale = fit ? Math.max(SMALLEST, Math.min(1, room / width)) : zoom;
        drawing.setAttribute("width", Math.round(width * scale));
        drawing.style.setProperty("margin-left", `${Math.max(0, (room - width * scale) / 2)}px`);
        drawing.setAttribute("height", Math.round(height * scale));
        if (fit && room > 0) zoom = scale;
        if (!drawing.placed && room > 0) {
          drawing.placed = true;
          panes[side].body.scrollLeft = drawing.fastcar.start * scale - room / 2;
        }
      }
    }
  }

  function setZoom(factor) {
    fit = factor === null;
    if (!fit) zoom = Math.max(0.25, Math.min(2, zoom * factor));
    resize();
  }

  page.clearMarks = () => {
    for (const mark of document.querySelectorAll(".pane .selected, .pane .twin, .pane .near"))
      mark.classList.remove("selected", "twin", "near");
  };

  /* The box of a node; its group and the run around that are unfolded first. */
  function reveal(side, id) {
    const graph = page.graphs[side];
    const node = graph.nodes.get(id);
    const shown = node?.kind === "weight" ? graph.nodes.get(node.users[0]) : node;
    const home = graph.home.get(shown?.id);
    if (!home) return null;
    const run = runOf(home.title);
    if (run && !open.has(run)) page.toggle(run, true);
    if (!open.has(home.title)) page.toggle(home.title, true);
    const place = `[data-name="${CSS.escape(home.title)}"] > .canvas [data-id="${CSS.escape(shown.id)}"]`;
    const box = () => panes[side].querySelector(place);
    if (!box() && shown.module) {
      page.openModules.add(shown.module);
      redraw(new Set([home.title]));
    }
    return box();
  }

  /* The nearest node that a new one reads, directly or over others, and that the other graph has too. */
  function nearest(side, node) {
    const seen = new Set([node.id]);
    const left = [...node.inputs];
    while (left.length) {
      const other = page.node(side, left.shift());
      if (!other || seen.has(other.id)) continue;
      seen.add(other.id);
      if (other.twin && other.layer === node.layer && other.kind === "op") return other.twin;
      left.push(...other.inputs);
    }
    return "";
  }

  function bring(element) {
    if (!element) return;
    const tall = element.getBoundingClientRect().height > element.closest(".pane-body").clientHeight;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    element.scrollIntoView({ block: tall ? "start" : "center", inline: "center", behavior: calm ? "auto" : "smooth" });
  }

  /* Shows a node: in its graph, its twin in the other one, and its details. */
  page.select = (side, id, step = page.step) => {
    page.showTab("graph");
    setStep(step);
    bringSide(side);
    const node = page.node(side, id);
    const other = SIDES.find((name) => name !== side);
    page.details(side, node);
    page.clearMarks();
    const place = node.twin || nearest(side, node);
    const twin = place ? reveal(other, place) : null;
    twin?.classList.add(node.twin ? "twin" : "near");
    const element = reveal(side, id);
    element?.classList.add("selected");
    for (const shown of [twin, element]) bring(shown);
  };

  /* Shows one graph or both; on a narrow screen "both" is the one after the passes. */
  function showSide(side) {
    document.querySelector(".panes").dataset.side = side;
    sides.mark(side);
    resize();
  }

  /* Shows the graph of one side, next to the other one where both are shown. */
  function bringSide(side) {
    const view = document.querySelector(".panes");
    if (view.dataset.side === "both" && !NARROW.matches) return;
    if (view.dataset.side !== side) showSide(side);
  }

  /* Unfolds every distinct part, or folds all. */
  function every(wanted) {
    for (const row of rows("after")) {
      if (row.group) page.toggle(row.group.title, wanted);
      else if (!wanted) for (const group of row.run) page.toggle(group.title, false);
    }
  }

  function legend() {
    const chips = Object.entries(MARKS).map(([kind, text]) => el("span", { class: `chip ${kind}` }, text));
    const families = ["linear", "attention", "cache", "gate"].map((kind) =>
      el("span", { class: "family" }, el("i", { class: `swatch ${kind}` }), kind),
    );
    return el("div", { class: "legend", "aria-label": "Colours" }, chips, families);
  }

  function tools() {
    const modules = page.button("modules", "Draw a norm and other small modules as one box", (event) =>
      foldModules(event.target),
    );
    modules.setAttribute("aria-pressed", "true");
    return el(
      "div",
      { class: "tools", role: "group", "aria-label": "View" },
      modules,
      page.button("fold all", "Fold every part", () => every(false)),
      page.button("unfold", "Unfold every distinct part", () => every(true)),
      page.button("−", "Zoom out", () => setZoom(1 / 1.2)),
      page.button("+", "Zoom in", () => setZoom(1.2)),
      page.button("fit", "Fit to the width", () => setZoom(null)),
    );
  }

  /* Shows the decode step or the prefill. */
  function setStep(step) {
    if (step === page.step) return;
    page.step = step;
    page.graphs = page.steps[step];
    page.closeDetails();
    open.clear();
    fill();
    steps.mark(step);
  }

  /* Both panes with the first layer unfolded. */
  function fill() {
    document.querySelector(".panes").replaceChildren(...SIDES.map(drawPane));
    const layers = page.graphs.after.groups.filter((g) => g.layer !== null);
    page.toggle((layers[0] ?? page.graphs.after.groups[0]).title, true);
  }

  page.addTab("graph", "Graph", (panel) => {
    panel.append(
      el("div", { class: "toolbar" }, sides, page.steps.prefill && steps, legend(), tools()),
      el("div", { class: "panes", "data-side": shown() }),
      page.detailsPanel(),
    );
    sides.mark(shown());
    steps.mark(page.step);
    fill();
    addEventListener("resize", resize);
  });
})();
