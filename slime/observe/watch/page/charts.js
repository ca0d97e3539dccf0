// Line charts and stacked areas as SVG, with a crosshair for pointer and arrow keys.
import { h, hideTip, number, s, showTip } from "/dom.js";

const WIDTH = 440, HEIGHT = 190, RIGHT = 10, TOP = 10, BOTTOM = 22, MOST = 600;

// Exponential moving average without the pull of its beginning; weight 0 changes nothing.
export function smoothed(points, weight) {
  let mean = 0, sum = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    sum = weight * sum + (1 - weight);
    return [x, mean / sum];
  });
}

// Of each stretch the least and the greatest stay, so that spikes survive.
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
  for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); i++) marks.push(Number((i * step).toPrecision(12)));
  return marks;
}

// As many digits as tell the marks apart.
function labels(marks) {
  let texts = marks.map(number);
  for (let digits = 4; new Set(texts).size < marks.length && digits < 15; digits++) texts = marks.map((mark) => String(Number(mark.toPrecision(digits))));
  return texts;
}

function scaleOf(xs, low, high, fromZero) {
  if (low >= 0 && (fromZero || low < 0.5 * high)) low = 0;
  const marks = ticks(low, high), texts = labels(marks);
  let x0 = xs[0], x1 = xs[0];
  for (const x of xs) { if (x < x0) x0 = x; if (x > x1) x1 = x; }
  const left = 8 + 6.7 * Math.max(4, ...texts.map((t) => t.length)), bottom = marks[0], top = marks.at(-1);
  return {
    marks, texts, left, x0, x1,
    x: (v) => Number((left + (x1 > x0 ? (v - x0) / (x1 - x0) : 0.5) * (WIDTH - left - RIGHT)).toFixed(1)),
    y: (v) => Number((HEIGHT - BOTTOM - ((v - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM)).toFixed(1)),
  };
}

function axes(scale) {
  const parts = scale.marks.flatMap((mark, i) => [
    s("line", { class: "grid", x1: scale.left, x2: WIDTH - RIGHT, y1: scale.y(mark), y2: scale.y(mark) }),
    s("text", { class: "tick", x: scale.left - 6, y: scale.y(mark) + 3.5, "text-anchor": "end" }, scale.texts[i]),
  ]);
  const whole = ticks(scale.x0, scale.x1, 5).filter((t) => t >= scale.x0 && t <= scale.x1 && Number.isInteger(t));
  for (const t of whole.length ? whole : [scale.x0]) {
    const x = scale.x(t);
    parts.push(s("text", { class: "tick", x, y: HEIGHT - 6, "text-anchor": x > WIDTH - RIGHT - 12 ? "end" : "middle" }, t.toLocaleString("en")));
  }
  return parts;
}

const path = (points, scale) => points.map(([x, y], i) => `${i ? "L" : "M"}${scale.x(x)} ${scale.y(y)}`).join("");

function area(low, high, scale) {
  const forward = high.map(([x, y]) => `${scale.x(x)} ${scale.y(y)}`);
  const back = low.map(([x, y]) => `${scale.x(x)} ${scale.y(y)}`).reverse();
  return `M${[...forward, ...back].join("L")}Z`;
}

function lines(chart, scale, weight) {
  return chart.lines.flatMap((line) => {
    const marks = [], few = line.points.length <= 12;
    if (weight > 0 && !few) marks.push(s("path", { class: `line raw s${line.color}`, d: path(thin(line.points), scale) }));
    const shown = thin(weight > 0 && !few ? smoothed(line.points, weight) : line.points);
    marks.push(s("path", { class: `line s${line.color}`, d: path(shown, scale) }));
    for (const [x, y] of few ? shown : shown.slice(-1)) marks.push(s("circle", { class: `f${line.color}`, cx: scale.x(x), cy: scale.y(y), r: 2.6 }));
    for (const x of line.bad ?? []) marks.push(s("path", { class: "bad", d: `M${scale.x(x) - 3} ${HEIGHT - BOTTOM - 6}l6 6m0 -6l-6 6` })); // NaN: at the foot
    return marks;
  });
}

// Of a single step, which has no width, a stack makes a column.
const widened = (points) => (points.length === 1 ? [[points[0][0] - 1, points[0][1]], [points[0][0] + 1, points[0][1]]] : points);

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
  const ys = points.map(([, y]) => y), low = Math.min(...ys), span = Math.max(...ys) - low || 1, x0 = points[0][0], long = points.at(-1)[0] - x0 || 1;
  const d = thin(points).map(([x, y], i) => `${i ? "L" : "M"}${(1 + (94 * (x - x0)) / long).toFixed(1)} ${(18 - (16 * (y - low)) / span).toFixed(1)}`).join("");
  return s("svg", { class: "spark", viewBox: "0 0 96 20", "aria-hidden": "true" }, s("path", { d }));
}

