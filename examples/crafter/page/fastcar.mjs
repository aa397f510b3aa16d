// Decode an artifact of target wasm32 in a browser or in Node: no dependencies, one thread, one video.
//
//   const artifact = await load(new URL("artifact/", document.baseURI));   // or folder(path) in Node
//   const session = artifact.session();
//   let logits = session.prefill(tokens);                                  // Float32Array of the vocabulary
//   logits = session.step(token);
//
// What the artifact's numerics say holds here: with "exact", logits and decisions are those of every other backend.

const SCHEMA_VERSION = 5; // of manifests, as in artifact/manifest.py
const INSTRUCTION_SET = "wasm-simd128";
const LINE = 64; // bytes that a tensor's address is a multiple of
const BYTES = { bool: 1, int8: 1, uint8: 1, float16: 2, bfloat16: 2, int32: 4, float32: 4, int64: 8, float64: 8 };

/** An artifact cannot be used: the text says what, where and what to do. */
export class ArtifactError extends Error {}

/** A source of files: below a URL, which ends with a slash. */
export function under(url) {
  return async (name) => {
    const answer = await fetch(new URL(name, url));
    if (!answer.ok) throw new ArtifactError(`${name} cannot be read: HTTP ${answer.status}`);
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
  const read = async (name) => {
    try {
      return await given(name);
    } catch (error) {
      throw error instanceof ArtifactError ? error : new ArtifactError(`${name} cannot be read: ${error?.message ?? error}`);
    }
  };
  const bytes = await read("manifest.json");
  if (digest !== null && `sha256:${await sha256(bytes)}` !== digest) {
    throw new ArtifactError("manifest.json has another digest: fetch the artifact again");
  }
  const manifest = manifestOf(bytes);
  const programs = asDescribed(() => programsOf(manifest));
  const weights = asDescribed(() => Object.keys(manifest.files)).filter((name) => /^weights\/model.*\.safetensors$/.test(name)).sort();
  const checked = async (name) => {
    const [content, entry] = [await read(name), manifest.files[name]];
    if (entry === undefined || content.length !== entry.size || (await sha256(content)) !== entry.sha256) {
      throw new ArtifactError(`${name} is not the file that manifest.json lists: fetch the artifact again`);
    }
    return content;
  };
  const [library, ...files] = await Promise.all([programs.library, ...weights].map(checked));
  const { instance } = await WebAssembly.instantiate(library, {});
  return asDescribed(() => new Artifact(manifest, programs, new Machine(instance.exports), files));
}

/** What a manifest describes, made of its fields; one that lacks some is damaged. */
function asDescribed(make) {
  try {
    return make();
  } catch (error) {
    throw error instanceof TypeError ? new ArtifactError(`manifest.json is damaged: ${error.message}`) : error;
  }
}

function manifestOf(bytes) {
  let manifest;
  try {
    manifest = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch (error) {
    throw new ArtifactError(`manifest.json is damaged: ${error.message}`);
  }
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
    [config.batch_size !== 1 || config.rows !== null, "has several rows"],
    [variant.programs.prefill === null, "has no program that reads prompts"],
  ];
  const found = problems.filter(([wrong]) => wrong).map(([, what]) => what);
  if (found.length) throw new ArtifactError(`the decoder ${found.join(", and ")}: decode it from Python`);
  return variant.programs;
}

/** The library's memory. Addresses stay; views are made anew where the memory has grown. */
class Machine {
  constructor(exports) {
    this.exports = exports;
  }

  take(bytes) {
    const address = this.exports.fastcar_allocate(Math.max(1, bytes)) >>> 0;
    if (!address) throw new ArtifactError(`there is no memory for ${bytes} bytes`);
    return address;
  }

  view(kind, address, length) {
    return new kind(this.exports.memory.buffer, address, length);
  }
}

/** A loaded artifact. manifest: its manifest.json. config: of the decoder. */
export class Artifact {
  constructor(manifest, programs, machine, files) {
    [this.manifest, this.programs, this.machine] = [manifest, programs, machine];
    this.config = manifest.decoder.config;
    this.free = []; // states of sessions that were closed
    this.params = new Map(files.flatMap((bytes) => this.placed(bytes)));
    const compiled = manifest.layers.layers.map((layer) => layer.replay?.threshold ?? null);
    const infinite = { inf: Infinity, "-inf": -Infinity }; // JSON has texts for them
    this.compiled = (manifest.thresholds?.thresholds ?? compiled).map((value) => infinite[value] ?? value);
  }

  /** Put a weight file into the library's memory; return [name, [address, bytes]] of its tensors. */
  placed(bytes) {
    const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
    const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
    const start = this.machine.take(bytes.length + LINE);
    const data = Math.ceil((start + 8 + length) / LINE) * LINE; // tensors begin at lines behind the header
    this.machine.view(Uint8Array, data, bytes.length - 8 - length).set(bytes.subarray(8 + length));
    const tensors = Object.entries(header).filter(([name]) => name !== "__metadata__");
    return tensors.map(([name, { data_offsets: [begin, end] }]) => [name, [data + begin, end - begin]]);
  }

  /** Open a session; its states are its own, the weights are shared. */
  session() {
    return new Session(this);
  }
}

/** The next tokens of one video. */
export class Session {
  constructor(artifact) {
    [this.artifact, this.machine, this.config] = [artifact, artifact.machine, artifact.config];
    const { num_layers: layers, prefill_chunk: chunk } = this.config;
    const size = ({ shape, dtype }) => shape.reduce((product, side) => product * side, 1) * BYTES[dtype];
    const sizes = artifact.manifest.decoder.state.map((state) => [state.name, size(state)]);
    sizes.push(["position", 8], ["step", 8], ["thresholds", 4 * layers], ["token", 8], ["tokens", 8 * chunk]);
    const { decode, prefill } = artifact.programs;
    const table = (spec) => 4 * (spec.inputs.length + spec.params.length + spec.outputs.length);
    sizes.push(["decode", table(decode)], ["prefill", table(prefill)]);
    const lines = (bytes) => Math.ceil(bytes / LINE) * LINE;
    this.bytes = sizes.reduce((sum, [, bytes]) => sum + lines(bytes), 0);
    this.memory = artifact.free.pop() ?? this.machine.take(this.bytes);
    this.places = new Map();
    let next = this.memory;
    for (const [name, bytes] of sizes) {
      this.places.set(name, [next, bytes]);
      next += lines(bytes);
    }
    this.decode = this.program(decode, "decode", "token");
    this.read = this.program(prefill, "prefill", "tokens");
    this.reset();
    this.setThreshold(artifact.compiled);
  }

  /** A program with its arguments in place, checked once; it gives the addresses of its results by name. */
  program(spec, table, tokens) {
    const { exports } = this.machine;
    const known = new Map([...this.artifact.params, ...this.places, ["tokens", this.places.get(tokens)]]);
    const names = [...spec.inputs, ...spec.params];
    const lacking = names.filter((name) => !known.has(name));
    if (lacking.length) throw new ArtifactError(`the library needs ${lacking.join(", ")}: compile the model again`);
    table = this.places.get(table)[0];
    const numbers = (column) => names.map((name) => known.get(name)[column]);
    this.machine.view(Uint32Array, table, names.length).set(numbers(1));
    const wrong = exports[spec.check](table);
    if (wrong >= 0) throw new ArtifactError(`${names[wrong]} has another size than the library's: compile the model again`);
    this.machine.view(Uint32Array, table, names.length).set(numbers(0));
    const results = table + 4 * names.length;
    return () => {
      if (exports[spec.function](table, results) !== 0) throw new ArtifactError("there is no memory for the step");
      const addresses = this.machine.view(Uint32Array, results, spec.outputs.length);
      return (name, kind, length) => this.machine.view(kind, addresses[spec.outputs.indexOf(name)], length);
    };
  }

  set(name, value) {
    this.machine.view(BigInt64Array, this.places.get(name)[0], 1)[0] = BigInt(value);
  }

  /** Forget everything but the thresholds: caches, position and counts. */
  reset() {
    this.machine.view(Uint8Array, this.memory, this.bytes - LINE).fill(0, 0, this.places.get("position")[0] - this.memory);
    this.position = this.forwards = this.eligible = this.replays = 0;
    this.first = null;
    this.decisions = new Uint8Array(this.config.num_layers);
    this.scores = new Float32Array(this.config.num_layers);
  }

  /** Give the states back to the artifact. The session is not used any more. */
  close() {
    if (this.decode !== null) this.artifact.free.push(this.memory);
    this.decode = this.read = null;
  }

  requireOpen() {
    if (this.decode === null) throw new RangeError("the session is closed: open another one");
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
    this.machine.view(Float32Array, this.places.get("thresholds")[0], layers).set(each.map((value) => value ?? NaN));
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
    const longest = this.config.max_seq_len;
    if (tokens?.length > longest) throw new RangeError(`${tokens.length} tokens, and the session has room for ${longest}`);
    tokens = Array.from(tokens ?? []);
    if (!tokens.length) throw new RangeError("a prompt has at least one token");
    this.requireTokens(tokens);
    const { prefill_chunk: chunk, vocab_size: vocabulary } = this.config;
    let logits = null;
    for (let start = 0; start < tokens.length; start += chunk) {
      const part = tokens.slice(start, start + chunk);
      const place = this.machine.view(BigInt64Array, this.places.get("tokens")[0], chunk);
      for (let i = 0; i < chunk; ++i) place[i] = BigInt(part[i] ?? 0);
      this.set("position", start);
      logits = this.read()("logits", Float32Array, chunk * vocabulary);
      logits = logits.slice((part.length - 1) * vocabulary, part.length * vocabulary);
    }
    this.position = tokens.length;
    return logits;
  }

  /** Decode one forward; return its logits, a view that the next forward overwrites. */
  step(token) {
    this.requireTokens([token]);
    this.first ??= this.position;
    const number = this.position - this.first;
    this.set("token", token);
    this.set("position", this.position);
    this.set("step", number);
    const result = this.decode();
    if (this.artifact.programs.decode.outputs.includes("decisions")) {
      const { num_layers: layers } = this.config;
      this.decisions.set(result("decisions", Uint8Array, layers));
      this.scores.set(result("scores", Float32Array, layers));
      this.replays += this.decisions.reduce((sum, flag) => sum + flag, 0);
      this.eligible += number >= this.config.tokens_per_frame ? 1 : 0;
    }
    this.position += 1;
    this.forwards += 1;
    return result("logits", Float32Array, this.config.vocab_size);
  }

  /** Share of the MLPs that replayed in all forwards since the reset. */
  get replayRatio() {
    return this.forwards ? this.replays / (this.forwards * this.config.num_layers) : 0;
  }
}

// Draws: `Sampling(exact=True)` of the Python package, bit for bit (docs/reference/numerics.md, Draws).

const EVEN = 1.5 * 2 ** 52; // adding it rounds a double to an integer, half to even
const rounded = (value) => value + EVEN - EVEN;
const KNOTS = Int32Array.from({ length: 257 }, (_, j) => Math.round(2 ** (j / 256) * 2 ** 24));

/** 2^difference as an integer of 2^-24, for a difference of at most 0. */
export function numerator(difference) {
  const units = rounded(Math.max(difference, -30) * 65536);
  const [shift, fraction] = [-Math.floor(units / 65536), ((units % 65536) + 65536) % 65536];
  const [knot, rest] = [fraction >> 8, fraction & 255];
  const power = KNOTS[knot] + (((KNOTS[knot + 1] - KNOTS[knot]) * rest + 128) >> 8);
  return (power + (2 ** shift >> 1)) >> shift;
}

const LOG2_E = 1.4426950408889634;

/** Chooses the tokens of one video. temperature: 0 takes the likeliest. topK: 0 draws among all. seed: a whole number. */
export class Sampler {
  constructor({ temperature = 1, topK = 0, seed = 0 } = {}) {
    const whole = (value) => Number.isSafeInteger(value) && value >= 0;
    if (!(typeof temperature === "number" && temperature >= 0 && temperature < Infinity && whole(topK) && whole(seed))) {
      throw new RangeError(`temperature ${temperature}, topK ${topK}, seed ${seed}: give numbers from 0 on, the last two whole`);
    }
    Object.assign(this, { temperature, topK, seed, drawn: 0, random: generator(BigInt(seed)) });
  }

  /** Another one with the same draws to come. */
  again() {
    const other = new Sampler(this);
    while (other.drawn < this.drawn) other.drawn += other.random() < 1 ? 1 : 0;
    return other;
  }

  /** The place of the chosen one of these logits, of those at +Infinity where there are some. Throws RangeError: one is NaN, or all are -Infinity. */
  choose(logits) {
    let top = 0;
    for (let i = 0; i < logits.length; ++i) {
      if (Number.isNaN(logits[i])) throw new RangeError(`logit ${i} is NaN`);
      if (logits[i] > logits[top]) top = i;
    }
    if (logits[top] === -Infinity) throw new RangeError("all logits are -Infinity");
    if (logits[top] === Infinity) logits = logits.map((value) => (value === Infinity ? 0 : -Infinity));
    if (this.temperature === 0) return top;
    const limited = this.topK > 0 && this.topK < logits.length;
    const least = limited ? Float32Array.from(logits).sort()[logits.length - this.topK] : -Infinity;
    const [places, sums] = [[], []];
    let total = 0;
    for (let i = 0; i < logits.length; ++i) {
      if (!(logits[i] >= least)) continue;
      total += numerator((logits[i] / this.temperature - logits[top] / this.temperature) * LOG2_E);
      places.push(i);
      sums.push(total);
    }
    const reached = this.random() * total;
    this.drawn += 1;
    return places[sums.findIndex((sum) => sum > reached)];
  }
}

/** numpy's default_rng(seed).random: PCG64 (XSL-RR) with the state that SeedSequence makes of the seed. */
function generator(seed) {
  const [low, multiplier] = [(1n << 64n) - 1n, 0x2360ed051fc65da44385df649fccf645n];
  const wrap = (value) => BigInt.asUintN(128, value);
  const words = seedWords(seed);
  const increment = wrap((((words[2] << 64n) | words[3]) << 1n) | 1n);
  let state = wrap((increment + ((words[0] << 64n) | words[1])) * multiplier + increment);
  return () => {
    state = wrap(state * multiplier + increment);
    const [mixed, turn] = [(state >> 64n) ^ (state & low), state >> 122n];
    const value = BigInt.asUintN(64, (mixed >> turn) | (mixed << (64n - turn)));
    return Number(value >> 11n) * 2 ** -53;
  };
}

/** Four words of 64 bits: SeedSequence(seed).generate_state(4, uint64). */
function seedWords(seed) {
  const mixer = (constant, factor) => (value) => {
    value = Math.imul(value ^ constant, (constant = Math.imul(constant, factor)));
    return value ^ (value >>> 16);
  };
  const entropy = [];
  for (let rest = seed; rest > 0n || !entropy.length; rest >>= 32n) entropy.push(Number(rest & 0xffffffffn) | 0);
  const hash = mixer(0x43b0d7e5, 0x931e8875);
  const mix = (x, y) => {
    const value = Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y);
    return (value ^ (value >>> 16)) | 0;
  };
  const pool = [0, 1, 2, 3].map((i) => hash(entropy[i] ?? 0));
  for (let from = 0; from < 4; ++from) {
    for (let to = 0; to < 4; ++to) if (from !== to) pool[to] = mix(pool[to], hash(pool[from]));
  }
  for (const word of entropy.slice(4)) for (let to = 0; to < 4; ++to) pool[to] = mix(pool[to], hash(word));
  const out = mixer(0x8b51f9dd, 0x58f38ded);
  const halves = Array.from({ length: 8 }, (_, i) => BigInt(out(pool[i % 4]) >>> 0));
  return [0, 2, 4, 6].map((i) => halves[i] | (halves[i + 1] << 32n));
}
