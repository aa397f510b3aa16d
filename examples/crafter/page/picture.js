// The pictures of a frame, without smoothing; over them the heat map of what was replayed, and marks where both sides differ.

const NAMES = { dense: "Dense", replay: "Replay" };
const HEAT = "rgb(25 200 255 / ";
const MARK = "#ff4fa3"; // in the corner of a tile that differs; --mark of play.css
const CELL = 32; // pixels of the heat map along a token, whose outline is one of them: whoever plays still sees the picture

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
      bitmaps.push(this.bitmap(side, body.subarray(at, at + side.bytes)));
      at += side.bytes;
    }
    const ready = await Promise.all(bitmaps);
    this.keep(header.sides.map((side) => side.side));
    const tiles = differing(header.sides);
    header.sides.forEach((side, number) => {
      const { image, heat, marks } = this.sides.get(side.side);
      image.getContext("2d").drawImage(ready[number], 0, 0);
      ready[number].close();
      this.drawHeat(heat, side);
      this.drawMarks(marks, tiles);
    });
  }

  bitmap({ kind }, bytes) {
    if (kind !== "rgba") return createImageBitmap(new Blob([bytes], { type: "image/png" }));
    return createImageBitmap(new ImageData(new Uint8ClampedArray(bytes), this.size[1], this.size[0]));
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
      const [heat, marks] = ["heat", "marks"].map((kind) => canvas(this.grid.map((side) => CELL * side), kind));
      for (const over of [heat, marks]) over.setAttribute("aria-hidden", "true");
      figure.dataset.side = name;
      figure.append(image, heat, marks);
      if (names.length > 1) figure.append(caption(NAMES[name]));
      this.place.append(figure);
      this.sides.set(name, { image, heat, marks });
    }
  }

  drawHeat(heat, side) {
    const context = heat.getContext("2d");
    context.clearRect(0, 0, heat.width, heat.height);
    side.replayed.forEach((percent, token) => {
      context.strokeStyle = `${HEAT}${percent / 100})`;
      const [x, y] = this.corner(token);
      context.strokeRect(x + 0.5, y + 0.5, CELL - 1, CELL - 1);
    });
  }

  /** Fill the upper left corner of some tiles. */
  drawMarks(marks, tiles) {
    const context = marks.getContext("2d");
    context.clearRect(0, 0, marks.width, marks.height);
    context.fillStyle = MARK;
    for (const token of tiles) context.fill(new Path2D(`M${this.corner(token)} h11 l-11 11 z`));
  }

  corner(token) {
    return [CELL * (token % this.grid[1]), CELL * Math.floor(token / this.grid[1])];
  }
}

/** The tokens of which both sides have other codes; none where there is one side. */
export function differing([one, other]) {
  return other ? [...one.codes.keys()].filter((token) => one.codes[token] !== other.codes[token]) : [];
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
