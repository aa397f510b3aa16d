/* The processes of the engine: what each of them does over a step, and what it waits for. */
(() => {
  "use strict";
  const { el } = page;

  /* Clocks of every process over the calls of a step, by kind; last what is left until the end of the calls. */
  function totals(model, step) {
    const kinds = page.processKinds;
    const counts = Map.groupBy(
      step.calls.filter((call) => call.kind !== null),
      (call) => call.kind,
    );
    return model.names.map((name) => {
      const sums = new Array(kinds.names.length + 1).fill(0);
      for (const [kind, starts] of counts) {
        const call = model.calls[kind];
        const process = call.by.get(name) ?? { busy: 0, stalls: {} };
        const own = new Array(kinds.names.length).fill(0);
        own[0] = process.busy;
        for (const [cause, value] of Object.entries(process.stalls)) own[kinds.of(cause)] += value;
        const rest = Math.max(0, call.clocks - own.reduce((a, b) => a + b, 0));
        [...own, rest].forEach((value, n) => {
          sums[n] += value * starts.length;
        });
      }
      return [name, sums];
    });
  }

  page.processTable = (model, step) => {
    const kinds = page.processKinds;
    const rows = totals(model, step).map(([name, sums]) => {
      const whole = Math.max(
        1,
        sums.reduce((a, b) => a + b, 0),
      );
      const pieces = kinds.names.map((kind, n) =>
        el("i", {
          style: { width: `${(100 * sums[n]) / whole}%`, background: `var(${kinds.colours[n]})` },
          title: `${kind}: ${page.percent(sums[n] / whole)}`,
        }),
      );
      const numbers = sums.map((value) =>
        value ? Math.round(value).toLocaleString("en") : el("span", { class: "muted" }, "0"),
      );
      return [el("code", {}, name), el("span", { class: "stack thin" }, pieces), ...numbers];
    });
    const columns = [["process", ""], ["share", ""], ...[...kinds.names, "barrier"].map((kind) => [kind, "number"])];
    return page.table("Processes", columns, rows);
  };
})();
