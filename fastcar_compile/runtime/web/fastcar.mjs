// Decode an artifact of target wasm32 in a browser or in Node: no dependencies, one thread, one video.
//
//   const artifact = await load(new URL("artifact/", document.baseURI));   // or folder(path) in Node
//   const session = artifact.session();
//   let logits = session.prefill(tokens);                                  // Float32Array of the vocabulary
//   logits = session.step(token);
//   const next = session.decode([token], 80, new Sampler({ seed }).choose);  // 80 tokens; several a step with rows
//
// What the artifact's numerics say holds here: with "exact", logits and decisions are those of every other backend.

const SCHEMA_VERSION = 5; // of manifests, as in artifact/manifest.py
const INSTRUCTION_SET = "wasm-simd128";
const INACTIVE = -2; // the forward number of a row that is not there, as in ir/types.py
const REPLAY_ROLES = ["mlp_cache", "gate_cache", "chain_count"]; // states of a slot for each token of a frame
const LINE = 64; // bytes that a tensor's address is a multiple of
const BYTES = { bool: 1, int8: 1, uint8: 1, float16: 2, bfloat16: 2, int32: 4, float32: 4, int64: 8, float64: 8 };

/** An artifact cannot be used: the text says what, where and what to do. */
export class ArtifactError extends Error {}

/** A source of files: below a URL, which ends with a slash. */
export function under(url) {
  return async (name) => {
    const answer = await fetch(new URL(name, url));
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    return new Uint8Array(await answer.arrayBuffer());
  };
}

/** A source of files in Node: a folder. */
export function folder(path) {
  return async (name) => new Uint8Array(await (await import("node:fs/promises")).readFile(`${path}/${name}`));
}

