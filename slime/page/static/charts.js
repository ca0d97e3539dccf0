// Line charts and stacked areas as SVG, with axes, units, and a crosshair for pointer and arrow keys.
import { h, hideTip, number, s, showTip } from "/dom.js";

const SMALL = { width: 440, height: 212 }, RIGHT = 10, TOP = 22, BOTTOM = 36, MOST = 600;

// Exponential moving average, corrected for its start; weight 0 changes nothing.
export function smoothed(points, weight) {
  let mean = 0, sum = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    sum = weight * sum + (1 - weight);
    return [x, mean / sum];
  });
}

// Keeps the extremes of each stretch, so that spikes survive.
function thin(points) {
  if (points.length <= MOST) return points;
  const size = Math.ceil((2 * points.length) / MOST), kept = [];
  for (let start = 0; start < points.length; start += size) {
    const part = points.slice(start, start + size);
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a)), high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low === high ? [low] : [low, high].sort((a, b) => a[0] - b[0])));
  }
  if (kept.at(-1) !== points.at(-1)) kept.push(points.at(-1));
  return kept;
}

export function ticks(low, high, count = 4) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size < 1e-12) [low, high] = [0, 1];
  else if (high - low < 1e-6 * size) [low, high] = [low - 0.1 * size, high + 0.1 * size];
  const raw = (high - low) / count, base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * base).find((m) => m >= raw * 0.999) ?? 10 * base;
  const marks = [];
  for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); i++) {
    marks.push(Number((i * step).toPrecision(12)));
  }
  return marks;
}

// As many digits as tell the marks apart.
function labels(marks) {
  let texts = marks.map(number);
  for (let digits = 4; new Set(texts).size < marks.length && digits < 15; digits++) {
    texts = marks.map((mark) => String(Number(mark.toPrecision(digits))));
  }
  return texts;
}

function scaleOf(xs, low, high, fromZero, { width, height }) {
  if (low >= 0 && (fromZero || low < 0.5 * high)) low = 0;
  const marks = ticks(low, high), texts = labels(marks);
  let x0 = xs[0], x1 = xs[0];
  for (const x of xs) { if (x < x0) x0 = x; if (x > x1) x1 = x; }
  const left = 8 + 6.7 * Math.max(4, ...texts.map((t) => t.length)), bottom = marks[0], top = marks.at(-1);
  return {
    marks, texts, left, x0, x1, width, height,
    x: (v) => Number((left + (x1 > x0 ? (v - x0) / (x1 - x0) : 0.5) * (width - left - RIGHT)).toFixed(1)),
    y: (v) => Number((height - BOTTOM - ((v - bottom) / (top - bottom)) * (height - TOP - BOTTOM)).toFixed(1)),
  };
}

