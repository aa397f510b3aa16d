/* What is known of the selected node. */
(() => {
  "use strict";
  const { el } = page;
  const WORDS = {
    kept: "unchanged",
    added: "inserted by the compiler",
    removed: "removed by the compiler",
    replaced: "replaced by the compiler",
  };

  page.detailsPanel = () => {
    const look = { class: "details", "aria-live": "polite", "aria-label": "Selected node", hidden: true };
    return (page.detailsBox = el("aside", { ...look, id: "details" }));
  };

  function link(side, id) {
    return el("button", { type: "button", class: "link", onclick: () => page.select(side, id) }, id);
  }

  function links(side, ids) {
    if (!ids.length) return "none";
    const shown = ids.slice(0, 8).flatMap((id, n) => (n ? [" ", link(side, id)] : [link(side, id)]));
    return el("span", {}, shown, ids.length > 8 ? ` and ${ids.length - 8} more` : null);
  }

  function line(label, ...content) {
    const [first] = content;
    return first === "" || first === null ? null : el("div", {}, el("dt", {}, label), el("dd", {}, ...content));
  }

  /* Fills the panel with a node of one graph. */
  page.details = (side, node) => {
    const other = side === "before" ? "after" : "before";
    const close = page.button("×", "Close", page.closeDetails);
    close.className = "close";
    const branch = node.branch ? `, ${node.branch.replace(/_\d+$/, "").replace("_", " ")}` : "";
    const place = node.layer === null ? "outside of the layers" : `layer ${node.layer}${branch}`;
    const where = [page.step === "prefill" ? "prefill" : "", side, place].filter(Boolean).join(" · ");
    const changed = side === "after" ? "replaces " : "is now ";
    const relation = node.change === "replaced" ? changed : "the same node: ";
    const twin = node.twin && el("span", {}, relation, link(other, node.twin), ` ${other} the passes`);
    page.detailsBox.replaceChildren(
      el(
        "header",
        {},
        el("h2", {}, ["weight", "op", "cond"].includes(node.kind) ? node.op : node.id),
        el("span", { class: `chip ${node.change}` }, WORDS[node.change]),
        el("span", { class: "muted" }, where),
        close,
      ),
      el(
        "dl",
        {},
        line("source", node.source ? el("code", { class: "source" }, node.source) : "not of a line of the model"),
        line("made by", el("span", { class: "pass" }, node.made_by ? `pass ${node.made_by}` : "the model")),
        line("reason", page.data.reasons[node.reason] ?? (node.made_by ? "" : "The model computes it here.")),
        line("module", node.module ? el("code", {}, node.module) : ""),
        line("node", el("code", {}, node.id)),
        line("result", node.type),
        line("arguments", node.args ? el("code", {}, node.args) : ""),
        line("role", node.role),
        line("other graph", twin),
        line("reads", links(side, node.inputs)),
        node.weights.length ? line("parameters", links(side, node.weights)) : null,
        line("read by", links(side, node.users)),
      ),
    );
    page.detailsBox.hidden = false;
  };

  page.closeDetails = () => {
    page.detailsBox.hidden = true;
    page.clearMarks();
  };
})();
