// The decoder of an artifact on a GPU: the dispatches of gpu/program.json by WebGPU. fastcar.mjs opens it.
//
// A decode step is one submit, and where the GPU draws the tokens, a frame is. A layer that replays is decided on the GPU: a shader writes how many workgroups the MLP's
// dispatches have, 0 where all rows replay. The host reads logits, decisions and scores with one wait.

import { REPLAY_ROLES, successive } from "./wasm.mjs";

const VERSION = 2; // of the program, as in codegen/tvm/gpu/program.py
const PROMPT = -1; // number of a row that leaves nothing to replay
const [NEVER, MOST] = [3e38, 3.4028234663852886e38]; // a threshold as in codegen/tvm/gpu/states.py; of float32
const PER_WORD = { int8: 4, uint8: 4, float16: 2, bfloat16: 2 };
const RESULTS = { logits: Float32Array, decisions: Uint32Array, scores: Float32Array }; // what the host reads

// Draws the next token into the step's inputs: by position, of logits * factor + noise, or one that is known already.
const DRAW = `
@group(0) @binding(0) var<storage, read> logits : array<f32>;
@group(0) @binding(1) var<storage, read> noise : array<f32>;
@group(0) @binding(2) var<storage, read> plan : array<i32>; // first, count, top k, factor, and the known tokens or -1
@group(0) @binding(3) var<storage, read_write> token : array<i32>;
@group(0) @binding(4) var<storage, read_write> position : array<i32>;
@group(0) @binding(5) var<storage, read_write> number : array<i32>;
@group(0) @binding(6) var<storage, read_write> drawn : array<i32>; // how many, and the tokens
var<workgroup> sums : array<f32, 64>;
var<workgroup> places : array<i32, 64>;
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) t : u32) {
  let at = drawn[0];
  let count = plan[1];
  sums[t] = -3.4e38;
  places[t] = 0;
  for (var i = i32(t); i < count; i += 64) {
    let score = logits[plan[0] + i];
    var above = -1;
    if (plan[2] > 0) {
      above = 0;
      for (var j = 0; j < count; j++) { above += select(0, 1, logits[plan[0] + j] > score); }
    }
    let sum = score * bitcast<f32>(plan[3]) + noise[at * count + i];
    if (above < plan[2] && sum > sums[t]) {
      sums[t] = sum;
      places[t] = i;
    }
  }
  workgroupBarrier();
  if (t == 0u) {
    for (var i = 1u; i < 64u; i++) {
      if (sums[i] > sums[0] || (sums[i] == sums[0] && places[i] < places[0])) {
        sums[0] = sums[i];
        places[0] = places[i];
      }
    }
    let known = plan[4 + at];
    let next = select(known, plan[0] + places[0], known < 0);
    token[0] = next;
    position[0] += 1;
    number[0] += 1;
    drawn[0] = at + 1;
    drawn[at + 1] = next;
  }
}`;

/** Bytes of a tensor as a GPU has them: words of 4 bytes, rows of small types padded to whole ones. */
function words(bytes, { dtype, shape }) {
  if (dtype === "bool") return Int32Array.from(bytes);
  if (dtype === "int64") return new Int32Array(bytes.slice().buffer).filter((_, i) => i % 2 === 0);
  const [per, last] = [PER_WORD[dtype] ?? 1, shape.at(-1) ?? 1];
  if (last % per === 0) return bytes;
  const [row, wide] = [(last * 4) / per, Math.ceil(last / per) * 4];
  const found = new Uint8Array((bytes.length / row) * wide);
  for (let i = 0; i * row < bytes.length; ++i) found.set(bytes.subarray(i * row, (i + 1) * row), i * wide);
  return found;
}

