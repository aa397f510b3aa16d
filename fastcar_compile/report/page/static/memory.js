/* The memory map: memories and banks as bars, buffers, state and parameters as tables. */
(() => {
  "use strict";
  const { el } = page;
  const COLOURS = {
    ...{ weights: "--linear", weight_stream: "--linear", mlp_cache: "--gate", gate_cache: "--removed" },
    ...{ key_cache: "--attention", value_cache: "--values", chain_count: "--plain" },
  };

  /* One memory: what lies in it, against its capacity. */
  function bar(item) {
    const used = item.pieces.reduce((sum, piece) => sum + piece.bytes, 0);
    const whole = Math.max(item.capacity ?? used, used, 1);
    const text = item.capacity
      ? `${page.bytes(used)} of ${page.bytes(item.capacity)} (${page.percent(used / item.capacity)})`
      : page.bytes(used);
    const head = el(
      "div",
      { class: "bank-head" },
      el("strong", {}, item.name),
      el("span", { class: "muted" }, item.note),
      el("span", { class: "amount" }, text),
    );
    const parts = item.pieces.map(({ name, bytes }) => {
      const [text, colour] = [name.replace(/_/g, " "), COLOURS[name.replace(/ /g, "_")]];
      return { name, text, value: page.bytes(bytes), share: bytes / whole, colour };
    });
    return el("div", { class: "bank" }, head, ...page.stack(parts));
  }

  /* Tensors of the same name but for the layer's number, type and shape are one line. */
  function folded(lines) {
    const found = new Map();
    for (const line of lines) {
      const number = new RegExp(`(^|[._])${line.layer}(?=[._]|$)`);
      const name = line.layer === undefined ? line.name : line.name.replace(number, "$1*");
      const key = [name, line.dtype, line.shape.join(), line.role].join();
      const entry = found.get(key) ?? { ...line, own: line.name, name, count: 0, total: 0 };
      found.set(key, { ...entry, count: entry.count + 1, total: entry.total + line.bytes });
    }
    return [...found.values()].map((line) => (line.count === 1 ? { ...line, name: line.own } : line));
  }

  function tensors(title, note, lines) {
    if (!lines.length) return null;
    const rows = folded(lines).map((line) => [
      el("code", {}, line.name),
      line.role.replace(/_/g, " "),
      line.dtype,
      line.shape.join(" × "),
      String(line.count),
      page.bytes(line.bytes),
      page.bytes(line.total),
    ]);
    const columns = "name | kind | type | shape:number | layers:number | each:number | together:number";
    return page.table(title, note, columns, rows);
  }

  /* What the host gives to a kernel and takes from it, and over which port of the memory. */
  function buffers(lines) {
    if (!lines.length) return null;
    const words = { in: "host to kernel", out: "kernel to host" };
    const rows = lines.map((line) => [
      el("code", {}, line.name),
      line.port || "the linker chooses",
      words[line.direction],
      line.kernel,
      page.bytes(line.bytes),
    ]);
    const note =
      "What the host gives to a kernel and takes from it, and the port of the memory that each is connected to.";
    const columns = "buffer | port or banks | direction | kernel | bytes of a call, at most:number";
    return page.table("Buffers of the kernels", note, columns, rows);
  }

  page.addTab("memory", "Memory", (panel) => {
    const { bars, state, weights } = page.data.memory;
    const [whole, ...banks] = bars;
    const kept = "What the decoder keeps: parameters of the rewritten graph, and the state of a session.";
    panel.append(page.card("Memory", kept, bar(whole)));
    const ports = "The weight streams are cut into one section per port.";
    const map = el("div", { class: "banks" }, banks.map(bar));
    if (banks.length) panel.append(page.card("Weight ports and banks", ports, map));
    for (const card of [
      tensors("State", "Kept from step to step. A star stands for the number of the layer.", state),
      buffers(page.data.memory.buffers),
      tensors("Parameters", "Of the rewritten graph. A star stands for the number of the layer.", weights),
    ])
      if (card) panel.append(card);
  });
})();
