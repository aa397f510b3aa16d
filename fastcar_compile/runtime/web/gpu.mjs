// The decoder of an artifact on a GPU: the dispatches of gpu/program.json by WebGPU. fastcar.mjs opens it.
//
// A decode step is one submit. A layer that replays is decided on the GPU: a shader writes how many workgroups the MLP's
// dispatches have, 0 where all rows replay. The host reads logits, decisions and scores with one wait.

const VERSION = 1; // of the program, as in codegen/tvm/gpu/program.py
const REPLAY_ROLES = ["mlp_cache", "gate_cache", "chain_count"]; // states of a slot for each token of a frame
const PER_WORD = { int8: 4, uint8: 4, float16: 2, bfloat16: 2 };
const RESULTS = { logits: Float32Array, decisions: Uint32Array, scores: Float32Array }; // what the host reads

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
    const needed = {
      maxBufferSize: largest,
      maxStorageBufferBindingSize: largest,
      maxStorageBuffersPerShaderStage: Math.max(...program.dispatches.map(({ buffers }) => buffers.length)),
    };
    for (const [name, least] of Object.entries(needed)) {
      const most = adapter.limits[name];
      if (most < least) throw new Error(`the decoder needs ${name} ${least}, and the GPU has ${most}`);
    }
    const device = await adapter.requestDevice({ requiredLimits: needed });
    const { vendor, architecture, description } = adapter.info;
    const gpu = new Gpu(device, program, decoder, description || `${vendor} ${architecture}`.trim());
    const shaders = program.shaders.map((code) => ({ module: device.createShaderModule({ code }), entryPoint: "main" }));
    const pipeline = (compute) => device.createComputePipelineAsync({ layout: "auto", compute });
    gpu.pipelines = await Promise.all(shaders.map(pipeline));
    return gpu;
  }

  constructor(device, program, decoder, name) {
    Object.assign(this, { device, program, decoder, name, shared: new Map(), failure: null });
    device.addEventListener("uncapturederror", ({ error }) => (this.failure ??= error.message));
    device.lost.then(({ message }) => (this.failure ??= message || "no reason is given"));
  }

  /** A buffer of zeros. */
  buffer(words, { indirect = false, usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC } = {}) {
    return this.device.createBuffer({ size: 4 * Math.max(1, words), usage: usage | (indirect ? GPUBufferUsage.INDIRECT : 0) });
  }

  /** Put constants and weights, [name, bytes] each, into buffers. */
  async fill(weights) {
    const known = new Map(weights);
    this.program.buffers.forEach((facts, place) => {
      const { name, constant } = facts;
      if (constant === undefined && !known.has(name)) return;
      const data = constant === undefined ? words(known.get(name), facts) : Uint8Array.from(atob(constant), (c) => c.charCodeAt(0));
      this.shared.set(place, this.buffer(facts.words));
      this.device.queue.writeBuffer(this.shared.get(place), 0, data);
    });
    await this.device.queue.onSubmittedWorkDone().catch(() => {});
    this.requireWorking();
  }

  /** Throw Error where the device is lost, or has refused something. */
  requireWorking() {
    if (this.failure !== null) throw new Error(`the GPU is lost: ${this.failure.replace(/[\s.]+$/, "")}`);
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
    const groups = program.dispatches.map(({ shader, buffers: used }) =>
      device.createBindGroup({
        layout: gpu.pipelines[shader].getBindGroupLayout(0),
        entries: used.map((buffer, binding) => ({ binding, resource: { buffer: buffers[buffer] } })),
      }));
    this.calls = program.dispatches.map(({ shader, groups: count, counts }, i) => {
      const where = counts && [buffers[counts[0]], 4 * counts[1]];
      return [gpu.pipelines[shader], groups[i], count, where];
    });
    let offset = 0;
    this.results = Object.keys(RESULTS).filter((name) => name in program.outputs).map((name) => {
      const [buffer, start] = [buffers[program.outputs[name]], offset];
      offset += buffer.size;
      return [name, buffer, start];
    });
    this.landing = gpu.buffer(offset / 4, { usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    this.sizes = { logits: config.vocab_size, decisions: config.num_layers, scores: config.num_layers };
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
    for (const buffer of [...this.own.values(), this.landing]) buffer.destroy();
  }

  setThresholds(values) {
    this.write("thresholds", Float32Array.from(values));
  }

  /** Queue one decode step. read: whether its results are to land. */
  submit(token, position, number, read) {
    for (const [name, value] of Object.entries({ tokens: token, position, step: number })) this.write(name, Int32Array.of(value));
    const encoder = this.gpu.device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    for (const [pipeline, group, count, where] of this.calls) {
      pass.setPipeline(pipeline);
      pass.setBindGroup(0, group);
      if (where) pass.dispatchWorkgroupsIndirect(...where);
      else pass.dispatchWorkgroups(...count);
    }
    pass.end();
    if (read) for (const [, buffer, start] of this.results) encoder.copyBufferToBuffer(buffer, 0, this.landing, start, buffer.size);
    this.gpu.device.queue.submit([encoder.finish()]);
  }

  /** Resolves to the results that landed. Throws Error: the device is lost. */
  async landed() {
    try {
      await this.landing.mapAsync(GPUMapMode.READ);
    } catch (error) {
      await Promise.race([this.gpu.device.lost, new Promise((wait) => setTimeout(wait, 1000))]); // it may say more
      this.gpu.failure ??= error.message;
    }
    this.gpu.requireWorking();
    const data = this.landing.getMappedRange();
    const entries = this.results.map(([name, , start]) => [name, new RESULTS[name](data, start, this.sizes[name]).slice()]);
    this.landing.unmap();
    return Object.fromEntries(entries);
  }

  /** Read tokens from position 0 on through decode step 0, which replays nothing and leaves nothing to replay. */
  async prefill(tokens) {
    for (const [position, token] of tokens.entries()) this.submit(token, position, 0, position === tokens.length - 1);
    this.reset(false);
    return (await this.landed()).logits;
  }

  async forward([token], position, number) {
    this.submit(token, position, number, true);
    return this.landed();
  }
}
