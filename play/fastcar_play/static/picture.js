// The pictures of a frame, without smoothing, and the heat map of what was replayed over them.

const NAMES = { dense: "Dense", replay: "Replay" };
const HEAT = [25, 200, 255];
const OPAQUE = 0.36; // of a token that every layer replayed: whoever plays still sees the picture

export class Pictures {
  constructor(place) {
    this.place = place;
    this.sides = new Map();
    this.queue = Promise.resolve();
  }

  shape({ size, aspect, grid }) {
    [this.size, this.grid] = [size, grid];
    this.place.parentElement.style.setProperty("--ratio", aspect[0] / aspect[1]);
    this.place.replaceChildren();
    this.sides.clear();
  }

  /** Draw a frame after those before it; `done` is called once it is on the screen. */
  show(header, body, done) {
    this.queue = this.queue.then(() => this.drawn(header, body)).then(() => requestAnimationFrame(done));
  }

  async drawn(header, body) {
    let at = 0;
    const bitmaps = [];
    for (const side of header.sides) {
      bitmaps.push(createImageBitmap(new Blob([body.subarray(at, at + side.bytes)], { type: "image/png" })));
      at += side.bytes;
    }
    const ready = await Promise.all(bitmaps);
    this.keep(header.sides.map((side) => side.side));
    header.sides.forEach((side, number) => {
      const { image, heat } = this.sides.get(side.side);
      image.getContext("2d").drawImage(ready[number], 0, 0);
      ready[number].close();
      this.drawHeat(heat, side);
    });
  }

  keep(names) {
    if (names.join() === [...this.sides.keys()].join()) return;
    this.sides.clear();
    this.place.replaceChildren();
    this.place.parentElement.style.setProperty("--count", names.length);
    for (const name of names) {
      const figure = document.createElement("figure");
      const image = canvas(this.size, "image");
      image.setAttribute("role", "img");
      image.setAttribute("aria-label", `The generated game, ${NAMES[name].toLowerCase()}`);
      const heat = canvas(this.grid, "heat");
      heat.setAttribute("aria-hidden", "true");
      figure.dataset.side = name;
      figure.append(image, heat);
      if (names.length > 1) figure.append(caption(NAMES[name]));
      this.place.append(figure);
      this.sides.set(name, { image, heat });
    }
  }

  drawHeat(heat, side) {
    const context = heat.getContext("2d");
    const data = context.createImageData(heat.width, heat.height);
    side.replayed.forEach((percent, token) => {
      data.data.set([...HEAT, Math.round((255 * OPAQUE * percent) / 100)], 4 * token);
    });
    context.putImageData(data, 0, 0);
  }
}

function canvas([height, width], kind) {
  const element = document.createElement("canvas");
  Object.assign(element, { width, height, className: kind });
  return element;
}

function caption(text) {
  const element = document.createElement("figcaption");
  element.textContent = text;
  return element;
}
