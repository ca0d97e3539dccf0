"use strict";
// Crosshair and values for the charts. The charts themselves are in the page as SVG and need no script.
(() => {
  const points = JSON.parse(document.getElementById("points").textContent);
  const tip = document.getElementById("tip");
  const plot = { right: 10, width: 440 };

  const format = (value) => {
    if (value === null) return "not finite";
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    return size >= 1e-3 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
  };

  const nearest = (series, x) => {
    let best = null;
    for (const point of series.points) {
      if (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
    }
    return best;
  };

  const row = (color, name, value) => {
    const line = document.createElement("div");
    const mark = document.createElement("i");
    mark.className = "b" + color;
    const label = document.createElement("span");
    label.textContent = name;
    const number = document.createElement("b");
    number.textContent = value;
    line.append(mark, label, number);
    return line;
  };

  const show = (figure, svg, event) => {
    const chart = points[figure.dataset.chart];
    const box = svg.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * plot.width;
    const left = Number(svg.dataset.left), span = plot.width - left - plot.right;
    const share = (inside - left) / span;
    const low = Number(svg.dataset.x0), high = Number(svg.dataset.x1);
    const wanted = low + Math.min(1, Math.max(0, share)) * (high - low);
    let step = null;
    for (const series of chart.series) {
      const found = nearest(series, wanted);
      if (found && (step === null || Math.abs(found[0] - wanted) < Math.abs(step - wanted))) step = found[0];
    }
    if (step === null) return;
    const at = left + (high > low ? (step - low) / (high - low) : 0.5) * span;
    const cross = svg.querySelector(".cross");
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    tip.replaceChildren();
    const head = document.createElement("header");
    head.textContent = "step " + step.toLocaleString("en");
    tip.append(head);
    for (const series of chart.series) {
      const found = nearest(series, step);
      if (found && found[0] === step) {
        const unit = chart.unit && found[1] !== null ? " " + chart.unit : "";
        tip.append(row(series.color, series.name, format(found[1]) + unit));
      }
    }
    tip.hidden = false;
    const right = event.clientX + 16 + tip.offsetWidth > document.documentElement.clientWidth;
    tip.style.left = (right ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16) + window.scrollX + "px";
    tip.style.top = event.clientY + 12 + window.scrollY + "px";
  };

  const hide = (svg) => {
    tip.hidden = true;
    const cross = svg.querySelector(".cross");
    cross.setAttribute("x1", -9);
    cross.setAttribute("x2", -9);
  };

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const svg = figure.querySelector("svg");
    svg.addEventListener("pointermove", (event) => show(figure, svg, event));
    svg.addEventListener("pointerleave", () => hide(svg));
  }

  // While the run goes on, the file is written anew: load it again, and what was unfolded stays so.
  const folds = [...document.querySelectorAll("details")];
  (history.state?.open ?? []).forEach((open, i) => { if (folds[i]) folds[i].open = open; });
  if (document.documentElement.dataset.live !== undefined) {
    setInterval(() => {
      if (document.hidden || !tip.hidden || getSelection().toString()) return;
      history.replaceState({ open: folds.map((fold) => fold.open) }, "");
      location.reload();
    }, 10_000);
  }
})();
