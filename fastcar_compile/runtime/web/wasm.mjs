// The decoder of an artifact in WebAssembly: what fastcar.mjs opens for the CPU.

const INACTIVE = -2; // the forward number of a row that is not there, as in ir/types.py
export const REPLAY_ROLES = ["mlp_cache", "gate_cache", "chain_count"]; // states of a slot for each token of a frame
const LINE = 64; // bytes that a tensor's address is a multiple of
const BYTES = { bool: 1, int8: 1, uint8: 1, float16: 2, bfloat16: 2, int32: 4, float32: 4, int64: 8, float64: 8 };

/** An artifact cannot be used: the text says what, where and what to do. */
export class ArtifactError extends Error {}

/** Noise of draws at the knots of its table, in units of 2^-20; the last two are equal, so that each has a next one. */
export const KNOTS = Int32Array.from({ length: 65538 }, (_, j) => {
  const share = j < 65536 ? 2 ** ((j >> 11) - 32) * (1 + (j & 2047) / 2048) : 1 - 2 ** -33;
  return Math.round(-Math.log2(-Math.log1p(-share) / Math.LN2) * 2 ** 20);
});

/** The tensors of a weight file: their bytes, and [name, begin, end] of each. */
export function tensors(bytes) {
  const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  const entries = Object.entries(header).filter(([name]) => name !== "__metadata__");
  return [bytes.subarray(8 + length), entries.map(([name, { data_offsets: [begin, end] }]) => [name, begin, end])];
}

/** The decoder in WebAssembly, with its weights in the library's memory. */
export class Library {
  constructor(manifest, programs, exports, files) {
    [this.manifest, this.programs, this.exports] = [manifest, programs, exports];
    this.free = []; // places of sessions that were closed
    this.params = new Map(files.flatMap((bytes) => this.placed(bytes)));
    if (!programs.draw) return;
    this.params.set("knots", [this.take(KNOTS.byteLength), KNOTS.byteLength]);
    this.view(Int32Array, this.params.get("knots")[0], KNOTS.length).set(KNOTS);
  }

  take(bytes) {
    const address = this.exports.fastcar_allocate(Math.max(1, bytes)) >>> 0;
    if (!address) throw new ArtifactError(`there is no memory for ${bytes} bytes`);
    return address;
  }

  /** The library's memory at an address. Addresses stay; views are made anew where the memory has grown. */
  view(kind, address, length) {
    return new kind(this.exports.memory.buffer, address, length);
  }

  /** Put a weight file into the library's memory; return [name, [address, bytes]] of its tensors. */
  placed(bytes) {
    const [content, entries] = tensors(bytes);
    const data = Math.ceil(this.take(content.length + LINE) / LINE) * LINE;
    this.view(Uint8Array, data, content.length).set(content);
    return entries.map(([name, begin, end]) => [name, [data + begin, end - begin]]);
  }

  states() {
    return new States(this);
  }
}

/** What a step of successive tokens takes, as numbers of all rows by name. step: of row k. */
export function successive(rows, tokens, position, step) {
  const each = (there, otherwise) => Array.from({ length: rows }, (_, k) => (k < tokens.length ? there(k) : otherwise));
  return {
    tokens: each((k) => tokens[k], 0),
    position: each((k) => position + k, -1),
    step: each(step, INACTIVE),
  };
}

/** The states of a session in WebAssembly. A GPU's have the same methods, which return promises. */
class States {
  constructor(library) {
    this.library = library;
    const { manifest: { decoder: { state, config } }, programs: { decode, prefill, draw } } = library;
    const { num_layers: layers, prefill_chunk: chunk, tokens_per_frame: frame, vocab_size: vocabulary } = (this.config = config);
    const rows = (this.rows = config.rows ?? 1);
    const size = ({ shape, dtype }) => shape.reduce((product, side) => product * side, 1) * BYTES[dtype];
    const sizes = state.map((one) => [one.name, size(one)]);
    sizes.push(["position", 8 * rows], ["step", 8 * rows], ["thresholds", 4 * layers * rows]);
    sizes.push(["token", 8 * rows], ["tokens", 8 * chunk], ["start", 8]);
    const table = (spec) => 4 * (spec.inputs.length + spec.params.length + spec.outputs.length);
    sizes.push(["decode", table(decode)], ["prefill", table(prefill)]);
    if (draw) sizes.push(["logits", 4 * rows * vocabulary], ["numbers", 72], ["temperature", 8], ["draw", table(draw)]);
    const replay = state.filter(({ role }) => REPLAY_ROLES.includes(role));
    for (const one of replay) sizes.push([`spare ${one.name}`, (size(one) / frame) * rows]);
    this.places = library.free.pop() ?? new Map(sizes.map(([name, bytes]) => [name, [library.take(bytes), bytes]]));
    this.replayed = replay.map((one) => [this.places.get(one.name)[0], size(one) / frame, this.places.get(`spare ${one.name}`)[0]]);
    this.draws = draw && this.program(draw, "draw");
    this.decode = this.program(decode, "decode", "token", "position");
    this.read = this.program(prefill, "prefill", "tokens", "start");
  }

