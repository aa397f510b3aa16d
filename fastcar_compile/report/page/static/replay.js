/* Replay: the gate, every layer with its caches, and recorded decisions as a heat map. */
(() => {
  "use strict";
  const { el } = page;
  const ROLES = {
    key_cache: "keys",
    value_cache: "values",
    mlp_cache: "MLP cache",
    gate_cache: "gate cache",
    chain_count: "chain counts",
  };

  const EXTRA = {
    draft: "draft",
    calibrated: "calibrated",
    expected: "replay, calibration",
    measured: "replay, recorded",
  };

  function layers() {
    const { layers: lines } = page.data.replay;
    const roles = Object.keys(ROLES).filter((role) => lines.some((line) => line.bytes[role]));
    const extra = Object.keys(EXTRA).filter((name) => lines.some((line) => (line[name] ?? null) !== null));
    const columns = [
      "layer:number | module | gate:short | threshold:short",
      ...extra.map((name) => `${EXTRA[name]}:short`),
      ...roles.map((role) => `${ROLES[role]}:number`),
      "attention:short | MLP:short | source",
    ].join(" | ");
    const rows = lines.map((line) => [
      String(line.layer),
      el("code", {}, line.module),
      line.gate || "none",
      line.threshold,
      ...extra.map((name) => (typeof line[name] === "number" ? page.share(line[name]) : (line[name] ?? ""))),
      ...roles.map((role) => page.bytes(line.bytes[role] ?? 0)),
      line.attention,
      line.mlp,
      el("code", {}, line.source),
    ]);
    const note = "A site is a layer whose MLP may be replayed. Bytes are of the state that the layer keeps.";
    return page.table("Layers", note, columns, rows);
  }

  function mix(low, high, value) {
    return `rgb(${low.map((c, n) => Math.round(c + (high[n] - c) * value)).join(" ")})`;
  }

  /* Draws values [rows][columns] with one rectangle each. */
  function paint(canvas, values) {
    const columns = values[0]?.length ?? 0;
    const height = Math.min(26, Math.max(8, 420 / values.length)) * values.length;
    const ratio = page.resize(canvas, canvas.parentElement.clientWidth || 600, height);
    const context = canvas.getContext("2d");
    const [low, high] = [page.colour("--heat-low"), page.colour("--heat-high")];
    const [w, h] = [canvas.width / columns, canvas.height / values.length];
    const room = (size) => (size > 6 * ratio ? ratio : 0);
    values.forEach((line, row) =>
      line.forEach((value, column) => {
        const [x, y] = [Math.round(column * w), Math.round(row * h)];
        const [right, bottom] = [Math.round((column + 1) * w), Math.round((row + 1) * h)];
        context.fillStyle = mix(low, high, value);
        context.fillRect(x, y, right - x - room(w), bottom - y - room(h));
      }),
    );
  }

  const VIEWS = {
    frames: { title: "layers × frames", column: "frame" },
    tokens: { title: "layers × places of the frame", column: "place" },
  };

  /* What is under the pointer. */
  function under(event, canvas, values, column) {
    if (event.offsetX === undefined) return "";
    const x = Math.floor((event.offsetX / canvas.clientWidth) * values[0].length);
    const y = Math.floor((event.offsetY / canvas.clientHeight) * values.length);
    const value = values[y]?.[x];
    return value === undefined ? "" : `layer ${y}, ${column} ${x}: ${page.percent(value)} of the rows replayed`;
  }

  function heatMap(heat) {
    const names = Object.keys(VIEWS).filter((name) => heat[name][0]?.length);
    const canvas = el("canvas", { class: "heat", role: "img", tabindex: "0" });
    const axis = el("div", { class: "axis muted" });
    let [name] = names;
    const redraw = () => {
      if (!canvas.isConnected || !canvas.parentElement.clientWidth) return;
      const [values, view] = [heat[name], VIEWS[name]];
      const size = `${values.length} layers, ${values[0].length} columns`;
      paint(canvas, values);
      canvas.setAttribute("aria-label", `Replay, ${view.title}: ${size}; the table of layers has the means`);
      const texts = [`${view.column} 0`, "layer 0 at the top", `${view.column} ${values[0].length - 1}`];
      axis.replaceChildren(...texts.map((text) => el("span", {}, text)));
    };
    const options = Object.fromEntries(names.map((each) => [each, VIEWS[each].title]));
    const views = page.choice("sides", "view", "View", options, (chosen) => {
      name = chosen;
      views.mark(name);
      redraw();
    });
    views.mark(name);
    page.tip(canvas, (event) => under(event, canvas, heat[name], VIEWS[name].column));
    page.onTheme.push(redraw);
    addEventListener("resize", redraw);
    const scale = el("div", { class: "scale" }, el("span", {}, "0 %"), el("i", {}), el("span", {}, "100 %"));
    const size = `${page.plural(heat.forwards, "forward")} of ${page.plural(heat.rows, "row")}`;
    const tools = el("div", { class: "toolbar" }, views, scale);
    const box = el("div", { class: "heat-box" }, canvas);
    const element = page.card("Recorded replay", `${size}; the first frame always computes.`, tools, box, axis);
    return { redraw, element };
  }

  /* What stands in place of the heat map where no decisions were given. */
  function unrecorded() {
    const stored = page.data.replay.layers.some((line) => line.expected !== undefined && line.expected !== null);
    const known = stored ? "The table below has the shares of the calibration. " : "No decisions were given. ";
    return page.card("Recorded replay", null, el("p", { class: "muted" }, known, page.recording()));
  }

  page.addTab("replay", "Replay", (panel) => {
    const { facts, heat, layers: lines } = page.data.replay;
    panel.append(page.card("Gate", null, page.facts(facts)));
    if (heat) {
      const map = heatMap(heat);
      panel.append(map.element);
      requestAnimationFrame(map.redraw);
      page.tabs.find((tab) => tab.id === "replay").shown = map.redraw;
    } else if (lines.some((line) => line.replays)) panel.append(unrecorded());
    panel.append(layers());
  });
})();