/** An adapter's device with a program: its pipelines, and the weights that all sessions share. */
export class Gpu {
  /**
   * Open the adapter. decoder: of the manifest. software: whether an adapter that is no hardware may decode.
   * Throws Error: there is none, or one of its limits is too small.
   */
  static async open(program, decoder, { software }) {
    if (program.version !== VERSION) throw new Error("the artifact's program for a GPU is of another version");
    if (!globalThis.navigator?.gpu) throw new Error("there is no WebGPU here (browsers have it at https and localhost)");
    const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" });
    if (!adapter) throw new Error("WebGPU finds no GPU");
    if (adapter.info.isFallbackAdapter && !software) throw new Error("WebGPU finds no GPU but a software adapter, which is slower");
    const largest = 4 * Math.max(...program.buffers.map(({ words }) => words));
    const needed = { maxBufferSize: largest, maxStorageBufferBindingSize: largest };
    for (const [name, least] of Object.entries(needed)) {
      const most = adapter.limits[name];
      if (most < least) throw new Error(`the decoder needs ${name} ${least}, and the GPU has ${most}`);
    }
    const device = await adapter.requestDevice({ requiredLimits: needed });
    const { vendor, architecture, description } = adapter.info;
    const gpu = new Gpu(device, program, decoder, description || `${vendor} ${architecture}`.trim());
    const shaders = program.shaders.map((code) => ({ module: device.createShaderModule({ code }), entryPoint: "main" }));
    const pipeline = (compute) => device.createComputePipelineAsync({ layout: "auto", compute });
    const drawing = { module: device.createShaderModule({ code: DRAW }), entryPoint: "main" };
    [gpu.drawing, ...gpu.pipelines] = await Promise.all([drawing, ...shaders].map(pipeline));
    return gpu;
  }

  constructor(device, program, decoder, name) {
    Object.assign(this, { device, program, decoder, name, shared: new Map(), failure: null });
    device.addEventListener("uncapturederror", ({ error }) => (this.failure ??= error.message));
    device.lost.then(({ message }) => (this.failure ??= message || "no reason is given"));
  }

  /** A buffer of zeros. */
  buffer(words, { indirect = false, usage } = {}) {
    const { STORAGE, UNIFORM, COPY_DST, COPY_SRC, INDIRECT } = GPUBufferUsage;
    usage ??= STORAGE | UNIFORM | COPY_DST | COPY_SRC | (indirect ? INDIRECT : 0);
    return this.device.createBuffer({ size: 4 * Math.max(1, words), usage });
  }

  /** Put constants and weights, [name, bytes] each, into buffers. */
  async fill(weights) {
    const known = new Map(weights);
    this.program.buffers.forEach((facts, place) => {
      const { constant, parts = [facts] } = facts;
      const given = parts.filter(({ name }) => known.has(name)).map((part) => [words(known.get(part.name), part), 4 * (part.word ?? 0)]);
      if (constant !== undefined) given.push([Uint8Array.from(atob(constant), (c) => c.charCodeAt(0)), 0]);
      if (given.length) this.shared.set(place, this.buffer(facts.words));
      for (const [data, start] of given) this.device.queue.writeBuffer(this.shared.get(place), start, data);
    });
    await this.device.queue.onSubmittedWorkDone().catch(() => {});
    this.requireWorking();
  }

  /** Throw Error where the device is lost, or has refused something. */
  requireWorking() {
    if (this.failure !== null) throw new Error(`the GPU is lost: ${this.failure.replace(/[\s.]+$/, "")}`);
  }

  bound(pipeline, buffers) {
    const entries = buffers.map((buffer, binding) => ({ binding, resource: { buffer } }));
    return this.device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries });
  }

  /** Resolves to the bytes of a buffer that is mapped. Throws Error: the device is lost. */
  async landed(landing) {
    try {
      await landing.mapAsync(GPUMapMode.READ);
    } catch (error) {
      await Promise.race([this.device.lost, new Promise((wait) => setTimeout(wait, 1000))]); // it may say more
      this.failure ??= error.message;
    }
    this.requireWorking();
    const data = landing.getMappedRange().slice();
    landing.unmap();
    return data;
  }

  states() {
    return new States(this);
  }
}

