// Where a step's time went: the driver's phases, requests in the engines, and a lane per sample.
import { duration, h, hideTip, labelled, none, number, select, showTip } from "/dom.js";
import { figure, timeAxis } from "/charts.js";
import { address, ask, current, go } from "/store.js";

const LANE = 9, WIDE = 1000;
const COLORS = { group: 9, sample: 8, generate: 4, queue: 6, prefill: 3, decode: 1, reward: 2 };
const colorOf = (name) => COLORS[name] ?? [4, 5, 7, 8][[...name].reduce((sum, c) => sum + c.charCodeAt(0), 0) % 4];
const ms = (value) => duration(value / 1000);

function phasesOf(time) {
  const bars = time.phases.map(([name, start, length, color]) => {
    const show = (e) => showTip(name, [[`b${color}`, "takes", ms(length)], ["", "starts at", ms(start)]], e.clientX, e.clientY);
    const bar = h("span", { class: `b${color}`, onpointermove: show, onpointerleave: hideTip }, name);
    bar.style.left = `${(100 * start) / time.length}%`;
    bar.style.width = `${(100 * length) / time.length}%`;
    return bar;
  });
  return h("div", { class: "card" },
    h("div", { class: "phases", role: "img", "aria-label": "phases of the step; the table below lists their times" }, bars),
    timeAxis(0, time.length / 1000));
}

function phaseTable(time) {
  const rows = time.phases.map(([name, start, length]) => h("tr", {}, h("th", { scope: "row" }, name),
    h("td", {}, ms(start)), h("td", {}, ms(length)), h("td", {}, `${Math.round((100 * length) / time.length)} %`)));
  return h("details", { class: "fold" }, h("summary", {}, "Phases as a table"), h("table", { class: "metrics" },
    h("tr", {}, ["phase", "starts at", "duration", "share"].map((t) => h("th", { scope: "col" }, t))), rows));
}

// Thousands of spans: a canvas, and a look-up by position. The lanes fill the width with the time that samples take.
function samplesOf(time) {
  const depth = Math.max(1, ...time.lanes.flatMap((lane) => lane.spans.map((span) => span[3] + 1)));
  const to = time.lanes_to, from = time.lanes_from < 0.05 * to ? 0 : time.lanes_from, length = to - from || 1;
  const row = LANE + 2 * depth, canvas = h("canvas", { role: "img", "aria-label": `${time.lanes.length} samples, last to end first` });
  const draw = () => {
    const width = canvas.clientWidth || WIDE, scale = window.devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
    canvas.width = width * scale;
    canvas.height = time.lanes.length * row * scale;
    canvas.style.height = `${time.lanes.length * row}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    time.lanes.forEach((lane, i) => {
      for (const [name, start, takes, level] of lane.spans) {
        context.fillStyle = style.getPropertyValue(`--c${colorOf(name)}`);
        context.fillRect(((start - from) / length) * width, i * row + 1 + 2 * level, Math.max(1, (takes / length) * width), row - 2 - 2 * level);
      }
    });
  };
  const inner = (event) => {
    const box = canvas.getBoundingClientRect(), at = from + ((event.clientX - box.left) / box.width) * length;
    const lane = time.lanes[Math.floor((event.clientY - box.top) / row)];
    if (!lane) return hideTip();
    const inside = lane.spans.filter(([, start, takes]) => start <= at && at <= start + takes);
    const rows = inside.map(([name, , takes]) => [`b${colorOf(name)}`, name, ms(takes)]);
    const told = Object.entries(inside.at(-1)?.[4] ?? {}).map(([name, value]) => ["", name, String(typeof value === "object" ? JSON.stringify(value) : value).slice(0, 80)]);
    return showTip(lane.name, [...rows, ...told], event.clientX, event.clientY);
  };
  canvas.addEventListener("pointermove", inner);
  canvas.addEventListener("pointerleave", hideTip);
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  const names = [...new Set(time.lanes.flatMap((lane) => lane.spans.map((span) => span[0])))];
  const sums = names.map((name) => [name, time.lanes.flatMap((l) => l.spans).filter((span) => span[0] === name).map((span) => span[2]).sort((a, b) => a - b)]);
  const legend = sums.map(([name, all]) => h("li", {}, h("i", { class: `b${colorOf(name)}` }), `${name}: median ${ms(all[Math.floor(all.length / 2)])}, longest ${ms(all.at(-1))}`));
  return [
    h("ul", { class: "legend" }, legend),
    h("div", { class: "card" }, timeAxis(from / 1000, to / 1000), h("div", { class: "lanes" }, canvas)),
    time.left_out ? none(`${number(time.left_out)} samples that ended earlier are not shown.`) : null,
  ];
}

export function requestsFigure(time, step) {
  const colors = { queue: 6, prefill: 3, decode: 1 };
  const lines = Object.entries(time.counters).map(([name, points]) => ({ name, color: colors[name] ?? 4, points: points.map(([at, count]) => [at / 1000, count]) }));
  return lines.length ? figure({ title: "Requests in the engines", note: `during step ${step}`, unit: "requests", key: "", lines, exact: true, axis: "seconds" }) : null;
}

export async function timeline(root) {
  const controls = h("div", { class: "controls" }), body = h("div", {});
  root.replaceChildren(controls, body);
  let shown = "";

  async function draw() {
    const run = current(), answer = await ask("timeline", { run: run.id, step: address().step });
    const key = JSON.stringify([run.id, answer.step, answer.steps.length, answer.timeline?.phases.length]);
    if (key === shown) return;
    shown = key;
    if (!answer.steps.length) {
      controls.replaceChildren();
      body.replaceChildren(none("There is no trace yet. The first step writes one, unless --no-trace is set."));
      return;
    }
    const pick = (step) => { go({ step }, { quiet: true }); draw(); };
    const at = answer.steps.indexOf(answer.step);
    const move = (by, text) => h("button", { type: "button", disabled: answer.steps[at + by] === undefined, onclick: () => pick(answer.steps[at + by]) }, text);
    controls.replaceChildren(labelled("Step", select(answer.steps.map((n) => [n, `step ${n}`]), answer.step, pick)), move(-1, "← earlier"), move(1, "later →"));
    const time = answer.timeline;
    if (!time?.length) return body.replaceChildren(none("The trace of this step is missing or incomplete."));
    const requests = requestsFigure(time, answer.step);
    body.replaceChildren(h("h3", {}, `Driver, ${ms(time.length)}`), phasesOf(time), phaseTable(time),
      ...(requests ? [h("h3", {}, "Engines"), h("div", { class: "charts wide" }, requests)] : []),
      h("h3", {}, `Samples, ${number(time.lanes.length + time.left_out)}`), ...samplesOf(time).filter(Boolean), ...(answer.note ? [none(answer.note)] : []));
  }

  await draw();
  return draw;
}
