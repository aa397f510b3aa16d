/* What the artifact is: figures, options, passes, files. */
(() => {
  "use strict";
  const { el } = page;

  function group(name, title, note) {
    return page.card(title, note, page.facts(page.data.facts.filter((fact) => fact.group === name)));
  }

  function passes() {
    const rows = page.data.passes.map((line, number) => {
      const finds = { type: "button", class: "link", onclick: () => page.search(line.name) };
      const made = line.made ? page.plural(line.made, "node") : "changed";
      const options = line.options && el("code", { class: "options" }, line.options);
      return [
        String(number + 1),
        line.made ? el("button", finds, line.name) : el("code", {}, line.name),
        line.modified ? made : el("span", { class: "muted" }, "nothing to do"),
        el("span", {}, page.data.reasons[line.reason] ?? "", options || null),
      ];
    });
    const note = "In the order in which they ran. A name finds the nodes that the pass made.";
    return page.table("Passes", note, "#:number | pass | made:short | why:wide", rows);
  }

  function files() {
    const rows = page.data.files.map((file) => [
      el("code", {}, file.name),
      page.bytes(file.bytes),
      el("code", { class: "muted", title: file.sha256 }, file.sha256.slice(0, 12)),
    ]);
    const total = page.data.files.reduce((sum, file) => sum + file.bytes, 0);
    const note = `${page.plural(rows.length, "file")}, ${page.bytes(total)}. The manifest holds the SHA-256 of each.`;
    return page.table("Files", note, "file | size:number | SHA-256", rows);
  }

  page.addTab("overview", "Overview", (panel) => {
    const key = page.data.facts.filter((fact) => fact.group === "key");
    const groups = [group("decoder", "Decoder"), group("options", "Compiled with"), group("written by", "Written by")];
    panel.append(page.figures(key), el("div", { class: "columns" }, groups), passes(), files());
  });
})();
