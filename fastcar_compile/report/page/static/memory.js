/* The memory map: memories and banks as bars, buffers, state and parameters as tables. */
(() => {
  "use strict";
  const { el } = page;

  /* One memory: what lies in it, against its capacity. */
  function bar(item) {
    const used = item.pieces.reduce((sum, piece) => sum + piece.bytes, 0);
    const whole = Math.max(item.capacity ?? used, used, 1);
    const text = item.capacity
      ? `${page.bytes(used)} of ${page.bytes(item.capacity)} (${page.percent(used / item.capacity)})`
      : page.bytes(used);
    return el(
      "div",
      { class: "bank" },
      el(
        "div",
        { class: "bank-head" },
        el("strong", {}, item.name),
        el("span", { class: "muted" }, item.note),
        el("span", { class: "amount" }, text),
      ),
      el(
        "div",
        {
          class: "stack",
          role: "img",
          "aria-label": item.pieces.map((p) => `${p.name} ${page.bytes(p.bytes)}`).join(", "),
        },
        item.pieces.map((piece) =>
          page.tip(
            el("i", {
              class: `piece-${piece.name.replace(/ /g, "_")}`,
              style: { width: `${(100 * piece.bytes) / whole}%` },
            }),
            `${piece.name}: ${page.bytes(piece.bytes)}`,
          ),
        ),
      ),
      el(
        "ul",
        { class: "keys" },
        item.pieces.map((piece) =>
          el(
            "li",
            {},
            el("i", { class: `swatch piece-${piece.name.replace(/ /g, "_")}` }),
            `${piece.name.replace(/_/g, " ")} `,
            el("b", {}, page.bytes(piece.bytes)),
          ),
        ),
      ),
    );
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
    return page.card(
      title,
      note,
      page.table(
        title,
        [
          ["name", ""],
          ["kind", ""],
          ["type", ""],
          ["shape", "number"],
          ["layers", "number"],
          ["each", "number"],
          ["together", "number"],
        ],
        rows,
      ),
    );
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
    const columns = [
      ["buffer", ""],
      ["port or banks", ""],
      ["direction", ""],
      ["kernel", ""],
      ["bytes of a call, at most", "number"],
    ];
    return page.card(
      "Buffers of the kernels",
      "What the host gives to a kernel and takes from it, and the port of the memory that each is connected to.",
      page.table("Buffers of the kernels", columns, rows),
    );
  }

  page.addTab("memory", "Memory", (panel) => {
    const { bars, state, weights } = page.data.memory;
    const [whole, ...banks] = bars;
    panel.append(
      page.card(
        "Memory",
        "What the decoder keeps: parameters of the rewritten graph, and the state of a session.",
        bar(whole),
      ),
    );
    if (banks.length)
      panel.append(
        page.card(
          "Weight ports and banks",
          "The weight streams are cut into one section per port.",
          el("div", { class: "banks" }, banks.map(bar)),
        ),
      );
    for (const card of [
      tensors("State", "Kept from step to step. A star stands for the number of the layer.", state),
      buffers(page.data.memory.buffers),
      tensors("Parameters", "Of the rewritten graph. A star stands for the number of the layer.", weights),
    ])
      if (card) panel.append(card);
  });
})();
