/* The estimate of a step: figures, shares, resources, and a time line to zoom into. */
(() => {
  "use strict";
  const { el, svg } = page;
  const LANES = [
    ["engine", ["memory", "ports", "compute"]],
    ["rows in, out", ["edge"]],
    ["TAS, DRS", ["drs"]],
    ["attention", ["attention"]],
    ["host", ["host", "launch"]],
  ];
  const WORDS = {
    memory: "weights wait for the memory",
    ports: "weights wait for the ports",
    compute: "multipliers",
    edge: "rows in and out",
    drs: "TAS unit and DRS controller",
    attention: "attention on the host",
    host: "norms, RoPE and linears on the host",
    launch: "start of a call",
  };
  const LANE = 30;
  const LEFT = 92;

  function shares(values) {
    const parts = Object.entries(values).sort((a, b) => b[1] - a[1]);
    return page.card(
      "Where the time goes",
      null,
      el(
        "div",
        {
          class: "stack",
          role: "img",
          "aria-label": parts.map(([unit, value]) => `${unit} ${page.percent(value)}`).join(", "),
        },
        parts.map(([unit, value]) =>
          page.tip(
            el("i", { class: `unit-${unit}`, style: { width: `${100 * value}%` } }),
            `${WORDS[unit] ?? unit}: ${page.percent(value)}`,
          ),
        ),
      ),
      el(
        "ul",
        { class: "keys" },
        parts.map(([unit, value]) =>
          el(
            "li",
            {},
            el("i", { class: `swatch unit-${unit}` }),
            `${WORDS[unit] ?? unit} `,
            el("b", {}, page.percent(value)),
          ),
        ),
      ),
    );
  }

  function resources(values) {
    const rows = Object.entries(values).map(([name, [used, limit]]) => [
      name.toUpperCase(),
      used.toLocaleString("en"),
      limit.toLocaleString("en"),
      el(
        "span",
        { class: "share" },
        el("i", { style: { width: `${Math.min(100, (100 * used) / Math.max(limit, 1))}%` } }),
        el("b", {}, page.percent(used / Math.max(limit, 1))),
      ),
    ]);
    return page.card(
      "Resources of the fabric",
      "Estimated, not synthesised; the limit is what a design may use of the board.",
      page.table(
        "Resources",
        [
          ["resource", ""],
          ["used", "number"],
          ["limit", "number"],
          ["share", ""],
        ],
        rows,
      ),
    );
  }

  /* The part of a span between two times, with its name where there is room. */
  function boxes(span, window, scale) {
    const from = Math.max(span.start, window.start);
    const until = Math.min(span.start + span.seconds, window.end);
    if (until <= from) return [];
    const found = LANES.findIndex(([, units]) => units.includes(span.unit));
    const y = Math.max(0, found) * LANE;
    const width = Math.max(0.6, (until - from) * scale);
    const x = LEFT + (from - window.start) * scale;
    const box = svg("rect", { class: `span unit-${span.unit}`, x, y: y + 3, width, height: LANE - 6 });
    const times = `${page.time(span.seconds)} from ${page.time(span.start)}`;
    page.tip(box, `${span.name}, layer ${span.layer}: ${times}${span.bytes ? `, ${page.bytes(span.bytes)}` : ""}`);
    if (width <= 7 * span.name.length + 6) return [box];
    return [box, svg("text", { class: "span-name", x: x + width / 2, y: y + 19, "text-anchor": "middle" }, span.name)];
  }

  /* The spans between two times, as one SVG of a given width. */
  function drawing(spans, window, width) {
    const scale = (width - LEFT - 8) / (window.end - window.start);
    const times = `Time line from ${page.time(window.start)} to ${page.time(window.end)}.`;
    const root = svg("svg", {
      class: "time-line",
      width,
      height: LANES.length * LANE + 26,
      role: "img",
      tabindex: "0",
      "aria-label": `${times} Arrow keys move, plus and minus zoom.`,
    });
    LANES.forEach(([name], lane) =>
      root.append(
        svg("rect", { class: "lane", x: LEFT, y: lane * LANE + 3, width: width - LEFT - 8, height: LANE - 6 }),
        svg("text", { x: LEFT - 8, y: lane * LANE + 19, "text-anchor": "end", class: "lane-name" }, name),
      ),
    );
    for (const span of spans) root.append(...boxes(span, window, scale));
    for (let tick = 0; tick <= 4; tick += 1) {
      const time = window.start + ((window.end - window.start) * tick) / 4;
      root.append(
        svg(
          "text",
          {
            class: "tick",
            x: LEFT + (time - window.start) * scale,
            y: LANES.length * LANE + 18,
            "text-anchor": tick === 4 ? "end" : tick ? "middle" : "start",
          },
          page.time(time),
        ),
      );
    }
    return root;
  }

  function timeLine(speed) {
    const last = speed.spans[speed.spans.length - 1];
    const total = last.start + last.seconds;
    const window = { start: 0, end: total };
    const box = el("div", { class: "time-box" });
    const redraw = () => {
      if (box.clientWidth) box.replaceChildren(drawing(speed.spans, window, Math.max(320, box.clientWidth)));
    };
    const change = (factor, shift) => {
      const length = Math.min(total, Math.max(total / 2000, (window.end - window.start) * factor));
      const middle = (window.start + window.end) / 2 + shift * (window.end - window.start);
      window.start = Math.max(0, Math.min(total - length, middle - length / 2));
      window.end = window.start + length;
      redraw();
    };
    const layer = (number) => {
      const own = speed.spans.filter((span) => span.layer === number);
      Object.assign(window, { start: own[0].start, end: own[own.length - 1].start + own[own.length - 1].seconds });
      redraw();
    };
    const keys = { ArrowLeft: [1, -0.2], ArrowRight: [1, 0.2], "+": [0.5, 0], "=": [0.5, 0], "-": [2, 0] };
    box.addEventListener("keydown", (event) => {
      if (keys[event.key]) {
        event.preventDefault();
        change(...keys[event.key]);
        box.firstChild.focus();
      }
    });
    const button = (text, label, action) =>
      el("button", { type: "button", title: label, "aria-label": label, onclick: action }, text);
    const tools = el(
      "div",
      { class: "toolbar" },
      el(
        "div",
        { class: "tools", role: "group", "aria-label": "Time line" },
        button("whole step", "Show the whole step", () => change(1e9, 0)),
        button("layer 0", "Show layer 0", () => layer(0)),
        button("←", "Earlier", () => change(1, -0.5)),
        button("→", "Later", () => change(1, 0.5)),
        button("−", "Zoom out", () => change(2, 0)),
        button("+", "Zoom in", () => change(0.5, 0)),
      ),
    );
    addEventListener("resize", redraw);
    return {
      redraw,
      element: page.card("Time line of one step", "The step whose replays are nearest to the mean.", tools, box),
    };
  }

  function offload(lines) {
    if (!lines?.length) return null;
    const rows = lines.map((line) => [
      line.name,
      el("code", {}, line.modules.join(", ")),
      line.reason ?? line.shape,
      line.reason ? "" : page.bytes(line.stream_bytes),
      line.reason ? "" : line.cycles.toLocaleString("en"),
    ]);
    return page.card(
      "Calls of the accelerator",
      "Weights of one call, and its clocks as the hardware model estimates them. A call of the MLP is per layer.",
      page.table(
        "Calls of the accelerator",
        [
          ["call", "short"],
          ["modules", ""],
          ["shape", "short"],
          ["weights", "number"],
          ["clocks", "number"],
        ],
        rows,
      ),
    );
  }

  page.addTab("speed", "Speed", (panel) => {
    const speed = { facts: [], shares: {}, resources: {}, spans: [], ...page.data.speed };
    if (speed.missing) {
      panel.append(
        page.card("Estimate", null, el("p", { class: "muted" }, speed.missing)),
        offload(speed.offload) ?? "",
      );
      return;
    }
    const line = timeLine(speed);
    panel.append(
      page.figures(speed.facts.filter((f) => f.group === "key")),
      shares(speed.shares),
      line.element,
      el(
        "div",
        { class: "columns" },
        page.card(
          "Workload",
          "A prediction of the hardware model; nothing was run.",
          page.facts(speed.facts.filter((f) => f.group !== "key")),
        ),
        resources(speed.resources),
      ),
      offload(speed.offload) ?? "",
    );
    page.tabs.find((tab) => tab.id === "speed").shown = line.redraw;
    requestAnimationFrame(line.redraw);
  });
})();
