/* Drawings of a decode step: a lane for the host, for the engine's calls, and for each of its units. */
(() => {
  "use strict";
  const UNITS = {
    ...{ memory: "--linear", ports: "--ports", compute: "--gate", edge: "--plain", drs: "--removed", call: "--plain" },
    ...{ attention: "--attention", attend: "--attention", vector: "--replaced", host: "--cache", launch: "--launch" },
  };
  const LANE = 22;
  const LEFT = 104;
  const RIGHT = 6;

  /* The steps with their events by lane. */
  function modelOf(speed) {
    const spanOf = (e) => ({ name: e.name, unit: e.cat, start: e.ts / 1e6, seconds: e.dur / 1e6, ...e.args });
    const steps = speed.steps.map((step) => {
      const spans = step.events.filter((event) => event.ph === "X");
      const lanes = step.events
        .filter((event) => event.ph === "M")
        .map((lane) => ({ name: lane.args.name, spans: spans.filter((s) => s.tid === lane.tid).map(spanOf) }));
      return { ...step, lanes, spans: lanes.flatMap((lane) => lane.spans) };
    });
    return { steps, hz: speed.clock_hz };
  }

  /* One drawing on a canvas. `view` has the step and the times between which it is shown. */
  class Drawing {
    constructor(view, canvas) {
      const width = Math.max(300, canvas.parentElement.clientWidth);
      const ratio = page.resize(canvas, width, view.step.lanes.length * LANE + 26);
      Object.assign(this, { view, width, context: canvas.getContext("2d") });
      this.context.scale(ratio, ratio);
      this.scale = (width - LEFT - RIGHT) / (view.end - view.start);
    }

    x(time) {
      return LEFT + (time - this.view.start) * this.scale;
    }

    all() {
      const { context, view } = this;
      const muted = rgb("--muted");
      context.font = "12px system-ui, sans-serif";
      context.textBaseline = "middle";
      view.step.lanes.forEach(({ name }, row) => {
        context.fillStyle = rgb("--raised");
        context.fillRect(LEFT, row * LANE + 2, this.width - LEFT - RIGHT, LANE - 4);
        context.fillStyle = muted;
        context.textAlign = "right";
        context.fillText(name, LEFT - 8, row * LANE + LANE / 2, LEFT - 10);
      });
      context.save();
      context.beginPath();
      context.rect(LEFT, 0, this.width - LEFT - RIGHT, view.step.lanes.length * LANE);
      context.clip();
      view.step.lanes.forEach(({ spans }, row) => this.spans(spans, row));
      context.restore();
      this.ticks(muted);
    }

    spans(spans, row) {
      for (const span of spans) {
        const [from, to] = [Math.max(LEFT, this.x(span.start)), this.x(span.start + span.seconds)];
        if (to < LEFT) continue;
        if (from > this.width) break;
        this.box(row, from, Math.max(0.6, to - from), rgb(UNITS[span.unit]), span.name);
      }
    }

    box(row, x, width, colour, text) {
      const { context } = this;
      context.fillStyle = colour;
      context.fillRect(x, row * LANE + 2, width > 3 ? width - 0.5 : width, LANE - 4);
      const shown = Math.min(x + width, this.width - RIGHT) - x;
      if (shown < 20 || context.measureText(text).width > shown - 8) return;
      context.fillStyle = onColour(colour);
      context.textAlign = "center";
      context.fillText(text, x + shown / 2, row * LANE + LANE / 2 + 0.5);
    }

    ticks(colour) {
      const { context, view } = this;
      const bottom = view.step.lanes.length * LANE + 14;
      const count = this.width > 700 ? 4 : 2;
      context.fillStyle = colour;
      for (let tick = 0; tick <= count; tick += 1) {
        const time = view.start + ((view.end - view.start) * tick) / count;
        context.textAlign = tick === count ? "right" : tick ? "center" : "left";
        context.fillText(page.time(time), this.x(time), bottom);
      }
    }
  }

  const palette = new Map();
  const rgb = (name) => palette.get(name) ?? palette.set(name, `rgb(${page.colour(name).join(" ")})`).get(name);

  /* The colour of text on a colour: black or white, whichever differs more (WCAG's relative luminance). */
  function onColour(colour) {
    const [r, g, b] = colour.match(/[\d.]+/g).map((part) => (Number(part) / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#10151b" : "#ffffff";
  }

  page.timeDrawing = {
    ...{ modelOf, Drawing, lane: LANE, left: LEFT, right: RIGHT, units: UNITS },
    /* Forgets the colours of the theme. */
    forget: () => palette.clear(),
  };
})();