  /** A program with its arguments in place, checked once; it gives the addresses of its results by name. */
  program(spec, table, tokens, position) {
    const { exports } = this.library;
    const known = new Map([...this.library.params, ...this.places]);
    if (tokens) known.set("tokens", this.places.get(tokens)).set("position", this.places.get(position));
    const names = [...spec.inputs, ...spec.params];
    const lacking = names.filter((name) => !known.has(name));
    if (lacking.length) throw new ArtifactError(`the library needs ${lacking.join(", ")}: compile the model again`);
    const [address] = this.places.get(table);
    const fill = (column) => this.set(table, Uint32Array, names.map((name) => known.get(name)[column]));
    fill(1);
    const wrong = exports[spec.check](address);
    if (wrong >= 0) throw new ArtifactError(`${names[wrong]} has another size than the library's: compile the model again`);
    fill(0);
    const results = address + 4 * names.length;
    return () => {
      if (exports[spec.function](address, results) !== 0) throw new ArtifactError("there is no memory for the step");
      const addresses = this.library.view(Uint32Array, results, spec.outputs.length);
      return (name, kind, length) => this.library.view(kind, addresses[spec.outputs.indexOf(name)], length);
    };
  }

  /** Write numbers to the beginning of a place, as elements of a kind of array. */
  set(name, kind, values) {
    this.library.view(kind, this.places.get(name)[0], values.length).set(values);
  }

  /** Write whole numbers to the beginning of a place as int64: as two halves, for a BigInt of each takes several times as long. */
  setWhole(name, values) {
    const halves = this.library.view(Int32Array, this.places.get(name)[0], 2 * values.length);
    for (let i = 0; i < values.length; ++i) {
      halves[2 * i] = values[i];
      halves[2 * i + 1] = Math.floor(values[i] / 2 ** 32);
    }
  }

  /** Copy the slots of a step's row k from the replay states to spare ones, or back. */
  copySlots(number, k, back = false) {
    const memory = new Uint8Array(this.library.exports.memory.buffer);
    for (const [start, bytes, spare] of this.replayed) {
      const [slot, kept] = [start + ((number + k) % this.config.tokens_per_frame) * bytes, spare + k * bytes];
      if (back) memory.copyWithin(slot, kept, kept + bytes);
      else memory.copyWithin(kept, slot, slot + bytes);
    }
  }

  reset() {
    for (const { name } of this.library.manifest.decoder.state) this.library.view(Uint8Array, ...this.places.get(name)).fill(0);
  }

  close() {
    this.library.free.push(this.places);
  }

  /** values: float32, of each layer all rows. */
  setThresholds(values) {
    this.set("thresholds", Float32Array, values);
  }

  /** Read tokens from position 0 on; return the logits behind the last one, a copy. */
  prefill(tokens) {
    const { prefill_chunk: chunk, vocab_size: vocabulary } = this.config;
    let logits = null;
    for (let start = 0; start < tokens.length; start += chunk) {
      this.setWhole("tokens", Array.from({ length: chunk }, (_, i) => tokens[start + i] ?? 0));
      this.setWhole("start", [start]);
      logits = this.read()("logits", Float32Array, chunk * vocabulary);
    }
    const last = (tokens.length - 1) % chunk;
    return logits.slice(last * vocabulary, (last + 1) * vocabulary);
  }

  /** Run the decode step number `number` and those behind it; return its results, and what undoes row k. */
  forward(tokens, position, number) {
    const { rows, config: { num_layers: layers, vocab_size: vocabulary } } = this;
    const { tokens: token, ...others } = successive(rows, tokens, position, (k) => number + k);
    for (const [name, values] of Object.entries({ token, ...others })) this.setWhole(name, values);
    for (let k = 1; k < tokens.length; ++k) this.copySlots(number, k);
    const result = this.decode();
    const kept = (...what) => result(...what).slice(); // a draw may let the memory grow, and views of it would be empty
    const decides = this.library.programs.decode.outputs.includes("decisions");
    const logits = kept("logits", Float32Array, rows * vocabulary);
    return {
      logits,
      draw: this.draws && ((rule) => this.drawn(logits, tokens.length, position, rule)),
      decisions: decides && kept("decisions", Uint8Array, layers * rows),
      scores: decides && kept("scores", Float32Array, layers * rows),
      undo: (k) => this.copySlots(number, k, true),
    };
  }

  /** What each of the first rows of a step draws by a rule, counted from its first token; -1: `Sampler.choose` has to say. */
  drawn(logits, count, position, { temperature, topK, seed, first, count: codes }) {
    this.set("logits", Float32Array, logits);
    this.set("temperature", Float64Array, [temperature]);
    this.setWhole("numbers", [count, count, position, 0, seed % 2 ** 32, Math.floor(seed / 2 ** 32), topK, first, codes]);
    return this.draws()("tokens", Int32Array, 2 * count).filter((_, i) => i % 2 === 0);
  }
}
