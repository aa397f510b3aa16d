/* Drawings of a decode step by the cycle model: host and engine, and every process inside of the engine's calls. */
(() => {
  "use strict";
  const HOST = ["launch", "host", "attention"];
  const WORK = "works";
  /* What a process does: where it waits, the beginning of its state. Colours are those of page.css. */
  const KINDS = [WORK, "memory", "FIFO empty", "FIFO full", "blocks empty", "blocks full"];
  const COLOURS = ["--linear", "--attention", "--fifo-empty", "--fifo-full", "--blocks-empty", "--blocks-full"];
  const UNITS = {
    ...{ memory: "--linear", ports: "--ports", compute: "--gate", edge: "--plain", drs: "--removed" },
    ...{ attention: "--attention", attend: "--attention", vector: "--replaced", host: "--cache", launch: "--launch" },
  };
  const LANE = 22;
  const LEFT = 96;
  const RIGHT = 6;
  const SMALL = 1.5; // pixels under which spans are summed up

  const kindOf = (state) =>
    Math.max(
      0,
      KINDS.findIndex((kind) => state.startsWith(`${kind}: `)),
    );

  /* The spans of a process as arrays of clocks. */
  function decoded(process) {
    const count = process.spans.length / 3;
    const found = {
      ...process,
      start: new Float64Array(count),
      end: new Float64Array(count),
      state: new Uint16Array(count),
    };
    let now = 0;
    for (let n = 0; n < count; n += 1) {
      found.start[n] = now + process.spans[3 * n];
      now = found.start[n] + process.spans[3 * n + 1];
      found.end[n] = now;
      found.state[n] = process.spans[3 * n + 2];
    }
    return found;
  }

  /* The first place whose end is behind a time. */
  function first(ends, time) {
    let [low, high] = [0, ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  page.processKinds = { names: KINDS, colours: COLOURS, of: kindOf };

  function modelOf(speed) {
    const calls = (speed.calls ?? []).map((call) => ({ ...call, processes: call.processes.map(decoded) }));
    const names = [
      ...new Set(
        calls
          .toSorted((a, b) => b.processes.length - a.processes.length)
          .flatMap((c) => c.processes.map((p) => p.name)),
      ),
    ];
    for (const call of calls) call.by = new Map(call.processes.map((p) => [p.name, p]));
    const kinds = (speed.states ?? []).map(kindOf);
    const steps = speed.steps.map((step) => ({
      ...step,
      lanes: [step.spans.filter((s) => HOST.includes(s.unit)), step.spans.filter((s) => !HOST.includes(s.unit))],
    }));
    return { calls, names, kinds, steps, states: speed.states ?? [], hz: speed.clock_hz };
  }

  /* One drawing on a canvas. `view` has the step and the times between which it is shown. */
  class Drawing {
    constructor(model, view, canvas) {
      const width = Math.max(300, canvas.parentElement.clientWidth);
      const ratio = Math.min(devicePixelRatio || 1, 2);
      const height = rowsOf(model).length * LANE + 26;
      Object.assign(canvas, { width: width * ratio, height: height * ratio });
      canvas.style.setProperty("height", `${height}px`);
      Object.assign(this, { model, view, width, context: canvas.getContext("2d") });
      this.context.scale(ratio, ratio);
      this.scale = (width - LEFT - RIGHT) / (view.end - view.start);
      this.colours = COLOURS.map(rgb);
    }

    x(time) {
      return LEFT + (time - this.view.start) * this.scale;
    }

    all() {
      const { context, model, view } = this;
      const muted = rgb("--muted");
      context.font = "12px system-ui, sans-serif";
      context.textBaseline = "middle";
      rowsOf(model).forEach((name, row) => {
        context.fillStyle = rgb("--raised");
        context.fillRect(LEFT, row * LANE + 2, this.width - LEFT - RIGHT, LANE - 4);
        context.fillStyle = muted;
        context.textAlign = "right";
        context.fillText(name, LEFT - 8, row * LANE + LANE / 2, LEFT - 10);
      });
      context.save();
      context.beginPath();
      context.rect(LEFT, 0, this.width - LEFT - RIGHT, model.names.length * LANE + 2 * LANE);
      context.clip();
      view.step.lanes.forEach((spans, row) => this.segments(spans, row));
      for (const call of view.step.calls) if (call.kind !== null) this.call(call);
      context.restore();
      this.ticks(muted);
    }

    segments(spans, row) {
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

    call(call) {
      const { model, view } = this;
      if (call.start + call.seconds < view.start || call.start > view.end) return;
      model.names.forEach((name, number) => {
        const process = model.calls[call.kind].by.get(name);
        if (process) this.process(process, call.start, number + 2);
      });
    }

    /* Spans of a pixel and more are boxes; below that a column of pixels shows the shares of what happens in it. */
    process(process, start, row) {
      const { model, view } = this;
      const columns = new Map();
      for (let n = first(process.end, (view.start - start) * model.hz); n < process.end.length; n += 1) {
        const from = this.x(start + process.start[n] / model.hz);
        if (from > this.width) break;
        const to = this.x(start + process.end[n] / model.hz);
        const kind = model.kinds[process.state[n]];
        if (to - from >= SMALL) {
          const left = Math.max(LEFT, from);
          this.box(row, left, to - left, this.colours[kind], model.states[process.state[n]]);
        } else gather(columns, from, to, kind);
      }
      for (const [column, shares] of columns) this.stack(column, shares, row);
    }

    stack(column, shares, row) {
      let y = (row + 1) * LANE - 2;
      shares.forEach((share, kind) => {
        if (!share) return;
        const height = Math.min(1, share) * (LANE - 4);
        this.context.fillStyle = this.colours[kind];
        this.context.fillRect(column, y - height, 1, height);
        y -= height;
      });
    }

    ticks(colour) {
      const { context, view, model } = this;
      const bottom = (model.names.length + 2) * LANE + 14;
      const count = this.width > 700 ? 4 : 2;
      context.fillStyle = colour;
      for (let tick = 0; tick <= count; tick += 1) {
        const time = view.start + ((view.end - view.start) * tick) / count;
        context.textAlign = tick === count ? "right" : tick ? "center" : "left";
        context.fillText(page.time(time), this.x(time), bottom);
      }
    }
  }

  function gather(columns, from, to, kind) {
    for (let column = Math.floor(from); column < to; column += 1) {
      if (column < LEFT) continue;
      const shares = columns.get(column) ?? columns.set(column, new Float64Array(KINDS.length)).get(column);
      shares[kind] += Math.min(to, column + 1) - Math.max(from, column);
    }
  }

  const rowsOf = (model) => ["host", "engine", ...model.names];
  const palette = new Map();
  const rgb = (name) => palette.get(name) ?? palette.set(name, `rgb(${page.colour(name).join(" ")})`).get(name);

  /* The colour of text on a colour: black or white, whichever differs more (WCAG's relative luminance). */
  function onColour(colour) {
    const [r, g, b] = colour.match(/[\d.]+/g).map((part) => (Number(part) / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#10151b" : "#ffffff";
  }

  page.timeDrawing = {
    ...{ modelOf, Drawing, first, lane: LANE, left: LEFT, right: RIGHT },
    /* Forgets the colours of the theme. */
    forget: () => palette.clear(),
  };
})();
