// A small line of the last values, one per side of the game. Zero is the bottom.

const KEPT = 120;

export class Plot {
  /** top: the value at the upper end; without it, the largest one that is shown. */
  constructor(canvas, top) {
    [this.canvas, this.top] = [canvas, top];
    this.clear();
  }

  clear() {
    this.values = { dense: [], replay: [] };
  }

  /** values: by side; a side without one has a gap. */
  add(values) {
    for (const [side, kept] of Object.entries(this.values)) {
      kept.push(values[side] ?? null);
      if (kept.length > KEPT) kept.shift();
    }
    this.draw();
  }

  draw() {
    const { canvas } = this;
    const scale = window.devicePixelRatio;
    const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const all = Object.values(this.values).flat().filter((value) => value !== null);
    const top = this.top ?? Math.max(1e-9, ...all) * 1.1;
    context.lineWidth = 1.5 * scale;
    context.lineJoin = "round";
    for (const [side, values] of Object.entries(this.values)) {
      context.strokeStyle = style.getPropertyValue(`--${side}`);
      context.beginPath();
      let pen = false;
      values.forEach((value, number) => {
        if (value === null) pen = false;
        else {
          const x = (width * number) / (KEPT - 1);
          const y = height - scale - (height - 2 * scale) * Math.min(1, value / top);
          if (pen) context.lineTo(x, y);
          else context.moveTo(x, y);
          pen = true;
        }
      });
      context.stroke();
    }
  }
}
