// One game in several windows of the page: they exchange actions only, and each generates every frame by itself.

import { actionsOf, hexadecimal } from "./game.mjs";

/** A window among others. The one that holds the lock leads: it orders all actions. When it closes, the next one leads. */
export class Together {
  constructor(name, game) {
    [this.game, this.id, this.leads, this.joined] = [game, crypto.randomUUID(), false, false];
    this.orders = []; // frames of the leader's that this window has not generated yet
    this.channel = new BroadcastChannel(name);
    this.left = new AbortController();
    const here = (task) => game.queue(() => (this.left.signal.aborted ? undefined : task())); // it may leave in the meantime
    this.channel.addEventListener("message", ({ data: { type, ...fields } }) => here(() => this.receive[type](fields)));
    const lead = () => new Promise((resolve) => {
      this.left.signal.addEventListener("abort", resolve);
      here(() => this.lead());
    });
    navigator.locks.request(name, { signal: this.left.signal }, lead).catch(() => {}); // the only error: this window has left
    this.send("join", { id: this.id });
  }

  send(type, fields) {
    if (!this.left.signal.aborted) this.channel.postMessage({ type, ...fields });
  }

  async lead() {
    this.leads = true;
    if (!this.joined) await this.game.begin();
    this.joined = true;
    this.send("leads");
    this.game.tell();
    this.game.next();
  }

  leave() {
    this.left.abort();
    this.channel.close();
  }

  /** Whether the next frame's action comes from another window. */
  get follows() {
    return !this.leads || this.orders.length > 0;
  }

  /** Give the game so far to the window `to`; null: to all. */
  async begun(to = null) {
    if (!this.leads) return;
    const { recording, mode, threshold, weights } = this.game;
    this.send("game", { to, mode, threshold, recorded: await recording.game(weights) });
    this.game.tell();
  }

  /** A frame was generated, by an order or, without one, of the leader's own. */
  played({ recording, number }, token, order) {
    recording.digest.then((bytes) => {
      const digest = hexadecimal(bytes);
      if (this.game.together !== this || this.game.recording !== recording) return; // of a game before
      if (!order) return this.send("frame", { number, token, digest });
      if ((order.digest ?? digest) !== digest || order.number !== number) this.differs(number);
    });
  }

  differs(number) {
    this.send("differs", { number });
    this.game.part(number);
  }

  receive = {
    join: ({ id }) => this.begun(id),
    leads: () => {
      this.send(this.joined ? "told" : "join", { id: this.id, message: { type: "visible", value: this.game.visible.has("") } });
    },
    told: ({ id, message }) => this.leads && this.game.handle(message, id),
    game: async ({ to, recorded, ...settings }) => {
      if (this.leads || !(to === this.id || (to === null && this.joined))) return;
      const tokens = actionsOf(recorded);
      this.orders = tokens.map((token, i) => ({ token, number: i + 1, digest: i + 1 < tokens.length ? undefined : recorded.digest }));
      this.joined = true;
      await this.game.follow(recorded, settings);
      this.receive.leads();
    },
    frame: (order) => {
      if (this.leads || !this.joined || order.number <= this.game.number + this.orders.length) return;
      this.orders.push(order);
      this.game.next();
    },
    status: ({ status }) => this.joined && this.game.mirror(status),
    differs: ({ number }) => this.game.part(number),
  };
}
