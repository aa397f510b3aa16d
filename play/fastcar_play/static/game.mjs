// A game in a world: an action in, the image codes of the next frame out; as fastcar_play/track.py and lockstep.py do it.

import { Sampler } from "./fastcar.mjs";

const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/** One decoder session on its way through a world. world: world.toml as JSON, with the tokens of its starts. */
export class Track {
  constructor(artifact, world) {
    [this.artifact, this.world, this.session] = [artifact, world, artifact.session()];
    const fits = Math.floor(artifact.config.max_seq_len / world.tokens_per_frame / 2);
    this.kept = Math.max(1, Math.min(world.context_frames, fits));
  }

  /** Start from a start of the world, with the draws of a seed. topK: 0 draws among all codes. */
  async begin({ start, seed, temperature, topK }) {
    const chosen = this.world.starts[start];
    if (chosen === undefined) throw new RangeError(`there is no start ${start} among ${this.world.starts.length}`);
    this.sampler = new Sampler({ seed, temperature, topK });
    this.frames = chosen.slice(-this.kept);
    await this.fill();
  }

  async fill() {
    this.session.reset();
    await this.session.prefill(this.frames.flat());
    this.pending = null;
  }

  /** Another decoder at the same point with the same draws to come; this one reads its frames again (Track.twin). */
  async twin() {
    const other = new Track(this.artifact, this.world);
    [other.sampler, other.frames] = [this.sampler, this.frames];
    await other.fill();
    await this.fill();
    return other;
  }

  /** Feed the last token of the frame, so that the next action does not wait for it. */
  async settle() {
    if (this.pending === null || this.session.window > 1 || this.artifact.device === "gpu") return; // the next frame begins with it
    await this.session.step(this.pending);
    this.pending = null;
  }

  /** Generate the frame of an action token. `each`: called behind every image token, with the session and the logits. */
  async frame(action, each = () => {}) {
    const { tokens_per_frame: length, image } = this.world;
    const refilled = this.session.position + length + (this.pending !== null) > this.session.config.max_seq_len;
    if (refilled) await this.fill();
    const [{ session }, decisions] = [this, []];
    const [known, first, steps] = [this.pending === null ? [action] : [this.pending, action], session.position, session.steps];
    const note = (_, logits) => {
      if (session.position - first < known.length) return; // of the last frame
      each(session, logits, decisions.length);
      decisions.push(Array.from(session.decisions, Number));
    };
    const choose = this.sampler.among(image.offset, image.count);
    const tokens = [action, ...(await session.decode(known, length - 1, choose, this.frames.at(-1).slice(1), note))];
    this.pending = tokens[length - 1];
    const accepted = (session.position - first) / (session.steps - steps);
    this.frames = [...this.frames, tokens].slice(-this.kept);
    return { codes: tokens.slice(1).map((token) => token - image.offset), decisions, refilled, accepted };
  }
}

/** The running hash of a game; see Ledger in lockstep.py. */
export class Ledger {
  constructor(artifact, world) {
    const [count, { num_layers: layers, vocab_size: vocabulary }] = [world.tokens_per_frame - 1, artifact.config];
    this.content = new Uint8Array(32 + 4 * (1 + count + count * layers + count * vocabulary));
    const place = (kind, start, length) => new kind(this.content.buffer, start, length);
    this.tokens = place(Int32Array, 32, 1 + count);
    this.scores = place(Float32Array, 32 + 4 * (1 + count), count * layers);
    this.logits = place(Float32Array, 32 + 4 * (1 + count + count * layers), count * vocabulary);
    this.digest = new Uint8Array(32);
  }

  /** What `Track.frame` is given to call. */
  note = (session, logits, i) => {
    this.scores.set(session.scores, i * session.scores.length);
    this.logits.set(logits, i * logits.length);
  };

  /** Add the frame that was noted; resolves to its check. */
  async add(action, { codes }) {
    this.content.set(this.digest);
    this.tokens.set([action, ...codes]);
    this.digest = new Uint8Array(await crypto.subtle.digest("SHA-256", this.content));
    return ALPHABET[this.digest[0] & 63];
  }
}

/** Bytes in hexadecimal. */
export const hexadecimal = (digest) => Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");

/** A game while it is played; RecordedGame in lockstep.py says what a file of it has. */
export class Recording {
  constructor(artifact, world, { start, seed, temperature, topK }, thresholds) {
    [this.artifact, this.world, this.runs, this.checks] = [artifact, world, [], ""];
    this.beginning = { start, seed, temperature, top_k: topK, thresholds: [...thresholds] };
    this.digest = Promise.resolve(new Uint8Array(32));
  }

  /** Generate the frame of an action token on a track, and add it. */
  async frame(track, action) {
    const ledger = new Ledger(this.artifact, this.world);
    const frame = await track.frame(action, ledger.note);
    if (this.runs.at(-1)?.token === action) this.runs.at(-1).count += 1;
    else this.runs.push({ token: action, count: 1 });
    this.digest = this.digest.then(async (before) => {
      ledger.digest = before;
      this.checks += await ledger.add(action, frame);
      return ledger.digest;
    });
    return frame;
  }

  /** Resolves to the file's content. weights: see weights_digest. */
  async game(weights) {
    const actions = this.runs.map(({ token, count }) => (count > 1 ? `${token}*${count}` : `${token}`)).join(" ");
    const digest = hexadecimal(await this.digest);
    return { format: 2, world: this.world.name, weights, ...this.beginning, actions, checks: this.checks, digest };
  }
}

const LONGEST = 2 ** 20; // frames: a file of a game has at most so many bytes, and a check for each

/** The action token of every frame of a recorded game. Throws RangeError, before anything is made of a damaged game. */
export function actionsOf({ actions, checks }) {
  const runs = String(actions).split(" ").filter(Boolean);
  const wrong = runs.find((run) => !/^\d{1,6}(\*\d{1,6})?$/.test(run));
  if (wrong !== undefined) throw new RangeError(`${wrong.slice(0, 80)} is no run of an action`);
  const counted = runs.map((run) => run.split("*").map(Number));
  const frames = counted.reduce((sum, [, count = 1]) => sum + count, 0);
  if (frames !== checks?.length || frames > LONGEST) {
    throw new RangeError(`there are ${frames} actions and ${checks?.length} checks, at most ${LONGEST}`);
  }
  return counted.flatMap(([token, count = 1]) => Array(count).fill(token));
}

/** Play a recorded game again; resolves to null, or to the number of the first frame with other bits, from 1 on. */
export async function verify(artifact, world, game) {
  const actions = actionsOf(game);
  const unknown = actions.find((token) => !world.actions.some((action) => action.token === token));
  if (unknown !== undefined) throw new RangeError(`the world has no action ${unknown}`);
  const [track, ledger] = [new Track(artifact, world), new Ledger(artifact, world)];
  try {
    track.session.setThreshold(game.thresholds);
    await track.begin({ ...game, topK: game.top_k });
    let number = 0;
    for (const action of actions) {
      const check = await ledger.add(action, await track.frame(action, ledger.note));
      if (check !== game.checks[number++]) return number;
    }
    return hexadecimal(ledger.digest) === game.digest ? null : number;
  } finally {
    track.session.close();
  }
}
