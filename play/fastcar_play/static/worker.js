// A game without a server: what visit.py and game.py do there, in one thread of the browser.

import { load } from "./fastcar.mjs";
import { Recording, Track, hexadecimal } from "./game.mjs";
import { Together } from "./together.mjs";

const SIDES = { dense: ["dense"], replay: ["replay"], both: ["dense", "replay"] };
const AVERAGED = 24; // frames that the frames per second are measured over
const IN_FLIGHT = 3; // frames that were sent and are not drawn yet

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

const read = async (name) => {
  const answer = await fetch(new URL(name, import.meta.url));
  if (!answer.ok) throw new Error(`${name} cannot be read: HTTP ${answer.status}`);
  return answer;
};

/** Pictures of image codes: RGBA of a frame. */
class Pixels {
  constructor(exports, { size: [high, wide] }, tokens) {
    [this.exports, this.count, this.tokens] = [exports, high * wide, tokens];
    this.input = exports.fastcar_allocate(8 * tokens);
    this.table = exports.fastcar_allocate(8);
    new Uint32Array(exports.memory.buffer, this.table, 1)[0] = this.input;
  }

  picture(codes) {
    new BigInt64Array(this.exports.memory.buffer, this.input, this.tokens).set(codes.map(BigInt));
    if (this.exports.main(this.table, this.table + 4) !== 0) throw new Error("there is no memory for a picture");
    const [place] = new Uint32Array(this.exports.memory.buffer, this.table + 4, 1);
    const [colours, found] = [new Uint8Array(this.exports.memory.buffer, place, 3 * this.count), new Uint8Array(4 * this.count)];
    for (let i = 0; i < this.count; ++i) found.set([colours[3 * i], colours[3 * i + 1], colours[3 * i + 2], 255], 4 * i);
    return found;
  }
}

class Game {
  constructor({ hello, world, defaults, weights }, artifact, pixels) {
    Object.assign(this, { world, artifact, pixels, weights });
    this.beginning = { start: 0, seed: 0, ...defaults };
    this.mode = hello.gate === null ? "dense" : "both";
    this.threshold = "compiled";
    [this.running, this.limited, this.together] = [false, true, null];
    [this.visible, this.held, this.pressed] = [new Set([""]), new Map(), new Set()]; // by window; "" is this one
    this.serial = this.drawn = this.due = 0;
    this.tracks = Object.fromEntries(SIDES[this.mode].map((side) => [side, new Track(artifact, world)]));
    this.turn = this.begin();
  }

  /** Do something when all that came before is done: a GPU's steps are awaited, and a message may come in between. */
  queue(task) {
    this.turn = this.turn.then(task).catch((error) => postMessage([{ type: "ended", reason: `${error.message}.` }, null]));
  }

  async begin() {
    this.number = 0;
    for (const track of Object.values(this.tracks)) await track.begin(this.beginning);
    this.applyThreshold();
    this.showLast();
    this.together?.begun();
  }

  /** Show the last frame of each side, which no key has made. */
  showLast() {
    const codes = ({ frames }) => frames.at(-1).slice(1).map((token) => token - this.world.image.offset);
    this.show("", Object.entries(this.tracks).map(([side, track]) => ({ side, codes: codes(track) })));
  }

  applyThreshold() {
    const own = this.threshold === "compiled" ? this.artifact.compiled : this.threshold;
    for (const [side, track] of Object.entries(this.tracks)) track.session.setThreshold(side === "replay" ? own : null);
    // A saved game is one decoder's, with the same thresholds from its first frame on.
    this.recorded = "replay" in this.tracks ? "replay" : "dense";
    const { thresholds } = this.tracks[this.recorded].session;
    this.recording = this.number ? null : new Recording(this.artifact, this.world, this.beginning, thresholds);
  }

