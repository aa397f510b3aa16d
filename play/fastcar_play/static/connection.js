// The WebSocket to the server: JSON one way; JSON, and frames with JSON in front, the other.

export class Connection {
  /** receive: object of handlers by message type; each gets the message, and the binary parts behind it. */
  constructor(receive) {
    this.receive = receive;
    this.open();
  }

  open() {
    this.over = false;
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    this.socket = new WebSocket(`${scheme}//${location.host}/play`);
    this.socket.binaryType = "arraybuffer";
    this.socket.addEventListener("message", (event) => this.take(event.data));
    this.socket.addEventListener("close", () => {
      if (!this.over) this.receive.ended({ reason: "The connection to the server is lost." });
      this.over = true;
    });
  }

  take(data) {
    const [message, body] = typeof data === "string" ? [JSON.parse(data), null] : unpack(data);
    if (message.type === "full" || message.type === "ended") this.over = true;
    this.receive[message.type](message, body);
  }

  send(type, fields) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ type, ...fields }));
  }
}

function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return [header, new Uint8Array(buffer, 4 + length)];
}