/** The states of a session on a GPU; see those of wasm.mjs. */
class States {
  constructor(gpu) {
    const { device, program, decoder, shared } = (this.gpu = gpu);
    this.own = new Map();
    const made = (facts, place) => shared.get(place) ?? this.own.set(place, gpu.buffer(facts.words, facts)).get(place);
    const buffers = program.buffers.map(made);
    const place = (wanted) => buffers[program.buffers.findIndex(({ name }) => name === wanted)];
    const { config, state } = decoder;
    this.inputs = Object.fromEntries(["tokens", "position", "step", "thresholds"].map((name) => [name, place(name)]));
    this.cleared = state.map(({ name, role }) => [place(name), REPLAY_ROLES.includes(role)]).filter(([buffer]) => buffer);
    [this.rows, this.frame] = [config.rows ?? 1, config.tokens_per_frame];
    const replay = this.cleared.filter(([, ofReplay]) => ofReplay);
    this.replayed = replay.map(([buffer]) => [buffer, buffer.size / this.frame, this.rows > 1 && gpu.buffer(buffer.size / 4)]);
    this.calls = program.dispatches.map(({ shader, buffers: used, groups, counts }) => {
      const pipeline = gpu.pipelines[shader];
      return [pipeline, gpu.bound(pipeline, used.map((number) => buffers[number])), groups, counts && [buffers[counts[0]], 4 * counts[1]]];
    });
    this.results = Object.keys(RESULTS).filter((name) => name in program.outputs).map((name) => [name, buffers[program.outputs[name]]]);
    this.stride = this.results.reduce((sum, [, { size }]) => sum + size, 0);
    this.landing = this.land(this.stride);
    const counts = { logits: config.vocab_size, decisions: config.num_layers, scores: config.num_layers };
    this.sizes = Object.fromEntries(Object.entries(counts).map(([name, count]) => [name, count * this.rows]));
  }

