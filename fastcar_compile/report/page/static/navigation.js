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
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    const now = page.tabs.findIndex((tab) => tab.button === event.target);
    const last = page.tabs.length - 1;
    let next = null;
    if (event.key in steps) next = (now + steps[event.key] + last + 1) % (last + 1);
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = last;
    if (next === null) return;
    event.preventDefault();
    page.showTab(page.tabs[next].id, true);
  }

  page.startTabs = () => {
    const bar = document.getElementById("tabs");
    const main = document.getElementById("main");
    for (const tab of page.tabs) {
      tab.button = el(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${tab.id}`,
          "aria-controls": `panel-${tab.id}`,
          onclick: () => page.showTab(tab.id),
          onkeydown: move,
        },
        tab.title,
      );
      tab.panel = el("section", {
        role: "tabpanel",
        id: `panel-${tab.id}`,
        class: `panel ${tab.id}`,
        "aria-labelledby": `tab-${tab.id}`,
        hidden: true,
      });
      bar.append(tab.button);
      main.append(tab.panel);
    }
    addEventListener("hashchange", () => page.showTab(location.hash.slice(1)));
    page.showTab(location.hash.slice(1));
  };

  function stored() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    } // a file page may have no storage
  }

  function keep(theme) {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      /* the choice holds until the page is closed */
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
    if (stored()) document.documentElement.dataset.theme = stored();
    button.addEventListener("click", () => {
      document.documentElement.dataset.theme = isDark() ? "light" : "dark";
      keep(document.documentElement.dataset.theme);
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
