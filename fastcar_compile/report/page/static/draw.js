/* A laid-out group as SVG. Every box is a button; arrow keys follow the edges. */
(() => {
  "use strict";
  const { svg } = page;
  const MARKS = { added: "+", removed: "−", replaced: "~" };
  const WORDS = { added: "inserted", removed: "removed", replaced: "replaced", kept: "" };

  const FAMILIES = [
    ["linear", /^(linear|offloaded_linear|offloaded_mlp)/],
    ["attention", /(attention|sdpa|scaled_dot)/],
    ["gate", /^(gate|tas|input_delta|learned_score|constant_score|random_score|offloaded_gate)/],
    ["cache", /(cache_write|ring_|slot_|^limit)/],
  ];

  /* Kind of work, for the colour at the left edge. */
  page.family = (node) =>
    node.kind === "cond" ? "cond" : (FAMILIES.find(([, test]) => test.test(page.stem(node.op)))?.[0] ?? "plain");

  function path(points, top) {
    const at = points.map((p) => [p.x, p.y]);
    at[at.length - 1][1] = top;
    if (at.length < 3) return `M${at.map((p) => p.join()).join("L")}`;
    let text = `M${at[0].join()}`;
    for (let n = 1; n < at.length - 1; n += 1) {
      const end = n === at.length - 2 ? at[n + 1] : [(at[n][0] + at[n + 1][0]) / 2, (at[n][1] + at[n + 1][1]) / 2];
      text += `Q${at[n].join()} ${end.join()}`;
    }
    return text;
  }

  function label(box) {
    const { node } = box;
    if (box.kind === "port") return `input ${node.id}, made outside of this part`;
    if (box.kind === "next") return box.label;
    if (box.kind === "result" || box.kind === "state-out") return `result ${box.label}`;
    if (box.kind === "module") return `module ${box.path}, ${box.detail}, folded`;
    const made = node.made_by && `by ${node.made_by}`;
    return [page.stem(node.op), node.id, node.type, WORDS[node.change], made].filter(Boolean).join(", ");
  }

  function text(x, y, content, kind, anchor = "start") {
    return svg("text", { x, y, class: kind, "text-anchor": anchor }, content);
  }

  function pill(box) {
    const { width, height } = box;
    const arrow = box.kind === "port" || box.kind === "input" || box.kind === "state" ? "▸ " : "";
    return [
      svg("rect", { class: "shape", width, height, rx: height / 2 }),
      text(width / 2, 16, `${arrow}${box.label}`, "pill-text", "middle"),
    ];
  }

  function operator(box) {
    const { node, width, height } = box;
    const [title, detail] = page.lines(node);
    const mark = MARKS[node.change];
    return [
      svg("rect", { class: "shape", width, height, rx: 5 }),
      svg("rect", { class: `edge ${page.family(node)}`, x: 0, y: 0, width: 4, height, rx: 2 }),
      text(12, detail ? 15 : 22, title, "title"),
      detail ? text(12, 29, detail, "detail") : null,
      mark ? text(width - 8, 15, mark, "mark", "end") : null,
    ];
  }

  function module(box) {
    const { width, height } = box;
    return [
      svg("rect", { class: "shape under", x: 3, y: 3, width, height, rx: 5 }),
      svg("rect", { class: "shape", width, height, rx: 5 }),
      svg("rect", { class: "edge plain", width: 4, height, rx: 2 }),
      text(12, 15, box.title, "title"),
      text(12, 29, box.detail, "detail"),
      text(width - 8, 22, "▸", "detail", "end"),
    ];
  }

  function branches(box, pane) {
    const found = [
      svg("rect", { class: "shape", width: box.width, height: box.height, rx: 7 }),
      svg("rect", { class: "edge cond", width: 4, height: box.height, rx: 2 }),
      text(12, 18, "cond: every row replays?", "title"),
      text(box.width - 8, 18, MARKS[box.node.change] ?? "", "mark", "end"),
    ];
    let x = page.condGap;
    box.parts.forEach((part, n) => {
      const width = Math.max(part.width, 120);
      const height = box.height - 2 * page.condTitle - page.condGap / 2;
      const inner = svg(
        "g",
        { transform: `translate(${x},${2 * page.condTitle - 4})` },
        svg("rect", { class: "branch", width, height, rx: 5 }),
        text(8, -6, n === 0 ? "yes: replay" : "no: compute", "detail"),
      );
      inner.append(svg("g", { transform: `translate(${(width - part.width) / 2},0)` }, ...parts(part, pane)));
      found.push(inner);
      x += width + page.condGap;
    });
    return found;
  }

  function boxElement(box, at, pane) {
    const { node } = box;
    const kinds = { cond: branches, op: operator, module };
    const content = (kinds[box.kind] ?? pill)(box, pane);
    const change = ["op", "cond", "state", "input"].includes(box.kind) ? node.change : "kept";
    const place = { transform: `translate(${at.x},${at.y})`, role: "button", tabindex: -1, "aria-label": label(box) };
    const element = svg("g", { class: `node ${box.kind} ${change}`, ...place }, ...content);
    element.fastcar = { box, jump: ["port", "next"].includes(box.kind) };
    if (box.kind === "module") element.dataset.module = box.path;
    else if (!element.fastcar.jump) element.dataset.id = node.id;
    return element;
  }

  function parts(drawing, pane) {
    const lines = drawing.lines.map((line) => {
      const d = path(line.points, drawing.at[line.to].y);
      return svg("path", { class: "line", d, "marker-end": `url(#arrow-${pane})` });
    });
    return [...lines, ...drawing.boxes.map((box, n) => boxElement(box, drawing.at[n], pane))];
  }

  /* The drawing of a group for one pane; `choose(box)` is called for a click, Enter or Space. */
  page.draw = (drawing, pane, choose) => {
    const { width, height } = drawing;
    const arrow = svg(
      "marker",
      { id: `arrow-${pane}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" },
      svg("path", { class: "head", d: "M0 0L8 4L0 8z" }),
    );
    const look = { viewBox: `0 0 ${width} ${height}`, role: "group" };
    const root = svg("svg", look, svg("defs", {}, arrow), ...parts(drawing, pane));
    const top = drawing.boxes
      .map((box, n) => [drawing.at[n].y, drawing.at[n].x + box.width / 2, box.kind])
      .filter(([, , kind]) => kind !== "port");
    root.fastcar = { width, height, start: top.reduce((a, b) => (b[0] < a[0] ? b : a), [Infinity, width / 2])[1] };
    const first = root.querySelector(".node");
    if (first) first.setAttribute("tabindex", "0");
    const pick = (event) => {
      const element = event.target.closest(".node");
      if (element) {
        event.stopPropagation();
        rove(root, element);
        choose(element.fastcar.box);
      }
    };
    root.addEventListener("click", pick);
    root.addEventListener("keydown", (event) => keys(event, root, pick));
    return root;
  };

  function rove(root, element) {
    for (const other of root.querySelectorAll('.node[tabindex="0"]')) other.setAttribute("tabindex", "-1");
    element.setAttribute("tabindex", "0");
  }

  function keys(event, root, pick) {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      pick(event);
      return;
    }
    const element = event.target.closest(".node");
    const forward = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (!element || !forward) return;
    event.preventDefault();
    const own = element.getBoundingClientRect();
    const across = event.key === "ArrowLeft" || event.key === "ArrowRight";
    const near = [...root.querySelectorAll(".node")]
      .filter((n) => n !== element)
      .map((n) => [n, distance(own, n.getBoundingClientRect(), across, forward)]);
    const [best, cost] = near.reduce((a, b) => (b[1] < a[1] ? b : a), [null, Infinity]);
    if (best && cost < Infinity) {
      rove(root, best);
      best.focus();
    }
  }

  function distance(from, to, across, forward) {
    const dx = to.left + to.width / 2 - from.left - from.width / 2;
    const dy = to.top + to.height / 2 - from.top - from.height / 2;
    const along = (across ? dx : dy) * forward;
    return along <= 2 ? Infinity : along + 3 * Math.abs(across ? dy : dx);
  }
})();
