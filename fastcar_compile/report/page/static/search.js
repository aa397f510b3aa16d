/* Search over the nodes of all graphs, and over modules, source lines and passes. Every word must be in the name,
   operator, kind, module, source, pass or type; "layer 3" finds the nodes of that layer. A single word that is an
   operator or a kind finds those nodes first. */
(() => {
  "use strict";
  const { el } = page;
  const [field, list] = ["query", "results"].map((id) => document.getElementById(id));
  const MOST = 80;
  const MOST_GROUPS = 2; // of each kind
  const MOST_EXACT = 6; // above the groups: nodes whose operator or kind is the word itself
  const KINDS = { state: "state", input: "input", weight: "parameter" };
  let texts = null;
  let parts = null;
  let active = -1;

  function entries() {
    texts ??= Object.values(page.steps).flatMap((graphs) =>
      ["after", "before"].flatMap((side) =>
        [...graphs[side].nodes.values()].map((node) => ({
          side,
          node,
          text: [node.id, node.op, node.module, node.source, node.made_by, node.type, node.role, node.step]
            .concat(page.family(node), KINDS[node.kind] ?? "")
            .join(" ")
            .toLowerCase(),
        })),
      ),
    );
    return texts;
  }

  /* Modules, source lines and passes with the nodes that they have; the first node stands for them. */
  function groups() {
    const found = new Map();
    for (const { side, node } of entries()) {
      if (side === "before" && node.change === "kept") continue;
      const own = { module: node.module, line: node.source, pass: node.made_by };
      for (const [kind, name] of Object.entries(own)) {
        if (!name) continue;
        const key = `${kind} ${name}`;
        if (!found.has(key)) found.set(key, { kind, name, text: key.toLowerCase(), side, node, count: 0 });
        found.get(key).count += 1;
      }
    }
    return [...found.values()].sort((a, b) => a.name.length - b.name.length);
  }

  function find(query) {
    let layer = null;
    const rest = query.toLowerCase().replace(/\blayer (\d+)\b/, (_, number) => {
      layer = Number(number);
      return " ";
    });
    const words = rest.split(/\s+/).filter(Boolean);
    if (!words.length && layer === null) return [];
    const found = entries().filter(
      (entry) => (layer === null || entry.node.layer === layer) && words.every((word) => entry.text.includes(word)),
    );
    parts ??= groups();
    const fits = parts.filter((part) => words.every((word) => part.text.includes(word)));
    const above = ["pass", "module", "line"].flatMap((kind) =>
      layer === null ? fits.filter((part) => part.kind === kind).slice(0, MOST_GROUPS) : [],
    );
    const word = words.length === 1 ? words[0] : "";
    const fit = (node) => {
      if ([node.id.toLowerCase(), page.stem(node.op)].includes(word)) return 0;
      if ([page.family(node), KINDS[node.kind]].includes(word)) return 0.5;
      return words.length && page.stem(node.op).startsWith(words[0]) ? 1 : 2;
    };
    const rank = ({ node, side }) =>
      fit(node) +
      (side === "before" && node.change === "kept" ? 4 : 0) +
      (node.step === "prefill" ? 8 : 0) +
      (node.kind === "weight" ? 1 : 0);
    const nodes = found
      .map((entry) => [rank(entry), entry])
      .sort((a, b) => a[0] - b[0])
      .map(([, entry]) => entry);
    const best = nodes.filter(({ node }) => fit(node) < 1).slice(0, MOST_EXACT);
    return [...best, ...above, ...nodes.filter((entry) => !best.includes(entry))];
  }

  /* What is said of a node, or of a part of the model. */
  function words({ kind, name, count, side, node }) {
    if (kind)
      return [el("strong", {}, kind), el("code", {}, name), el("span", { class: "muted" }, page.plural(count, "node"))];
    const place = node.layer === null ? "" : `layer ${node.layer}`;
    const step = node.step === "prefill" ? "prefill" : "";
    const note = [step, side, place, node.made_by || node.module].filter(Boolean).join(" · ");
    return [
      el("span", { class: `dot ${node.change}`, "aria-hidden": "true" }),
      el("strong", {}, KINDS[node.kind] ?? page.stem(node.op)),
      el("code", {}, node.id),
      el("span", { class: "muted" }, note),
    ];
  }

  function option(entry, number) {
    const choose = (event) => {
      event.preventDefault();
      go(entry);
    };
    const look = { role: "option", id: `found-${number}`, "aria-selected": "false", onpointerdown: choose };
    return el("li", look, words(entry));
  }

  function show(query) {
    const found = find(query);
    active = -1;
    list.replaceChildren(...found.slice(0, MOST).map(option));
    list.found = found;
    if (query.trim()) {
      const more = found.length > MOST ? `, the first ${MOST} are shown` : "";
      const places = found.length
        ? `${page.plural(found.length, "place")} found${more}`
        : "Nothing has all of these words.";
      list.append(el("li", { class: "count muted", role: "presentation" }, places));
    }
    expand(Boolean(query.trim()));
  }

  function expand(shown) {
    list.hidden = !shown;
    field.setAttribute("aria-expanded", String(shown));
  }

  const close = () => expand(false);

  function go({ side, node }) {
    close();
    field.blur();
    page.select(side, node.id, node.step);
  }

  function mark(step) {
    const options = [...document.querySelectorAll("#results [role=option]")];
    if (!options.length) return;
    options[active]?.setAttribute("aria-selected", "false");
    active = (active + step + options.length) % options.length;
    options[active].setAttribute("aria-selected", "true");
    options[active].scrollIntoView({ block: "nearest" });
    field.setAttribute("aria-activedescendant", options[active].id);
  }

  function key(event) {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      mark(event.key === "ArrowDown" ? 1 : -1);
    }
    if (event.key === "Escape") {
      close();
      event.target.blur();
    }
    const chosen = list.found?.[Math.max(0, active)];
    if (event.key === "Enter" && chosen) go(chosen);
  }

  /* Puts a text into the search field and shows what it finds. */
  page.search = (text) => {
    field.value = text;
    field.focus();
    show(text);
  };

  page.startSearch = () => {
    field.addEventListener("input", () => show(field.value));
    field.addEventListener("focus", () => {
      if (field.value) show(field.value);
    });
    field.addEventListener("blur", close);
    field.addEventListener("keydown", key);
    addEventListener("keydown", (event) => {
      const typing = event.target.closest?.("input, textarea");
      if ((event.key === "/" && !typing) || (event.key === "k" && (event.ctrlKey || event.metaKey))) {
        event.preventDefault();
        field.focus();
        field.select();
      }
      if (event.key === "Escape" && !typing && page.detailsBox && !page.detailsBox.hidden) page.closeDetails();
    });
  };
})();