async function sha256(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Load an artifact. Every file is checked against its manifest before it is used.
 *
 * source: a URL, or a function from a file's name to its bytes. digest: the artifact's, "sha256:…"; without it, whoever
 * serves the files may have changed all of them.
 * Throws ArtifactError: a file is missing or damaged, or the artifact is none that this module decodes.
 */
export async function load(source, { digest = null } = {}) {
  const given = typeof source === "function" ? source : under(source);
  const unread = (name, error) => new ArtifactError(`${name} cannot be read: ${error?.message ?? error}`);
  const read = (name) => Promise.resolve(name).then(given).catch((error) => Promise.reject(unread(name, error)));
  const bytes = await read("manifest.json");
  if (digest !== null && `sha256:${await sha256(bytes)}` !== digest) {
    throw new ArtifactError("manifest.json has another digest: fetch the artifact again");
  }
  const manifest = asDescribed(() => manifestOf(bytes));
  const programs = asDescribed(() => programsOf(manifest));
  const names = asDescribed(() => Object.keys(manifest.files));
  const weights = names.filter((name) => /^weights\/model.*\.safetensors$/.test(name)).sort();
  const checked = async (name) => {
    const [content, entry] = [await read(name), manifest.files[name]];
    if (entry === undefined || content.length !== entry.size || (await sha256(content)) !== entry.sha256) {
      throw new ArtifactError(`${name} is not the file that manifest.json lists: fetch the artifact again`);
    }
    return content;
  };
  const [library, ...files] = await Promise.all([programs.library, ...weights].map(checked));
  const { instance } = await WebAssembly.instantiate(library, {});
  return asDescribed(() => new Artifact(manifest, programs, instance.exports, files));
}

/** What a manifest describes, made of its text or fields; one that lacks some is damaged. */
function asDescribed(make) {
  try {
    return make();
  } catch (error) {
    throw error instanceof ArtifactError ? error : new ArtifactError(`manifest.json is damaged: ${error.message}`);
  }
}

function manifestOf(bytes) {
  const manifest = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  const version = manifest?.schema_version;
  if (version !== SCHEMA_VERSION) {
    const found = `the artifact has schema version ${JSON.stringify(version)}, this module reads version ${SCHEMA_VERSION}`;
    throw new ArtifactError(`${found}: compile the model again`);
  }
  return manifest;
}

function programsOf(manifest) {
  const variant = manifest.host.variants.find((one) => one.instruction_set === INSTRUCTION_SET);
  if (variant === undefined) throw new ArtifactError("the artifact has no library for WebAssembly: compile it for wasm32");
  const config = manifest.decoder.config;
  const problems = [
    [config.takes_embeddings || config.vocab_size === null, "has no tokens in or out"],
    [config.context !== null, "has cross-attention"],
    [config.batch_size !== 1, "has several videos"],
    [variant.programs.prefill === null, "has no program that reads prompts"],
  ];
  const found = problems.filter(([wrong]) => wrong).map(([, what]) => what);
  if (found.length) throw new ArtifactError(`the decoder ${found.join(", and ")}: decode it from Python`);
  return variant.programs;
}

/** A loaded artifact. manifest: its manifest.json. config: of the decoder. */
export class Artifact {
  constructor(manifest, programs, exports, files) {
    [this.manifest, this.programs, this.exports] = [manifest, programs, exports];
    this.config = manifest.decoder.config;
    this.free = []; // places of sessions that were closed
    this.params = new Map(files.flatMap((bytes) => this.placed(bytes)));
    const compiled = manifest.layers.layers.map((layer) => layer.replay?.threshold ?? null);
    const infinite = { inf: Infinity, "-inf": -Infinity }; // JSON has texts for them
    this.compiled = (manifest.thresholds?.thresholds ?? compiled).map((value) => infinite[value] ?? value);
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
    const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
    const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
    const start = this.take(bytes.length + LINE);
    const data = Math.ceil((start + 8 + length) / LINE) * LINE; // tensors begin at lines behind the header
    this.view(Uint8Array, data, bytes.length - 8 - length).set(bytes.subarray(8 + length));
    const tensors = Object.entries(header).filter(([name]) => name !== "__metadata__");
    return tensors.map(([name, { data_offsets: [begin, end] }]) => [name, [data + begin, end - begin]]);
  }

  /** Open a session; its states are its own, the weights are shared. */
  session() {
    return new Session(this);
  }
}

/** The next tokens of one video. window: the most rows of a step of `decode`. steps: decode steps since the reset. */
export class Session {
  constructor(artifact) {
    [this.artifact, this.config] = [artifact, artifact.config];
    const { num_layers: layers, prefill_chunk: chunk, tokens_per_frame: frame } = this.config;
    const rows = (this.rows = this.config.rows ?? 1);
    this.window = Math.min(rows, frame);
    const size = ({ shape, dtype }) => shape.reduce((product, side) => product * side, 1) * BYTES[dtype];
    const { state } = artifact.manifest.decoder;
    const sizes = state.map((one) => [one.name, size(one)]);
    sizes.push(["spans", 16 * rows * rows], ["position", 8 * rows], ["step", 8 * rows], ["thresholds", 4 * layers * rows]);
    sizes.push(["token", 8 * rows], ["tokens", 8 * chunk], ["start", 8]);
    const { decode, prefill } = artifact.programs;
    const table = (spec) => 4 * (spec.inputs.length + spec.params.length + spec.outputs.length);
    sizes.push(["decode", table(decode)], ["prefill", table(prefill)]);
    this.places = artifact.free.pop() ?? new Map(sizes.map(([name, bytes]) => [name, [artifact.take(bytes), bytes]]));
    const replay = state.filter(({ role }) => REPLAY_ROLES.includes(role));
    this.replayed = replay.map(({ name }) => [this.places.get(name)[0], this.places.get(name)[1] / frame]);
    this.forward = this.program(decode, "decode", "token", "position");
    this.read = this.program(prefill, "prefill", "tokens", "start");
    this.reset();
    this.setThreshold(artifact.compiled);
  }

  /** A program with its arguments in place, checked once; it gives the addresses of its results by name. */
  program(spec, table, tokens, position) {
    const { exports } = this.artifact;
    const own = [["tokens", this.places.get(tokens)], ["position", this.places.get(position)]];
    const known = new Map([...this.artifact.params, ...this.places, ...own]);
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
      const addresses = this.artifact.view(Uint32Array, results, spec.outputs.length);
      return (name, kind, length) => this.artifact.view(kind, addresses[spec.outputs.indexOf(name)], length);
    };
  }

  /** Write numbers to the beginning of a place, as elements of a kind of array. */
  set(name, kind, values) {
    const place = this.artifact.view(kind, this.places.get(name)[0], values.length);
    place.set(kind === BigInt64Array ? values.map(BigInt) : values);
  }

  /** Forget everything but the thresholds: caches, position and counts. */
  reset() {
    const { state } = this.artifact.manifest.decoder;
    for (const { name } of state) this.artifact.view(Uint8Array, ...this.places.get(name)).fill(0);
    this.position = this.steps = this.forwards = this.replays = 0;
    this.decisions = new Uint8Array(this.config.num_layers);
    this.scores = new Float32Array(this.config.num_layers);
  }

  /** Give the states back to the artifact. The session is not used any more. */
  close() {
    if (this.forward !== null) this.artifact.free.push(this.places);
    this.forward = this.read = null;
  }

  requireOpen() {
    if (this.forward === null) throw new RangeError("the session is closed: open another one");
  }

  /** One number for all layers, one per layer, or null: never; a layer's null is never, too. Throws RangeError. */
  setThreshold(threshold) {
    this.requireOpen();
    const { num_layers: layers } = this.config;
    const several = Array.isArray(threshold) || ArrayBuffer.isView(threshold);
    const each = several ? Array.from(threshold) : Array(layers).fill(threshold);
    if (each.length !== layers) throw new RangeError(`${each.length} thresholds for ${layers} layers`);
    const wrong = each.findIndex((value) => value !== null && (typeof value !== "number" || Number.isNaN(value)));
    if (wrong >= 0) throw new RangeError(`the threshold of layer ${wrong} is ${each[wrong]}: give a number, or null`);
    this.thresholds = each;
    // No score compares with NaN, whichever way a gate compares.
    this.set("thresholds", Float32Array, each.flatMap((value) => Array(this.rows).fill(value ?? NaN)));
  }

  /** Throw RangeError unless the session takes these tokens now. Nothing has changed then. */
  requireTokens(tokens) {
    this.requireOpen();
    const { max_seq_len: length, vocab_size: vocabulary } = this.config;
    const room = length - this.position;
    if (tokens.length > room) throw new RangeError(`${tokens.length} tokens, and the session has room for ${room}`);
    const wrong = tokens.findIndex((token) => !(Number.isInteger(token) && token >= 0 && token < vocabulary));
    if (wrong >= 0) throw new RangeError(`token ${wrong} is ${tokens[wrong]}: give integers from 0 to ${vocabulary - 1}`);
  }

  /** Read a prompt, an array of tokens, at the beginning; return the logits behind its last one. They are a copy. */
  prefill(tokens) {
    if (this.position) throw new RangeError("a prompt comes first: reset the session");
    if (!tokens?.length) throw new RangeError("a prompt has at least one token");
    this.requireTokens(tokens);
    const { prefill_chunk: chunk, vocab_size: vocabulary } = this.config;
    let logits = null;
    for (let start = 0; start < tokens.length; start += chunk) {
      this.set("tokens", BigInt64Array, Array.from({ length: chunk }, (_, i) => tokens[start + i] ?? 0));
      this.set("start", BigInt64Array, [start]);
      logits = this.read()("logits", Float32Array, chunk * vocabulary);
    }
    this.position = tokens.length;
    const last = (this.position - 1) % chunk;
    return logits.slice(last * vocabulary, (last + 1) * vocabulary);
  }

  /** Decode one forward; return its logits, a view that the next forward overwrites. */
  step(token) {
    const run = this.run([token]);
    run.accept(1);
    return run.logits(0);
  }

  /**
   * Decode known tokens, at least one, and return the `count` tokens behind them; the last one is not read yet.
   *
   * A step reads a window of tokens, true ones and then guesses, whose draws are the next guesses (coupled Jacobi
   * decoding, arXiv 2510.24211): since draws are by position, the tokens are those of one `step` after the other.
   *
   * choose: (logits, position) -> token. guesses: of the tokens behind the known ones.
   * each: called in the order of the tokens read with the session, whose decisions and scores are the token's, and the logits.
   */
  decode(known, count, choose, guesses = [], each = () => {}) {
    const [tokens, end] = [[...known, ...guesses.slice(0, count)], known.length + count - 1];
    while (tokens.length < end) tokens.push(tokens.at(-1));
    for (let start = 0; start < end; ) {
      const part = tokens.slice(start, Math.min(start + this.window, end));
      const run = this.run(part);
      let right = 1; // rows whose tokens are true
      for (let k = 0; k < part.length; ++k) {
        const next = start + k + 1;
        const token = next < known.length ? known[next] : choose(run.logits(k), this.position + k);
        if (right === k + 1 && right < part.length && token === tokens[next]) right += 1;
        tokens[next] = token;
      }
      run.accept(right, (k) => each(this, run.logits(k)));
      start += right;
    }
    return tokens.slice(known.length);
  }

  /** Run a decode step of the next tokens. `logits` of a row, a view; `accept`: count the first rows, and undo the others. */
  run(tokens) {
    this.requireTokens(tokens);
    const { num_layers: layers, vocab_size: vocabulary, tokens_per_frame: frame } = this.config;
    const { rows, position, forwards: number } = this;
    const each = (there, otherwise) => Array.from({ length: rows }, (_, k) => (k < tokens.length ? there(k) : otherwise));
    this.set("token", BigInt64Array, each((k) => tokens[k], 0));
    this.set("position", BigInt64Array, each((k) => position + k, -1));
    this.set("step", BigInt64Array, each((k) => number + k, INACTIVE));
    const ends = each((k) => position + k + 1, 0); // of the one span of a row; the other ones are empty
    this.set("spans", BigInt64Array, ends.flatMap((end) => [0, end, ...Array(2 * rows - 2).fill(0)]));
    const slot = (k, [start, bytes]) => this.artifact.view(Uint8Array, start + ((number + k) % frame) * bytes, bytes);
    const slots = (k) => this.replayed.map((place) => slot(k, place));
    const kept = tokens.map((_, k) => (k ? slots(k).map((slot) => slot.slice()) : []));
    const result = this.forward();
    const logits = result("logits", Float32Array, rows * vocabulary);
    const decides = this.artifact.programs.decode.outputs.includes("decisions");
    const decisions = decides && result("decisions", Uint8Array, layers * rows);
    const scores = decides && result("scores", Float32Array, layers * rows);
    const accept = (count, tell = () => {}) => {
      for (let k = count; k < tokens.length; ++k) slots(k).forEach((slot, i) => slot.set(kept[k][i]));
      this.steps += 1;
      for (let k = 0; k < count; ++k) {
        if (decides) [this.decisions, this.scores] = [decisions, scores].map((all) => all.filter((_, i) => i % rows === k));
        this.replays += this.decisions.reduce((sum, decision) => sum + decision);
        this.forwards += 1;
        this.position += 1;
        tell(k);
      }
    };
    return { logits: (k) => logits.subarray(k * vocabulary, (k + 1) * vocabulary), accept };
  }

  /** Share of the MLPs that replayed in all forwards since the reset. */
  get replayRatio() {
    return this.forwards ? this.replays / (this.forwards * this.config.num_layers) : 0;
  }
}

