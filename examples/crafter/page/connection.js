// In the place of connection.js, where no server plays: the game runs in a worker of this page.

export class Connection {
  /** receive: object of handlers by message type; each gets the message, and the binary parts behind it. */
  constructor(receive) {
    this.receive = receive;
    this.open();
  }

  open() {
    this.worker?.terminate();
    this.worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.worker.addEventListener("message", ({ data: [message, body] }) => this.receive[message.type](message, body));
    this.worker.addEventListener("error", (event) => this.receive.ended({ reason: event.message ?? "The page cannot load its files." }));
  }

  send(type, fields) {
    this.worker.postMessage({ type, ...fields });
  }
}
