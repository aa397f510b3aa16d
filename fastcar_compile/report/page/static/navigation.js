/* Tabs and the colour theme. */
(() => {
  "use strict";
  const { el } = page;
  const KEY = "fastcar-theme";

  /* Adds a tab; `draw` fills its panel when it is first shown. */
  page.addTab = (id, title, draw) => page.tabs.push({ id, title, draw, drawn: false });

  page.showTab = (id, focus = false) => {
    const chosen = page.tabs.find((tab) => tab.id === id) ?? page.tabs[0];
    for (const tab of page.tabs) {
      const selected = tab === chosen;
      tab.button.setAttribute("aria-selected", String(selected));
      tab.button.tabIndex = selected ? 0 : -1;
      tab.panel.hidden = !selected;
    }
    if (!chosen.drawn) {
      chosen.drawn = true;
      chosen.draw(chosen.panel);
    }
    document.body.dataset.tab = chosen.id;
    if (focus) chosen.button.focus();
    if (location.hash !== `#${chosen.id}`) history.replaceState(null, "", `#${chosen.id}`);
    chosen.shown?.();
  };

  function move(event) {
    const now = page.tabs.findIndex((tab) => tab.button === event.target);
    const count = page.tabs.length;
    const next = { ArrowRight: now + 1, ArrowLeft: now + count - 1, Home: 0, End: count - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    page.showTab(page.tabs[next % count].id, true);
  }

  page.startTabs = () => {
    const bar = document.getElementById("tabs");
    const main = document.getElementById("main");
    for (const tab of page.tabs) {
      const [own, panel] = [`tab-${tab.id}`, `panel-${tab.id}`];
      const acts = { type: "button", onclick: () => page.showTab(tab.id), onkeydown: move };
      tab.button = el("button", { ...acts, role: "tab", id: own, "aria-controls": panel }, tab.title);
      const look = { role: "tabpanel", class: `panel ${tab.id}`, "aria-labelledby": own, hidden: true };
      tab.panel = el("section", { ...look, id: panel });
      bar.append(tab.button);
      main.append(tab.panel);
    }
    addEventListener("hashchange", () => page.showTab(location.hash.slice(1)));
    page.showTab(location.hash.slice(1));
  };

  /* A file page may have no storage: a choice then holds until the page is closed. */
  function storage(use) {
    try {
      return use(localStorage);
    } catch {
      return null;
    }
  }

  page.startTheme = () => {
    const button = document.getElementById("theme");
    const system = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
    const label = () => {
      button.textContent = isDark() ? "☀" : "☾";
      button.setAttribute("aria-label", isDark() ? "Switch to the light theme" : "Switch to the dark theme");
      for (const redraw of page.onTheme) redraw();
    };
    const kept = storage((items) => items.getItem(KEY));
    if (kept) document.documentElement.dataset.theme = kept;
    button.addEventListener("click", () => {
      const theme = isDark() ? "light" : "dark";
      document.documentElement.dataset.theme = theme;
      storage((items) => items.setItem(KEY, theme));
      label();
    });
    system.addEventListener("change", label);
    label();
  };

  /* What is drawn on a canvas is drawn again in the colours of the other theme. */
  page.onTheme = [];

  /* The colour that a custom property has now, as [r, g, b]. */
  page.colour = (name) => {
    const probe = el("span", { style: { color: `var(${name})`, display: "none" } });
    document.body.append(probe);
    const parts = getComputedStyle(probe)
      .color.match(/[\d.]+/g)
      .slice(0, 3)
      .map(Number);
    probe.remove();
    return parts;
  };
})();
