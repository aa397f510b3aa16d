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
    const parts = Object.entries(values)
      .sort((a, b) => b[1] - a[1])
      .map(([name, share]) => {
        const text = WORDS[name] ?? name;
        return { name, text, value: page.percent(share), share, colour: page.timeDrawing.units[name] };
      });
    return page.card("Where the time goes", null, ...page.stack(parts));
  }

  function resources(values) {
    const rows = Object.entries(values).map(([name, [used, limit]]) => [
      name.toUpperCase(),
      used.toLocaleString("en"),
      limit.toLocaleString("en"),
      page.share(used / Math.max(limit, 1)),
    ]);
    const note = "Estimated, not synthesised; the limit is what a design may use of the board.";
    return page.table("Resources of the fabric", note, "resource | used:number | limit:number | share", rows);
  }

  function offload(lines) {
    if (!lines?.length) return "";
    const rows = lines.map((line) => [
      line.name,
      el("code", {}, line.modules.join(", ")),
      line.reason ?? line.shape,
      line.reason ? "" : page.bytes(line.stream_bytes),
      line.reason ? "" : line.cycles.toLocaleString("en"),
    ]);
    const note =
      "Weights of one call, and its clocks as the hardware model estimates them. A call of the MLP is per layer.";
    const columns = "call:short | modules | shape:short | weights:number | clocks:number";
    return page.table("Calls of the accelerator", note, columns, rows);
  }

  page.addTab("speed", "Speed", (panel) => {
    const speed = { facts: [], shares: {}, resources: {}, steps: [], ...page.data.speed };
    const calls = offload(speed.offload);
    if (speed.missing) {
      const words = speed.missing.split("`").map((text, n) => (n % 2 ? el("code", {}, text) : text));
      panel.append(page.card("Speed", null, el("p", { class: "muted" }, ...words)), calls);
      return;
    }
    const lines = page.timeLines(speed);
    const facts = page.facts(speed.facts.filter((f) => f.group !== "key"));
    const workload = page.card("Workload", "A prediction of the hardware model; nothing was run.", facts);
    panel.append(
      page.figures(speed.facts.filter((f) => f.group === "key")),
      shares(speed.shares),
      ...lines.elements,
      el("div", { class: "columns" }, workload, resources(speed.resources)),
      calls,
    );
    page.tabs.find((tab) => tab.id === "speed").shown = lines.redraw;
    requestAnimationFrame(lines.redraw);
  });
})();
