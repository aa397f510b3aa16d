/* Starts the page. */
(() => {
  "use strict";
  const figure = (label) => page.data.facts.find((fact) => fact.label === label)?.value;
  document.getElementById("name").textContent = page.data.name;
  document.title = `${page.data.name} · fastcar_compile`;
  document.getElementById("subtitle").textContent =
    `${page.plural(Number(figure("layers")), "layer")} · ${figure("weights")} · ${figure("target")}`;
  page.startTabs();
  page.startTheme();
  page.startSearch();
  document.body.dataset.ready = "true";
})();
