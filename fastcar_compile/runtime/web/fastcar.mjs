// Decode an artifact of target wasm32 or webgpu in a browser or in Node: no dependencies, one thread, one video.
//
//   const artifact = await load(new URL("artifact/", document.baseURI));   // or folder(path) in Node
//   const session = artifact.session();                                    // on artifact.device: "gpu" or "cpu"
//   let logits = await session.prefill(tokens);                            // Float32Array of the vocabulary
//   logits = await session.step(token);
//   const next = await session.decode([token], 80, new Sampler({ seed }).choose);  // 80 tokens; several a step with rows
//
// What the artifact's numerics say holds here: with "exact", logits and decisions are those of every other backend.

import { ArtifactError, KNOTS, Library, tensors } from "./wasm.mjs";

export { ArtifactError };

const SCHEMA_VERSION = 5; // of manifests, as in artifact/manifest.py
const INSTRUCTION_SET = "wasm-simd128";
const GPU_PROGRAM = "gpu/program.json";

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
 * serves the files may have changed all of them. device: "gpu" or "cpu" (WebAssembly); "auto" takes the GPU where there
 * is one that the artifact can use, and the CPU where not or when it is lost: `notice` says why.
 * Throws ArtifactError: a file is missing or damaged, or the artifact is none that this module decodes on the device.
 */
