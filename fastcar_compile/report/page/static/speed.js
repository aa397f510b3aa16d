/* The estimate of a step: figures, shares, time lines, resources, calls. */
(() => {
  "use strict";
  const { el } = page;
  const WORDS = {
    memory: "weights wait for the memory",
    ports: "weights wait for the ports",
    compute: "multipliers",
    edge: "rows in and out",
    drs: "TAS unit and DRS controller",
    attention: "attention on the host",
    attend: "attention in the fabric",
    vector: "norms, RoPE, caches and residuals in the fabric",
    host: "work on the host",
    launch: "start of a call",
  };

  page.unitText = (unit) => `It waits for: ${WORDS[unit] ?? unit}.`;

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
    const speed = { facts: [], shares: {}, resources: {}, steps: [], ...page.data.speed };
    if (speed.missing) {
      panel.append(
        page.card("Estimate", null, el("p", { class: "muted" }, speed.missing)),
        offload(speed.offload) ?? "",
      );
      return;
    }
    const lines = page.timeLines(speed);
    panel.append(
      page.figures(speed.facts.filter((f) => f.group === "key")),
      shares(speed.shares),
      ...lines.elements,
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
    page.tabs.find((tab) => tab.id === "speed").shown = lines.redraw;
    requestAnimationFrame(lines.redraw);
  });
})();
