/* Replay: the gate, every layer with its caches, and recorded decisions as a heat map. */
(() => {
  "use strict";
  const { el } = page;
  const ROLES = { key_cache: "keys", value_cache: "values", mlp_cache: "MLP cache", gate_cache: "gate cache", chain_count: "chain counts" };

  function share(value) {
    if (value === undefined || value === null) return "";
    return el("span", { class: "share" }, el("i", { style: { width: `${100 * value}%` } }), el("b", {}, page.percent(value)));
  }

  function layers() {
    const { layers: lines } = page.data.replay;
    const roles = Object.keys(ROLES).filter((role) => lines.some((line) => line.bytes[role]));
    const extra = [["calibrated", "calibrated"], ["expected", "replay, calibration"], ["measured", "replay, recorded"]]
      .filter(([name]) => lines.some((line) => line[name] !== undefined && line[name] !== null));
    const columns = [["layer", "number"], ["module", ""], ["source", ""], ["attention", ""], ["MLP", ""], ["gate", ""], ["threshold", ""],
      ...extra.map(([, title]) => [title, ""]), ...roles.map((role) => [ROLES[role], "number"])];
    const rows = lines.map((line) => [String(line.layer), el("code", {}, line.module), el("code", {}, line.source), line.attention, line.mlp,
      line.gate || "none", line.threshold, ...extra.map(([name]) => (name === "calibrated" ? line[name] ?? "" : share(line[name]))),
      ...roles.map((role) => page.bytes(line.bytes[role] ?? 0))]);
    return page.card("Layers", "A site is a layer whose MLP may be replayed. Bytes are of the state that the layer keeps.", page.table("Layers", columns, rows));
  }

  function mix(low, high, value) {
    return `rgb(${low.map((c, n) => Math.round(c + (high[n] - c) * value)).join(" ")})`;
  }

  /* Draws values [rows][columns] with one rectangle each. */
  function paint(canvas, values) {
    const columns = values[0]?.length ?? 0;
    const ratio = Math.min(devicePixelRatio || 1, 2);
    const width = canvas.parentElement.clientWidth || 600;
    const height = Math.min(26, Math.max(8, 420 / values.length)) * values.length;
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    canvas.style.setProperty("height", `${height}px`);
    const context = canvas.getContext("2d");
    const [low, high] = [page.colour("--heat-low"), page.colour("--heat-high")];
    const [w, h] = [canvas.width / columns, canvas.height / values.length];
    const gap = w > 6 * ratio ? ratio : 0;
    values.forEach((line, y) => line.forEach((value, x) => {
      context.fillStyle = mix(low, high, value);
      context.fillRect(Math.floor(x * w), Math.floor(y * h), Math.ceil(w) - gap, Math.ceil(h) - (h > 10 * ratio ? ratio : 0));
    }));
  }

  function heatMap(heat) {
    const views = [["frames", "layers × frames", "frame"], ["tokens", "layers × places of the frame", "place"]].filter(([name]) => heat[name][0]?.length);
    const canvas = el("canvas", { class: "heat", role: "img", tabindex: "0" });
    const axis = el("div", { class: "axis muted" });
    let view = views[0];
    const redraw = () => {
      if (!canvas.isConnected || !canvas.parentElement.clientWidth) return;
      const values = heat[view[0]];
      paint(canvas, values);
      canvas.setAttribute("aria-label", `Replay, ${view[1]}: ${values.length} layers, ${values[0].length} columns; the table of layers has the means`);
      axis.replaceChildren(el("span", {}, `${view[2]} 0`), el("span", {}, "layer 0 at the top"), el("span", {}, `${view[2]} ${values[0].length - 1}`));
    };
    const buttons = views.map((item) => el("button", { type: "button", "aria-pressed": String(item === view), onclick: (event) => {
      view = item;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === event.target));
      redraw();
    } }, item[1]));
    page.tip(canvas, (event) => {
      if (event.offsetX === undefined) return "";
      const values = heat[view[0]];
      const [x, y] = [Math.floor(event.offsetX / canvas.clientWidth * values[0].length), Math.floor(event.offsetY / canvas.clientHeight * values.length)];
      const value = values[y]?.[x];
      return value === undefined ? "" : `layer ${y}, ${view[2]} ${x}: ${page.percent(value)} of the rows replayed`;
    });
    page.onTheme.push(redraw);
    addEventListener("resize", redraw);
    return { redraw, element: page.card("Recorded replay", `${page.plural(heat.forwards, "forward")} of ${page.plural(heat.rows, "row")}; the first frame always computes.`,
      el("div", { class: "toolbar" }, el("div", { class: "sides", role: "group", "aria-label": "View" }, buttons),
        el("div", { class: "scale" }, el("span", {}, "0 %"), el("i", {}), el("span", {}, "100 %"))), el("div", { class: "heat-box" }, canvas), axis) };
  }

  page.addTab("replay", "Replay", (panel) => {
    const { facts, heat } = page.data.replay;
    panel.append(page.card("Gate", null, page.facts(facts)));
    if (heat) {
      const map = heatMap(heat);
      panel.append(map.element);
      requestAnimationFrame(map.redraw);
      page.tabs.find((tab) => tab.id === "replay").shown = map.redraw;
    } else {
      panel.append(page.card("Recorded replay", null, el("p", { class: "muted" }, "No decisions were given. Record them with ",
        el("code", {}, "fastcar run ARTIFACT --trace trace.npy"), " and give the file: ", el("code", {}, "fastcar inspect ARTIFACT --html FILE --trace trace.npy"), ".")));
    }
    panel.append(layers());
  });
})();
