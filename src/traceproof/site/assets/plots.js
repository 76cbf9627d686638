"use strict";
// Draws every figure.plot of the page with uPlot; the figures stand in the JSON beside it.
(() => {
  const LEAST = 1e-4; // of a logarithmic axis: smaller shares are drawn here
  const HEIGHT = 345; // pixels
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  const colour = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const shortened = (text) => (text.length > 24 ? `${text.slice(0, 11)}\u2026${text.slice(-12)}` : text);

  function series(kind, name, place) {
    const stroke = colour(`s${place % 6}`);
    const base = { label: name, stroke, width: 2, value: (_, value) => (value == null ? "" : value) };
    if (kind === "histogram") {
      return { ...base, dash: [[], [8, 4], [2, 3], [10, 3, 2, 3]][place % 4], points: { show: false },
        paths: uPlot.paths.stepped({ align: 1 }) };
    }
    const points = { show: true, size: Math.max(5, 17 - 3 * place), width: 2, fill: "transparent" }; // rings in rings
    return { ...base, paths: () => null, points };
  }

  function options(data, width) {
    const grid = { stroke: colour("line"), width: 1 };
    const ink = () => colour("muted");
    const limited = data.kind !== "histogram";
    const powers = (_, values) => values.map((value) => (Number.isInteger(Math.log10(value)) ? value : null));
    const marks = limited ? { ...grid, filter: powers } : grid;
    const ticks = (_, places) => places.map((place) =>
      (Number.isInteger(place) && data.labels[place] !== undefined ? shortened(data.labels[place]) : ""));
    const list = data.series.map(([name], place) => series(data.kind, name, place));
    if (limited) {
      list.push({ label: "limit", stroke: colour("bad"), width: 1, dash: [6, 4], points: { show: false },
        value: () => "1" });
    }
    return {
      width, height: HEIGHT, padding: [null, 110, null, null], legend: { live: true }, // the last label reaches beyond the axis
      scales: {
        x: { time: false, range: () => [-0.6, data.labels.length - 0.4] },
        y: limited ? { distr: 3, range: (_, low, high) => [Math.min(low ?? LEAST, 0.01), Math.max(high ?? 1, 2)] }
          : { range: (_, low, high) => [0, (high || 1) * 1.05] },
      },
      axes: [
        { stroke: ink, grid, rotate: -45, size: 125, values: ticks, incrs: [1, 2, 5, 10, 20, 50, 100], space: 22 },
        { stroke: ink, grid: marks, ticks: marks, size: 90, labelSize: 20,
          label: limited ? "share of the limit" : "elements",
          ...(limited ? { filter: powers, values: (_, values) => values.map((value) => value ?? "") } : {}) },
      ],
      series: [{ label: { margins: "at", histogram: "share" }[data.kind],
        value: (_, place) => data.labels[place] ?? "" }, ...list],
    };
  }

  function columns(data) {
    const shown = data.series.map(([, values]) => values.map((value) =>
      (value === null || data.kind === "histogram" ? value : Math.max(value, LEAST))));
    const places = data.labels.map((_, place) => place);
    if (data.kind !== "histogram") return [places, ...shown, places.map(() => 1)];
    return [[...places, places.length], ...shown.map((counts) => [...counts, counts.at(-1)])]; // where the last bin ends
  }

  function table(data) {
    const found = document.createElement("table");
    const add = (row, tag, text) => {
      const cell = row.appendChild(document.createElement(tag));
      cell.textContent = text ?? "";
      return cell;
    };
    const head = found.createTHead().insertRow();
    ["", ...data.series.map(([name]) => name)].forEach((name) => { add(head, "th", name).scope = "col"; });
    const body = found.createTBody();
    data.labels.forEach((label, place) => {
      const row = body.insertRow();
      add(row, "th", label).scope = "row";
      data.series.forEach(([, values]) => add(row, "td", values[place]).classList.add("n"));
    });
    return found;
  }

  for (const figure of document.querySelectorAll("figure.plot")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const place = figure.querySelector(".canvas");
    let plot = null;
    const draw = () => {
      plot?.destroy();
      plot = new uPlot(options(data, place.clientWidth || 800), columns(data), place);
      figure.dataset.drawn = "true";
    };
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    new ResizeObserver(() => plot.setSize({ width: place.clientWidth, height: HEIGHT })).observe(place);
    const details = figure.querySelector("details");
    details.addEventListener("toggle", () => {
      const figures = details.querySelector(".figures");
      if (!figures.firstChild) figures.append(table(data));
    });
  }
})();