  land(bytes) {
    return this.gpu.buffer(bytes / 4, { usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
  }

  write(name, values) {
    if (this.inputs[name]) this.gpu.device.queue.writeBuffer(this.inputs[name], 0, values);
  }

  /** Set states to zero: all, or those of replay. */
  reset(all = true) {
    const encoder = this.gpu.device.createCommandEncoder();
    for (const [buffer, ofReplay] of this.cleared) if (all || ofReplay) encoder.clearBuffer(buffer);
    this.gpu.device.queue.submit([encoder.finish()]);
  }

  close() {
    const kept = this.replayed.map(([, , spare]) => spare).filter(Boolean);
    for (const buffer of [...this.own.values(), ...kept, this.landing]) buffer.destroy();
  }

  /** values: float32, of each layer all rows; NaN: it never replays. Shaders may take it that all numbers are finite. */
  setThresholds(values) {
    const finite = (value) => (Number.isNaN(value) ? NEVER : Math.min(Math.max(value, -MOST), MOST));
    this.write("thresholds", Float32Array.from(values, finite));
  }

  /** An encoder of a step of successive tokens; step: number of row k. */
  begin(tokens, position, step) {
    const given = successive(this.rows, tokens, position, step);
    for (const [name, values] of Object.entries(given)) this.write(name, Int32Array.from(values));
    return this.gpu.device.createCommandEncoder();
  }

  /** Add copies of the slots of step number `number` from the replay states to spare ones, or back. */
  copySlots(encoder, number, back = false) {
    for (const [buffer, bytes, spare] of this.replayed) {
      const start = (number % this.frame) * bytes;
      encoder.copyBufferToBuffer(back ? spare : buffer, start, back ? buffer : spare, start, bytes);
    }
  }

  /** Add a decode step to an encoder. */
  encode(encoder, more = []) {
    const pass = encoder.beginComputePass();
    for (const [pipeline, group, count, where] of [...this.calls, ...more]) {
      pass.setPipeline(pipeline);
      pass.setBindGroup(0, group);
      if (where) pass.dispatchWorkgroupsIndirect(...where);
      else pass.dispatchWorkgroups(...count);
    }
    pass.end();
  }

  /** Add a copy of the results of a step to an encoder. */
  copy(encoder, landing, start = 0) {
    for (const [, buffer] of this.results) {
      encoder.copyBufferToBuffer(buffer, 0, landing, start, buffer.size);
      start += buffer.size;
    }
  }

  /** Results of a step among bytes that landed. */
  found(data, start = 0) {
    return Object.fromEntries(this.results.map(([name, { size }]) => {
      start += size;
      return [name, new RESULTS[name](data, start - size, this.sizes[name])];
    }));
  }

  /** Read tokens from position 0 on, all rows at a time; one row alone is step 0, and what it leaves to replay goes. */
  async prefill(tokens) {
    const { rows, gpu: { device } } = this;
    for (let start = 0; start < tokens.length; start += rows) {
      const encoder = this.begin(tokens.slice(start, start + rows), start, () => (rows > 1 ? PROMPT : 0));
      this.encode(encoder);
      if (start + rows >= tokens.length) this.copy(encoder, this.landing);
      device.queue.submit([encoder.finish()]);
    }
    this.reset(false);
    const { logits } = this.found(await this.gpu.landed(this.landing));
    const [vocabulary, last] = [logits.length / rows, (tokens.length - 1) % rows];
    return logits.subarray(last * vocabulary, (last + 1) * vocabulary);
  }

  async forward(tokens, position, number) {
    const { gpu } = this;
    const encoder = this.begin(tokens, position, (k) => number + k);
    for (let k = 1; k < tokens.length; ++k) this.copySlots(encoder, number + k);
    this.encode(encoder);
    this.copy(encoder, this.landing);
    gpu.device.queue.submit([encoder.finish()]);
    const undo = (k) => {
      const back = gpu.device.createCommandEncoder();
      this.copySlots(back, number + k, true);
      gpu.device.queue.submit([back.finish()]);
    };
    return { ...this.found(await gpu.landed(this.landing)), undo };
  }

  /**
   * Read known tokens and those that are drawn behind them, `count` in all, in one submit. rule: see `Sampler.among`.
   * Resolves to nothing where a step has several rows: the host tells which guesses were right.
   */
  async queue(known, count, { first, count: codes, topK, factor, noise }, { position, forwards }) {
    if (this.rows > 1) return null;
    const { gpu, inputs: { tokens, position: place, step } } = this;
    const each = (make) => Array.from({ length: count }, (_, i) => make(i));
    const plan = Int32Array.of(first, codes, topK, 0, ...each((i) => known[i + 1] ?? -1));
    new Float32Array(plan.buffer)[3] = factor;
    const noises = new Float32Array(count * codes);
    each((i) => i + 1 >= known.length && noises.set(noise(position + i), i * codes));
    const [of, rules, drawn, spare] = [noises.length, plan.length, count + 1, 1].map((words) => gpu.buffer(words));
    gpu.device.queue.writeBuffer(of, 0, noises);
    gpu.device.queue.writeBuffer(rules, 0, plan);
    const [, logits] = this.results.find(([name]) => name === "logits");
    const draw = [gpu.drawing, gpu.bound(gpu.drawing, [logits, of, rules, tokens, place, step ?? spare, drawn]), [1, 1, 1]];
    const landing = this.land(count * this.stride + drawn.size);
    const encoder = this.begin([known[0]], position, () => forwards);
    each((i) => {
      this.encode(encoder, [draw]);
      this.copy(encoder, landing, i * this.stride);
    });
    encoder.copyBufferToBuffer(drawn, 0, landing, count * this.stride, drawn.size);
    gpu.device.queue.submit([encoder.finish()]);
    const data = await gpu.landed(landing);
    for (const buffer of [of, rules, drawn, spare, landing]) buffer.destroy();
    return { steps: each((i) => this.found(data, i * this.stride)), drawn: new Int32Array(data, count * this.stride + 4, count) };
  }
}