  async save() {
    if (this.recording === null) return this.tell("Mode or threshold changed after the first frame. Start a new game, then save it.");
    const game = await this.recording.game(this.weights);
    const body = new TextEncoder().encode(JSON.stringify(game));
    postMessage([{ type: "recording", name: `${this.world.name}.json`, frames: game.checks.length, kind: "application/json" }, body]);
  }

  /** Go on in another mode. A second side begins at the point where the first one is. */
  async setMode(mode) {
    if (mode === this.mode) return;
    const sides = SIDES[mode];
    const kept = this.tracks[sides.find((side) => side in this.tracks)] ?? Object.values(this.tracks)[0];
    for (const track of Object.values(this.tracks)) if (track !== kept) track.session.close();
    this.tracks = mode === "both" ? { dense: await kept.twin(), replay: kept } : { [mode]: kept };
    this.mode = mode;
    this.applyThreshold();
    this.showLast();
  }

  /** The action with the most buttons that are all held; the first one of several. */
  action() {
    const held = new Set([...this.held.values(), ...this.pressed].flat());
    const possible = this.world.actions.filter(({ buttons }) => buttons.every((button) => held.has(button)));
    return possible.reduce((best, one) => (one.buttons.length > best.buttons.length ? one : best));
  }

  /** order: what the leader of several windows chose. */
  async frame(order) {
    const action = order ? this.world.actions.find(({ token }) => token === order.token) : this.action();
    this.pressed.clear();
    const [views, { device }] = [[], this.artifact];
    for (const [side, track] of Object.entries(this.tracks)) {
      const start = performance.now(); // draws are part of the forwards here
      const recorded = this.recording && side === this.recorded;
      const frame = await (recorded ? this.recording.frame(track, action.token) : track.frame(action.token));
      views.push({ side, ...frame, token_ms: (performance.now() - start) / this.world.tokens_per_frame });
    }
    this.number += 1;
    this.together?.played(this, action.token, order);
    this.show(action.name, views);
    for (const track of Object.values(this.tracks)) await track.settle();
    if (this.artifact.device !== device) this.tell(this.artifact.notice);
  }

  show(name, views) {
    const start = performance.now();
    const pictures = views.map(({ codes }) => this.pixels.picture(codes));
    const now = performance.now();
    this.times = [...(name ? this.times : []), now].slice(-AVERAGED - 1);
    const span = now - this.times[0];
    const sides = views.map(({ side, codes, token_ms = null, decisions = [], accepted = null }, i) => ({
      side, codes, token_ms, accepted, sampling_ms: 0, kind: "rgba", bytes: pictures[i].length,
      replayed: decisions.map((flags) => Math.round(100 * mean(flags))),
      by_layer: (decisions[0] ?? []).map((_, layer) => mean(decisions.map((flags) => flags[layer]))),
    }));
    const header = {
      type: "frame", serial: ++this.serial, number: this.number, action: name, sides, png_ms: 0, pixels_ms: now - start,
      fps: span > 0 ? (1000 * (this.times.length - 1)) / span : null, refilled: views.some(({ refilled }) => refilled), recorded: null,
    };
    const body = new Uint8Array(pictures.reduce((sum, picture) => sum + picture.length, 0));
    pictures.forEach((picture, i) => body.set(picture, i * picture.length));
    postMessage([header, body], [body.buffer]);
  }

  tell(note = "") {
    const { start, seed, temperature, topK } = this.beginning;
    const { running, mode, threshold, limited, artifact: { device, notice } } = this;
    const status = { type: "status", running, mode, threshold, start, seed, temperature, top_k: topK, limited, recorded: null, note, device, notice };
    postMessage([status, null]);
    if (this.together?.leads) this.together.send("status", { status });
  }

  /** Begin or end to play with other windows. They have one side, whose hash is compared. */
  async join(value) {
    this.together?.leave();
    this.together = null;
    [this.running, this.visible, this.held] = [false, new Set([""]), new Map()];
    if (!value) return;
    await this.setMode(this.recorded);
    this.together = new Together(`fastcar play ${this.weights}`, this);
  }