// Draws: `Sampling(exact=True)` of the Python package, bit for bit (docs/reference/numerics.md, Draws).

const LOG2_E = 1.4426950408889634;
const GUMBEL = Float64Array.from({ length: 65537 }, (_, j) => {
  const share = j < 65536 ? 2 ** ((j >> 11) - 32) * (1 + (j & 2047) / 2048) : 1 - 2 ** -33;
  return Math.round(-Math.log2(-Math.log1p(-share) / Math.LN2) * 2 ** 20) / 2 ** 20;
});
const FLOAT = new Float32Array(1);
const BITS = new Int32Array(FLOAT.buffer);

/** What is added to the scores of tokens 0 .. count - 1 at a position: Float64Array, from Philox4x32-10. */
export function noise(seed, position, count) {
  const found = new Float64Array(Math.ceil(count / 4) * 4);
  const high = (factor, word) => ((factor * (word >>> 16) + Math.floor((factor * (word & 0xffff)) / 65536)) / 65536) >>> 0;
  for (let first = 0; first < count; first += 4) {
    let [a, b, c, d] = [first >>> 2, position, 0, 0];
    let [low, top] = [seed | 0, (seed / 2 ** 32) | 0];
    for (let round = 0; round < 10; ++round) {
      const [left, right] = [high(0xd2511f53, a), high(0xcd9e8d57, c)];
      [a, b, c, d] = [right ^ b ^ low, Math.imul(0xcd9e8d57, c), left ^ d ^ top, Math.imul(0xd2511f53, a)];
      [low, top] = [(low + 0x9e3779b9) | 0, (top + 0xbb67ae85) | 0];
    }
    [a, b, c, d].forEach((word, i) => {
      FLOAT[0] = (word | 1) >>> 0;
      const [place, rest] = [(BITS[0] >> 12) - (127 << 11), BITS[0] & 4095];
      found[first + i] = GUMBEL[place] + (rest && ((GUMBEL[place + 1] - GUMBEL[place]) * rest) / 4096);
    });
  }
  return found.subarray(0, count);
}