// A figure. `chart`: {title, note, unit, key, lines: [{name, color, points, bad}], band: [low, high], stacked, exact, axis}; bad are
// steps with a value that was no finite number.
export function figure(chart, weight = 0) {
  const drawn = chart.lines.filter((line) => line.points.length);
  const xs = drawn.flatMap((line) => [...(chart.stacked ? widened(line.points) : line.points).map((point) => point[0]), ...(line.bad ?? [])]);
  const band = chart.band?.every((edge) => edge.length) ? chart.band : [];
  let low = 0, high = 0;
  if (chart.stacked) {
    drawn[0].points.forEach((_, i) => { high = Math.max(high, drawn.reduce((sum, line) => sum + (line.points[i][1] ?? 0), 0)); });
  } else {
    low = Infinity; high = -Infinity;
    for (const points of [...drawn.map((line) => line.points), ...band]) for (const [, y] of points) { if (y < low) low = y; if (y > high) high = y; }
  }
  const scale = scaleOf(xs, low, high, chart.stacked);
  const cross = s("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
  const body = chart.stacked ? layers({ lines: drawn }, scale) : lines({ lines: drawn }, scale, chart.exact ? 0 : weight);
  const last = drawn[0].points.at(-1)[1];
  const label = `${chart.title}: ${drawn.map((l) => `${l.name} ${number(l.points.at(-1)[1])}`).join(", ")} at the end; arrow keys read values`;
  const shade = band.length ? s("path", { class: `band f${drawn[0].color}`, d: area(thin(band[0]), thin(band[1]), scale) }) : null;
  const drawing = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label, tabindex: 0 }, axes(scale), shade, body, cross);
  const steps = [...new Set(drawn.flatMap((line) => [...line.points.map(([x]) => x), ...(line.bad ?? [])]))].sort((a, b) => a - b);
  let at = steps.length - 1;

  const show = (index, clientX, clientY) => {
    at = Math.min(steps.length - 1, Math.max(0, index));
    const step = steps[at], box = drawing.getBoundingClientRect();
    cross.setAttribute("x1", scale.x(step));
    cross.setAttribute("x2", scale.x(step));
    const valueOf = (line) => line.points.find(([x]) => x === step)?.[1] ?? (line.bad?.includes(step) ? NaN : undefined);
    const shown = drawn.map((line) => [`b${line.color}`, line.name, valueOf(line)]).filter(([, , value]) => value !== undefined);
    const text = (value) => (Number.isNaN(value) ? "not finite" : number(value) + (chart.unit ? ` ${chart.unit}` : ""));
    showTip(`${chart.axis ?? "step"} ${step.toLocaleString("en")}`, shown.map(([color, name, value]) => [color, name, text(value)]),
      clientX ?? box.left + (scale.x(step) / WIDTH) * box.width, clientY ?? box.top + box.height / 3);
  };
  const hide = () => { hideTip(); cross.setAttribute("x1", -9); cross.setAttribute("x2", -9); };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect(), inside = ((event.clientX - box.left) / box.width) * WIDTH;
    const wanted = scale.x0 + ((inside - scale.left) / (WIDTH - scale.left - RIGHT)) * (scale.x1 - scale.x0);
    let best = 0;
    steps.forEach((step, i) => { if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = i; });
    show(best, event.clientX, event.clientY);
  });
  drawing.addEventListener("pointerleave", hide);
  drawing.addEventListener("blur", hide);
  drawing.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    show(at + move);
  });
  const legend = drawn.length > 1 && h("ul", { class: "legend" }, drawn.map((l) => h("li", {}, h("i", { class: `b${l.color}` }), l.name)));
  const value = drawn.length === 1 && h("b", { class: "last" }, number(last), chart.unit ? ` ${chart.unit}` : "");
  const key = chart.key && h("code", { title: "name in metrics.jsonl" }, chart.key);
  return h("figure", { "data-title": chart.title }, h("figcaption", {}, h("h4", {}, h("span", {}, chart.title), value), h("p", {}, chart.note, " ", key)), drawing, legend);
}