  /** Play the leader's game from its start. */
  async follow({ start, seed, temperature, top_k: topK }, { mode, threshold }) {
    [this.beginning, this.threshold] = [{ start, seed, temperature, topK }, threshold];
    await this.setMode(mode);
    await this.begin();
    this.next();
  }

  /** Show the leader's status. */
  mirror(status) {
    [this.running, this.limited] = [status.running, status.limited];
    postMessage([status, null]);
  }

  /** Two windows have other frames: end the game here. */
  part(number) {
    this.join(false);
    postMessage([{ type: "ended", reason: `Frame ${number} has other bits than in another window.` }, null]);
  }

  /** A message of the page or, where this window leads, of another one. */
  async handle(message, from = "") {
    const { type, ...fields } = message;
    const told = {
      run: () => (this.running = fields.value),
      visible: () => (fields.value ? this.visible.add(from) : this.visible.delete(from)),
      limit: () => (this.limited = fields.value),
      mode: () => this.setMode(fields.value),
      threshold: () => {
        this.threshold = fields.value;
        this.applyThreshold();
      },
      restart: () => {
        this.beginning = { start: fields.start, seed: fields.seed, temperature: fields.temperature, topK: fields.top_k };
        return this.begin();
      },
      together: () => this.join(fields.value),
    };
    if (type === "record") this.save();
    if (type === "drawn") this.drawn = fields.serial;
    if (this.together?.leads === false && !["together", "record", "drawn"].includes(type)) {
      if (type === "visible") told.visible();
      return this.together.send("told", { id: this.together.id, message }); // the leader decides
    }
    if (type === "keys") {
      for (const name of fields.held) if (!this.held.get(from)?.includes(name)) this.pressed.add(name); // a short press counts
      this.held.set(from, fields.held);
    }
    if (type in told) {
      await told[type]();
      if (this.together && ["mode", "threshold"].includes(type)) await this.begin(); // a shared game has one of each
      if (["run", "visible", "limit"].includes(type)) this.times = [];
      this.tell();
    }
    this.next();
  }

  /** Generate the next frame when it is due. A message comes in between. */
  next() {
    clearTimeout(this.timer);
    this.timer = null;
    const follows = this.together?.follows;
    const stalled = this.visible.has("") && this.serial - this.drawn >= IN_FLIGHT;
    if (follows ? !this.together.orders.length : !this.running || !this.visible.size || stalled) return;
    const due = async () => {
      if (this.timer !== timer) return; // a message came before
      this.due = Math.max(performance.now(), this.due + (this.limited ? 1000 / this.world.frames_per_second : 0));
      await this.frame(this.together?.orders.shift());
      this.next();
    };
    const timer = (this.timer = setTimeout(() => this.queue(due), follows ? 0 : Math.max(0, this.due - performance.now())));
  }
}

async function opened() {
  const [page, artifact, library] = await Promise.all([
    read("page.json").then((answer) => answer.json()),
    load(new URL("artifact/", import.meta.url)),
    read("pixels.wasm").then((answer) => answer.arrayBuffer()),
  ]);
  const digest = hexadecimal(new Uint8Array(await crypto.subtle.digest("SHA-256", library)));
  if (digest !== page.pixels) throw new Error("pixels.wasm is not the file of this page");
  const { instance } = await WebAssembly.instantiate(library, {});
  postMessage([page.hello, null]);
  const { image, tokens_per_frame: length } = page.world;
  const game = new Game(page, artifact, new Pixels(instance.exports, image, length - 1));
  await game.turn;
  game.tell(artifact.notice ?? "");
  return game;
}

const game = opened();
game.catch((error) => postMessage([{ type: "ended", reason: `${error.message}.` }, null]));
addEventListener("message", ({ data }) => game.then((opened) => opened.queue(() => opened.handle(data)), () => {}));