/** Chooses tokens of a video. temperature: 0 takes the likeliest. topK: 0 draws among all. seed: a whole number. */
export class Sampler {
  constructor({ temperature = 1, topK = 0, seed = 0 } = {}) {
    const whole = (value) => Number.isSafeInteger(value) && value >= 0;
    if (!(typeof temperature === "number" && temperature >= 0 && temperature < Infinity && whole(topK) && whole(seed))) {
      throw new RangeError(`temperature ${temperature}, topK ${topK}, seed ${seed}: give numbers from 0 on, the last two whole`);
    }
    Object.assign(this, { temperature, topK, seed });
  }

  /**
   * The place of the chosen one of the logits at a position, of those at +Infinity where there are some.
   * Throws RangeError: one is NaN, or all are -Infinity.
   */
  choose(logits, position) {
    let top = 0;
    for (let i = 0; i < logits.length; ++i) {
      if (Number.isNaN(logits[i])) throw new RangeError(`logit ${i} is NaN`);
      if (logits[i] > logits[top]) top = i;
    }
    if (logits[top] === -Infinity) throw new RangeError("all logits are -Infinity");
    if (logits[top] === Infinity) logits = logits.map((value) => (value === Infinity ? 0 : -Infinity));
    if (this.temperature === 0) return top;
    const [scores, added] = [new Float64Array(logits), noise(this.seed, position, logits.length)];
    for (let i = 0; i < scores.length; ++i) scores[i] /= this.temperature;
    const best = (least) => {
      let [found, most] = [-1, -Infinity];
      for (let i = 0; i < scores.length; ++i) {
        const sum = scores[i] * LOG2_E + added[i];
        if (sum > most && scores[i] >= least) [found, most] = [i, sum];
      }
      return found;
    };
    const chosen = best(-Infinity);
    if (!this.topK || scores.reduce((larger, score) => larger + (score > scores[chosen]), 0) < this.topK) return chosen;
    return best(scores.slice().sort()[scores.length - this.topK]);
  }
}
