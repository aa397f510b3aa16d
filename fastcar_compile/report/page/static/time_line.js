/* The time lines of a decode step: what lies under the pointer, zoom, the cards. */
(() => {
  "use strict";
  const { el } = page;
  const { modelOf, Drawing, lane: LANE, left: LEFT, right: RIGHT, forget } = page.timeDrawing;

  /* What lies at a time in a lane. */
  function under(model, view, time, row) {
    const found = view.step.lanes[row].spans.find((s) => s.start <= time && time < s.start + s.seconds);
    if (!found) return "";
    const clocks = `${Math.round(found.seconds * model.hz).toLocaleString("en")} clocks`;
    const moved = found.bytes ? `, ${page.bytes(found.bytes)}` : "";
    const text = `${found.name}, ${page.layerText(found.layer)}: ${clocks} = ${page.time(found.seconds)}${moved}`;
    return `${text}, from ${page.time(found.start)}.${found.unit === "call" ? "" : ` ${page.unitText(found.unit)}`}`;
  }

  const callsOf = (step) => step.spans.filter((span) => span.unit === "call");

  /* The choices of what is shown: the step, the first start of every call, every layer. */
  function parts(view, show) {
    const option = (text, spans) => {
      const [start, end] = [spans.map((s) => s.start), spans.map((s) => s.start + s.seconds)];
      return el("option", { "data-start": Math.min(...start), "data-end": Math.max(...end) }, text);
    };
    const calls = [...Map.groupBy(callsOf(view.step), (s) => s.name)].map(([name, own]) => option(name, [own[0]]));
    const layers = [...Map.groupBy(view.step.spans, (s) => s.layer)]
      .sort(([a], [b]) => a - b)
      .map(([layer, own]) => option(page.layerText(layer), own));
    const select = el(
      "select",
      { "aria-label": "Part of the step", onchange: () => show(select.selectedOptions[0].dataset) },
      option("whole step", view.step.spans),
      el("optgroup", { label: "calls of the engine" }, calls),
      el("optgroup", { label: "layers" }, layers),
    );
    return select;
  }

  class Chart {
    constructor(speed) {
      this.model = modelOf(speed);
      this.view = { step: this.model.steps[0], start: 0, end: this.model.steps[0].seconds };
      this.canvas = el("canvas", { class: "time-line", role: "img", tabindex: "0" });
      this.select = el("span", {});
      this.listen();
    }

    choose(number) {
      const step = this.model.steps[number];
      Object.assign(this.view, { step, start: 0, end: step.seconds });
      this.select.replaceChildren(parts(this.view, (data) => this.show(Number(data.start), Number(data.end))));
      this.redraw();
    }

    redraw() {
      if (!this.canvas.parentElement?.clientWidth) return;
      const { start, end, step } = this.view;
      const label = `${step.title}: from ${page.time(start)} to ${page.time(end)}.`;
      this.canvas.setAttribute("aria-label", `${label} Arrow keys move, plus and minus zoom, 0 shows all.`);
      new Drawing(this.view, this.canvas).all();
    }

    show(start, end) {
      const total = this.view.step.seconds;
      const length = Math.min(total, Math.max(20 / this.model.hz, end - start));
      this.view.start = Math.max(0, Math.min(total - length, start));
      this.view.end = this.view.start + length;
      this.redraw();
    }

    /* Zooms by a factor around a time; moves by a part of what is shown. */
    change(factor, shift = 0, around = (this.view.start + this.view.end) / 2) {
      const { start, end } = this.view;
      const move = shift * (end - start);
      this.show(around + (start - around) * factor + move, around + (end - around) * factor + move);
    }

    time(event) {
      const inside = (event.offsetX - LEFT) / (this.canvas.clientWidth - LEFT - RIGHT);
      return this.view.start + inside * (this.view.end - this.view.start);
    }

    listen() {
      const { canvas } = this;
      const keys = { ArrowLeft: [1, -0.2], ArrowRight: [1, 0.2], "+": [0.5], "=": [0.5], "-": [2], 0: [1e9] };
      canvas.addEventListener("keydown", (event) => {
        if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
        event.preventDefault();
        this.change(...keys[event.key]);
      });
      canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.change(event.deltaY > 0 ? 1.3 : 1 / 1.3, 0, this.time(event));
      });
      canvas.addEventListener("dblclick", (event) => this.change(0.25, 0, this.time(event)));
      this.drag();
      page.tip(canvas, (event) => {
        if (event.offsetX === undefined || event.offsetX < LEFT || event.buttons) return "";
        const row = Math.floor(event.offsetY / LANE);
        return row < this.view.step.lanes.length ? under(this.model, this.view, this.time(event), row) : "";
      });
    }

    drag() {
      let held = null;
      this.canvas.addEventListener("pointerdown", (event) => {
        held = event.clientX;
        this.canvas.setPointerCapture(event.pointerId);
      });
      this.canvas.addEventListener("pointermove", (event) => {
        if (held === null) return;
        this.change(1, (held - event.clientX) / (this.canvas.clientWidth - LEFT - RIGHT));
        held = event.clientX;
      });
      for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, () => (held = null));
    }
  }

  function figures(model, step) {
    const facts = [
      { label: "one step", value: page.time(step.seconds) },
      { label: "clocks", value: Math.round(step.seconds * model.hz).toLocaleString("en") },
      { label: "replay", value: page.percent(step.replay) },
      { label: "launches", value: String(step.spans.filter((span) => span.unit === "launch").length) },
      { label: "calls and instructions", value: String(callsOf(step).length) },
    ];
    return page.figures(facts);
  }

  /* The cards of the time lines; `redraw` draws for the width and the theme that there are now. */
  page.timeLines = (speed) => {
    const chart = new Chart(speed);
    const { model } = chart;
    const [note, numbers] = [el("p", { class: "muted time-note" }), el("div", {})];
    const titles = Object.fromEntries(model.steps.map((step, n) => [n, step.title]));
    const choose = (number) => {
      const step = model.steps[number];
      note.textContent = step.note;
      numbers.replaceChildren(figures(model, step));
      steps.mark(String(number));
      chart.choose(number);
    };
    const steps = page.choice("sides", "step", "Step", titles, choose);
    const tools = el(
      "div",
      { class: "tools", role: "group", "aria-label": "Time line" },
      page.button("←", "Earlier", () => chart.change(1, -0.5)),
      page.button("→", "Later", () => chart.change(1, 0.5)),
      page.button("−", "Zoom out", () => chart.change(2)),
      page.button("+", "Zoom in", () => chart.change(0.5)),
      page.button("whole", "Show the whole step", () => chart.change(1e9)),
    );
    choose(model.steps.length - 1);
    const redraw = () => {
      forget();
      chart.redraw();
    };
    page.onTheme.push(redraw);
    addEventListener("resize", redraw);
    const element = page.card(
      "Time line of one decode step",
      "What the host and each unit of the engine do, call by call or instruction by instruction. Drag to move; double click or Ctrl and the wheel to zoom.",
      el("div", { class: "toolbar" }, steps, chart.select, tools),
      note,
      speed.unknown && el("p", { class: "muted" }, "The artifact does not say how much replays. ", page.recording()),
      numbers,
      el("div", { class: "time-box" }, chart.canvas),
    );
    return { redraw, elements: [element] };
  };
})();