function axes(scale, chart) {
  const { left, width, height } = scale, right = width - RIGHT, foot = height - BOTTOM;
  const parts = scale.marks.flatMap((mark, i) => [
    s("line", { class: "grid", x1: left, x2: right, y1: scale.y(mark), y2: scale.y(mark) }),
    s("text", { class: "tick y", x: left - 6, y: scale.y(mark) + 3.5, "text-anchor": "end" }, scale.texts[i]),
  ]);
  const inside = ticks(scale.x0, scale.x1, Math.round(width / 90)).filter((t) => t >= scale.x0 && t <= scale.x1);
  const whole = chart.axis ? inside : inside.filter(Number.isInteger);
  for (const t of whole.length ? whole : [scale.x0]) {
    const x = scale.x(t), anchor = x > right - 12 ? "end" : "middle";
    parts.push(s("line", { class: "axis", x1: x, x2: x, y1: foot, y2: foot + 4 }));
    parts.push(s("text", { class: "tick x", x, y: foot + 16, "text-anchor": anchor }, t.toLocaleString("en")));
  }
  parts.push(s("path", { class: "axis", d: `M${left} ${TOP}V${foot}H${right}` }));
  parts.push(s("text", { class: "unit", x: 4, y: 11 }, chart.unit || "value"));
  parts.push(s("text", { class: "unit", x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, chart.axis ?? "step"));
  return parts;
}

const path = (points, scale) => points.map(([x, y], i) => `${i ? "L" : "M"}${scale.x(x)} ${scale.y(y)}`).join("");

function area(low, high, scale) {
  const forward = high.map(([x, y]) => `${scale.x(x)} ${scale.y(y)}`);
  const back = low.map(([x, y]) => `${scale.x(x)} ${scale.y(y)}`).reverse();
  return `M${[...forward, ...back].join("L")}Z`;
}

function lines(chart, scale, weight) {
  const foot = scale.height - BOTTOM;
  return chart.lines.flatMap((line) => {
    const marks = [], few = line.points.length <= 12;
    if (weight > 0 && !few) marks.push(s("path", { class: `line raw s${line.color}`, d: path(thin(line.points), scale) }));
    const shown = thin(weight > 0 && !few ? smoothed(line.points, weight) : line.points);
    marks.push(s("path", { class: `line s${line.color}`, d: path(shown, scale) }));
    for (const [x, y] of few ? shown : shown.slice(-1)) {
      marks.push(s("circle", { class: `f${line.color}`, cx: scale.x(x), cy: scale.y(y), r: 2.6 }));
    }
    for (const x of line.bad ?? []) marks.push(s("path", { class: "bad", d: `M${scale.x(x) - 3} ${foot - 6}l6 6m0 -6l-6 6` }));
    return marks;
  });
}

// A single step has no width: a stack draws it as a column.
const widened = (points) =>
  (points.length === 1 ? [[points[0][0] - 1, points[0][1]], [points[0][0] + 1, points[0][1]]] : points);

function layers(chart, scale) {
  let below = widened(chart.lines[0].points).map(([x]) => [x, 0]);
  return chart.lines.map((line) => {
    const edge = widened(line.points).map(([x, y], i) => [x, (y ?? 0) + below[i][1]]);
    const drawn = s("path", { class: `layer f${line.color}`, d: area(below, edge, scale) });
    below = edge;
    return drawn;
  });
}

// A word-sized line.
export function sparkline(points) {
  if (points.length < 2) return null;
  const ys = points.map(([, y]) => y), low = Math.min(...ys), span = Math.max(...ys) - low || 1;
  const x0 = points[0][0], long = points.at(-1)[0] - x0 || 1;
  const at = ([x, y]) => `${(1 + (94 * (x - x0)) / long).toFixed(1)} ${(18 - (16 * (y - low)) / span).toFixed(1)}`;
  const d = thin(points).map((point, i) => `${i ? "L" : "M"}${at(point)}`).join("");
  return s("svg", { class: "spark", viewBox: "0 0 96 20", "aria-hidden": "true" }, s("path", { d }));
}

// Marks of a time axis below bars that span its width, in seconds.
export function timeAxis(from, to) {
  const marks = ticks(from, to, 6).filter((t) => t >= from && t <= to);
  return h("div", { class: "time-axis", "aria-hidden": "true" }, marks.map((t) => {
    const share = (t - from) / (to - from || 1), mark = h("span", { class: share > 0.93 ? "end" : "" }, `${number(t)} s`);
    mark.style.left = `${100 * share}%`;
    return mark;
  }));
}

// Shows a figure as large as the window allows; Escape, the button or a click beside it closes it.
function enlarge(chart, weight) {
  const width = Math.max(320, Math.min(innerWidth - 56, 1300)), height = Math.max(230, Math.min(innerHeight - 190, (width < 600 ? 1 : 0.6) * width));
  const dialog = h("dialog", { class: "large", "aria-label": chart.title, onclose: () => { hideTip(); dialog.remove(); },
    onclick: (event) => { if (event.target === dialog) dialog.close(); } },
    h("button", { type: "button", class: "close", "aria-label": "close", onclick: () => dialog.close() }, "✕"),
    figure(chart, weight, { width, height }));
  document.body.append(dialog);
  dialog.showModal();
}

// A figure. `chart`: {title, note, unit, key, lines: [{name, color, points, bad}], band: [low, high], stacked, exact,
// axis}. `bad` are steps whose value was not finite; `axis` names the horizontal axis, "step" by default.
export function figure(chart, weight = 0, size = SMALL) {
  const drawn = chart.lines.filter((line) => line.points.length);
  const pointsOf = (line) => (chart.stacked ? widened(line.points) : line.points);
  const xs = drawn.flatMap((line) => [...pointsOf(line).map((point) => point[0]), ...(line.bad ?? [])]);
  const band = chart.band?.every((edge) => edge.length) ? chart.band : [];
  let low = 0, high = 0;
  if (chart.stacked) {
    drawn[0].points.forEach((_, i) => { high = Math.max(high, drawn.reduce((sum, line) => sum + (line.points[i][1] ?? 0), 0)); });
  } else {
    low = Infinity; high = -Infinity;
    for (const points of [...drawn.map((line) => line.points), ...band]) {
      for (const [, y] of points) { if (y < low) low = y; if (y > high) high = y; }
    }
  }
  const scale = scaleOf(xs, low, high, chart.stacked, size), { width, height } = size;
  const cross = s("line", { class: "cross", y1: TOP, y2: height - BOTTOM, x1: -9, x2: -9 });
  const shown = chart.exact ? 0 : weight;
  const body = chart.stacked ? layers({ lines: drawn }, scale) : lines({ lines: drawn }, scale, shown);
  const last = drawn[0].points.at(-1)[1], isSmall = size === SMALL, open = () => enlarge(chart, weight);
  const ends = drawn.map((l) => `${l.name} ${number(l.points.at(-1)[1])}`).join(", ");
  const label = `${chart.title}: ${ends} at the end; arrow keys read values${isSmall ? ", Enter enlarges" : ""}`;
  const shade = band.length
    ? s("path", { class: `band f${drawn[0].color}`, d: area(thin(band[0]), thin(band[1]), scale) }) : null;
  const drawing = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, tabindex: 0 },
    axes(scale, chart), shade, body, cross);
  const places = drawn.flatMap((line) => [...line.points.map(([x]) => x), ...(line.bad ?? [])]);
  const steps = [...new Set(places)].sort((a, b) => a - b);
  const suffix = /^(s|GB|bytes|nats|steps|tokens|tokens\/s)$/.test(chart.unit) ? ` ${chart.unit}` : "";
  let at = steps.length - 1;

  const show = (index, clientX, clientY) => {
    at = Math.min(steps.length - 1, Math.max(0, index));
    const step = steps[at], box = drawing.getBoundingClientRect();
    cross.setAttribute("x1", scale.x(step));
    cross.setAttribute("x2", scale.x(step));
    const valueOf = (line) => line.points.find(([x]) => x === step)?.[1] ?? (line.bad?.includes(step) ? NaN : undefined);
    const values = drawn.map((line) => [`b${line.color}`, line.name, valueOf(line)]).filter(([, , value]) => value !== undefined);
    const text = (value) => (Number.isNaN(value) ? "not finite" : number(value) + suffix);
    showTip(`${chart.axis ?? "step"} ${step.toLocaleString("en")}`, values.map(([color, name, value]) => [color, name, text(value)]),
      clientX ?? box.left + (scale.x(step) / width) * box.width, clientY ?? box.top + box.height / 3);
  };
  const hide = () => { hideTip(); cross.setAttribute("x1", -9); cross.setAttribute("x2", -9); };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect(), inside = ((event.clientX - box.left) / box.width) * width;
    const wanted = scale.x0 + ((inside - scale.left) / (width - scale.left - RIGHT)) * (scale.x1 - scale.x0);
    let best = 0;
    steps.forEach((step, i) => { if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = i; });
    show(best, event.clientX, event.clientY);
  });
  drawing.addEventListener("pointerleave", hide);
  drawing.addEventListener("blur", hide);
  if (isSmall) drawing.addEventListener("click", () => { hide(); open(); });
  drawing.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && isSmall) { hide(); open(); }
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    show(at + move);
  });
  const legend = drawn.length > 1 && h("ul", { class: "legend" }, drawn.map((l) => h("li", {}, h("i", { class: `b${l.color}` }), l.name)));
  const value = drawn.length === 1 && h("b", { class: "last" }, number(last), suffix);
  const key = chart.key && h("code", { title: "name in metrics.jsonl, TensorBoard and W&B" }, chart.key);
  const larger = isSmall && h("button", { type: "button", class: "enlarge", title: "enlarge", "aria-label": `enlarge ${chart.title}`, onclick: open }, "⤢");
  return h("figure", { "data-title": chart.title },
    h("figcaption", {}, h("h4", {}, h("span", {}, chart.title), value, larger), h("p", {}, chart.note, " ", key)), drawing, legend);
}