export async function load(source, { digest = null, device = "auto" } = {}) {
  if (!["auto", "gpu", "cpu"].includes(device)) throw new RangeError(`device ${device}: give "auto", "gpu" or "cpu"`);
  const given = typeof source === "function" ? source : under(source);
  const unread = (name, error) => new ArtifactError(`${name} cannot be read: ${error?.message ?? error}`);
  const read = (name) => Promise.resolve(name).then(given).catch((error) => Promise.reject(unread(name, error)));
  const bytes = await read("manifest.json");
  if (digest !== null && `sha256:${await sha256(bytes)}` !== digest) {
    throw new ArtifactError("manifest.json has another digest: fetch the artifact again");
  }
  const manifest = asDescribed(() => manifestOf(bytes));
  const checked = async (name) => {
    const [content, entry] = [await read(name), manifest.files[name]];
    if (entry === undefined || content.length !== entry.size || (await sha256(content)) !== entry.sha256) {
      throw new ArtifactError(`${name} is not the file that manifest.json lists: fetch the artifact again`);
    }
    return content;
  };
  const artifact = asDescribed(() => new Artifact(manifest, checked, device));
  if (device === "cpu" || (device === "auto" && !(GPU_PROGRAM in manifest.files))) await artifact.toCpu();
  else await artifact.toGpu().catch((error) => artifact.fall(error));
  return artifact;
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

/** Throw ArtifactError unless this module decodes what a manifest describes. */
function requireDecoder({ decoder: { config } }) {
  const problems = [
    [config.takes_embeddings || config.vocab_size === null, "has no tokens in or out"],
    [config.context !== null, "has cross-attention"],
    [config.batch_size !== 1, "has several videos"],
  ];
  const found = problems.filter(([wrong]) => wrong).map(([, what]) => what);
  if (found.length) throw new ArtifactError(`the decoder ${found.join(", and ")}: decode it from Python`);
}

/**
 * A loaded artifact. manifest: its manifest.json. config: of the decoder. device: "gpu" or "cpu", which decodes now.
 * notice: a sentence that says why the GPU does not, or null.
 */
export class Artifact {
  constructor(manifest, checked, asked) {
    requireDecoder(manifest);
    Object.assign(this, { manifest, checked, asked, device: null, notice: null, falling: null });
    this.config = manifest.decoder.config;
    this.variant = manifest.host.variants.find((one) => one.instruction_set === INSTRUCTION_SET);
    this.weights = Object.keys(manifest.files).filter((name) => /^weights\/model.*\.safetensors$/.test(name)).sort();
    const compiled = manifest.layers.layers.map((layer) => layer.replay?.threshold ?? null);
    const infinite = { inf: Infinity, "-inf": -Infinity }; // JSON has texts for them
    this.compiled = (manifest.thresholds?.thresholds ?? compiled).map((value) => infinite[value] ?? value);
  }

  async toCpu() {
    const [lacks, hint] = this.variant === undefined ? ["library for WebAssembly", "for wasm32"] : ["program that reads prompts", "with a prefill_chunk above 1"];
    const because = this.notice === null ? "" : `${this.notice} And `;
    if (!this.variant?.programs.prefill) throw new ArtifactError(`${because}the artifact has no ${lacks}: compile it ${hint}`);
    const [library, ...files] = await Promise.all([this.variant.programs.library, ...this.weights].map(this.checked));
    const { instance } = await WebAssembly.instantiate(library, {});
    this.decoder = asDescribed(() => new Library(this.manifest, this.variant.programs, instance.exports, files));
    this.device = "cpu";
  }

  async toGpu() {
    if (!(GPU_PROGRAM in this.manifest.files)) throw new ArtifactError("the artifact has no program for a GPU: compile it for webgpu");
    const { Gpu } = await import("./gpu.mjs");
    const program = JSON.parse(new TextDecoder().decode(await this.checked(GPU_PROGRAM)));
    const gpu = await Gpu.open(program, this.manifest.decoder, { software: this.asked === "gpu" });
    const files = await Promise.all(this.weights.map(this.checked));
    await gpu.fill(files.flatMap((bytes) => {
      const [data, entries] = tensors(bytes);
      return entries.map(([name, begin, end]) => [name, data.subarray(begin, end)]);
    }));
    [this.decoder, this.device] = [gpu, "gpu"];
  }

  /** Decode on the CPU from now on, where that may be: the GPU is not there, or is lost. A damaged file stays an error. */
  async fall(error) {
    if (error instanceof ArtifactError) throw error;
    if (this.asked === "gpu") throw new ArtifactError(error.message);
    this.notice ??= `The CPU decodes: ${error.message}.`;
    await (this.falling ??= this.toCpu());
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
    this.rows = this.config.rows ?? 1;
    this.window = Math.min(this.rows, this.config.tokens_per_frame);
    this.states = artifact.decoder.states();
    this.reset();
    this.setThreshold(artifact.compiled);
  }

  /** Forget everything but the thresholds: caches, position and counts. */
  reset() {
    this.requireOpen();
    this.states.reset();
    [this.tokens, this.steps] = [[], 0];
    this.count();
  }

  /** Count replays from here on. */
  count() {
    this.forwards = this.replays = 0;
    this.decisions = new Uint8Array(this.config.num_layers);
    this.scores = new Float32Array(this.config.num_layers);
  }

  /** Tokens that were read. */
  get position() {
    return this.tokens.length;
  }

  /** Give the states back to the artifact. The session is not used any more. */
  close() {
    this.states?.close();
    this.states = null;
  }

  requireOpen() {
    if (this.states === null) throw new RangeError("the session is closed: open another one");
    if (this.busy) throw new RangeError("the session is decoding: await it first");
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
    this.giveThresholds();
  }

  giveThresholds() {
    // No score compares with NaN, whichever way a gate compares.
    this.states.setThresholds(this.thresholds.flatMap((value) => Array(this.rows).fill(value ?? NaN)));
  }

  /** What a call of the states gives, or of a GPU a promise. Where that is lost, the CPU's read the tokens so far again. */
  made(call) {
    const found = call(this.states);
    if (!(found instanceof Promise)) return found; // one session's step is over before another one begins its own
    this.busy = true;
    return found.catch((error) => this.fall(error).then(() => call(this.states))).finally(() => (this.busy = false));
  }

  async fall(error) {
    await this.artifact.fall(error);
    this.states = this.artifact.decoder.states();
    this.states.reset();
    this.giveThresholds();
    if (this.position) this.states.prefill(this.tokens);
    this.count(); // nothing to replay is left: the next frame is computed whole
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

  /** Read a prompt, an array of tokens, at the beginning; resolves to the logits behind its last one. They are a copy. */
  async prefill(tokens) {
    if (this.position) throw new RangeError("a prompt comes first: reset the session");
    if (!tokens?.length) throw new RangeError("a prompt has at least one token");
    this.requireTokens(tokens);
    const found = this.made((states) => states.prefill(tokens));
    const logits = found instanceof Promise ? await found : found;
    this.tokens = Array.from(tokens);
    return logits;
  }

  /** Decode one forward; resolves to its logits, a view that the artifact's next forward overwrites. */
  async step(token) {
    const found = this.run([token]);
    const run = found instanceof Promise ? await found : found;
    run.accept(1);
    return run.logits(0);
  }

  /**
   * Decode known tokens, at least one; resolves to the `count` tokens behind them; the last one is not read yet.
   *
   * A step reads a window of tokens, true ones and then guesses, whose draws are the next guesses (coupled Jacobi
   * decoding, arXiv 2510.24211): since draws are by position, the tokens are those of one `step` after the other.
   *
   * choose: (logits, position) -> token; with what `Sampler.among` returns, a GPU decodes all tokens in one submit.
   * guesses: of the tokens behind the known ones.
   * each: called in the order of the tokens read with the session, whose decisions and scores are the token's, and the logits.
   */
  async decode(known, count, choose, guesses = [], each = () => {}) {
    const [tokens, end] = [[...known, ...guesses.slice(0, count)], known.length + count - 1];
    while (tokens.length < end) tokens.push(tokens.at(-1));
    this.requireTokens(tokens.slice(0, end));
    const queued = choose.rule && this.states.queue && (await this.made((states) => states.queue?.(known, end, choose.rule, this)));
    if (queued) {
      const read = [...known, ...queued.drawn.slice(known.length - 1)];
      queued.steps.forEach((step, i) => this.accept([read[i]], step, 1, () => each(this, step.logits)));
      return read.slice(known.length);
    }
    for (let start = 0; start < end; ) {
      const part = tokens.slice(start, Math.min(start + this.window, end));
      const found = this.run(part);
      const run = found instanceof Promise ? await found : found;
      const drawn = choose.rule?.temperature ? run.draw?.(choose.rule) : null;
      let right = 1; // rows whose tokens are true
      for (let k = 0; k < part.length; ++k) {
        const next = start + k + 1;
        const made = () => (drawn?.[k] >= 0 ? drawn[k] + choose.rule.first : choose(run.logits(k), this.position + k));
        const token = next < known.length ? known[next] : made();
        if (right === k + 1 && right < part.length && token === tokens[next]) right += 1;
        tokens[next] = token;
      }
      run.accept(right, (k) => each(this, run.logits(k)));
      start += right;
    }
    return tokens.slice(known.length);
  }

  /**
   * Run a decode step of the next tokens: an object, or on a GPU a promise of it. `logits` of a row, a view; `draw`: what the
   * rows draw by a rule, where the library can; `accept`: count the first rows, and undo the others.
   */
  run(tokens) {
    this.requireTokens(tokens);
    const { vocab_size: vocabulary } = this.config;
    const row = (found) => ({
      logits: (k) => found.logits.subarray(k * vocabulary, (k + 1) * vocabulary),
      draw: found.draw,
      accept: (count, tell = () => {}) => this.accept(tokens, found, count, tell),
    });
    const found = this.made((states) => states.forward(tokens, this.position, this.forwards));
    return found instanceof Promise ? found.then(row) : row(found);
  }

  /** Count the first rows of a step, and undo the others. */
  accept(tokens, { decisions, scores, undo }, count, tell) {
    for (let k = count; k < tokens.length; ++k) undo(k);
    this.steps += 1;
    for (let k = 0; k < count; ++k) {
      for (let layer = 0; decisions && layer < this.config.num_layers; ++layer) {
        this.decisions[layer] = decisions[layer * this.rows + k];
        this.scores[layer] = scores[layer * this.rows + k];
        this.replays += this.decisions[layer];
      }
      this.forwards += 1;
      this.tokens.push(tokens[k]);
      tell(k);
    }
  }

  /** Share of the MLPs that replayed in all forwards since the reset. */
  get replayRatio() {
    return this.forwards ? this.replays / (this.forwards * this.config.num_layers) : 0;
  }
}

// Draws: `Sampling(exact=True)` of the Python package, bit for bit (docs/reference/numerics.md, Draws).

const LOG2_E = 1.4426950408889634;
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
      found[first + i] = (KNOTS[place] + ((KNOTS[place + 1] - KNOTS[place]) * rest) / 4096) / 2 ** 20;
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

  /** What `decode` takes: draws among `count` tokens from `first` on, and how a library or a GPU draws them by itself. */
  among(first, count) {
    const { temperature, topK, seed } = this;
    const choose = (logits, position) => this.choose(logits.subarray(first, first + count), position) + first;
    const drawn = { topK, factor: LOG2_E / temperature, noise: (position) => noise(seed, position, count) };
    const likeliest = { topK: 0, factor: 1, noise: () => new Float64Array(count) };
    return Object.assign(choose, { rule: { first, count, temperature, seed, ...(temperature ? drawn : likeliest) } });
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
