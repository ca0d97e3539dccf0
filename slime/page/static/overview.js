// Alarms, tiles, best and worst sample, and the curves of the chosen runs.
import { chip, duration, h, labelled, none, number, stateChip } from "/dom.js";
import { figure, sparkline } from "/charts.js";
import { address, ask, chosen, colorOf, current, go, metricsOf, series, state } from "/store.js";

const VANISHING = 1e-6, MAX_FOUND = 60, IN_NUMBERS = "in numbers"; // no metric begins so
const TOLD = ["perf/step_time", "perf/launch_time"]; // shown by tiles and tables
const isScore = (name) => /^eval\/[^/]+$/.test(name) && !/-(pass@\d+|truncated_ratio)$/.test(name);
const median = (points) => points.map(([, y]) => y).sort((a, b) => a - b)[Math.floor(points.length / 2)];

export function alarmsOf(runs) {
  const items = runs.flatMap((run) => {
    const name = () => (runs.length > 1 ? [h("code", { class: "run" }, run.name), " "] : []);
    const crash = run.crash && h("li", { class: "crashed" }, name(), h("b", {}, `${run.crash.error ?? "The run failed"}${run.crash.note ? ` (${run.crash.note})` : ""}: `),
      h("span", { class: "pre" }, [run.crash.message, ...(run.crash.notes ?? [])].join("\n")), " Details: ", h("code", {}, run.crash.folder));
    const alarms = run.alarms.map((alarm) => h("li", {}, name(), h("b", {}, alarm.title, ". "), alarm.detail,
      alarm.fix ? [". ", h("i", {}, "Try:"), " ", alarm.fix] : null));
    return [crash, ...alarms].filter(Boolean);
  });
  return items.length ? h("ul", { class: "alarms", "aria-label": "alarms" }, items) : null;
}

// The first of the metrics that was logged.
const firstOf = (known, ...names) => names.map((name) => series(known, name)).find((points) => points.length) ?? [];
const stepOf = (run) => `${(run.step ?? 0).toLocaleString("en")}${run.length ? ` of ${run.length.toLocaleString("en")}` : ""}`;

function tiles(run, known) {
  const tile = (label, value, detail) => h("div", { class: "tile" }, h("span", {}, label), h("b", {}, value), h("small", {}, detail ?? ""));
  const change = (label, points, unit = "") => {
    if (!points.length) return null;
    const first = points[0][1], last = points.at(-1)[1];
    return tile(label, number(last) + unit, points.length > 1 ? `from ${number(first)} (${last < first ? "" : "+"}${number(last - first)})` : "");
  };
  const middle = (label, points, shown) => points.length > 0 && tile(label, shown(median(points)), "median");
  const launch = series(known, "perf/launch_time").reduce((sum, [, seconds]) => sum + seconds, 0);
  return h("div", { class: "tiles" },
    known.names.filter(isScore).slice(0, 3).map((name) => change(`Evaluation: ${name.slice(5)}`, series(known, name))),
    run.supervised ? change("Loss", series(known, "train/loss")) : change("Reward", firstOf(known, "rollout/raw_reward", "rollout/rewards")),
    change("Response length", firstOf(known, "rollout/response_len/mean", "rollout/response_lengths"), " tokens"),
    middle("Time per step", series(known, "perf/step_time"), duration),
    middle("Generation", series(known, "perf/tokens_per_gpu_per_sec"), (value) => `${number(value)} tok/s`),
    tile("Step", stepOf(run), [run.elapsed !== null && duration(run.elapsed), launch && `launch ${duration(launch)}`].filter(Boolean).join(", ")));
}

// What a run is, in a line.
function headline(run) {
  const began = run.started ? new Date(run.started * 1000).toLocaleString("sv").slice(0, 16) : "";
  const facts = [...run.facts, began].filter(Boolean).join(" · ");
  return facts ? h("p", { class: "hint" }, facts) : null;
}

const ends = new Map(); // run and its last step → best and worst sample

async function endsOf(run) {
  const last = (await ask("steps", { run: run.id })).steps.filter(({ kind, reward }) => kind === "rollout" && reward !== null).at(-1);
  if (!last || run.supervised) return null;
  const key = `${run.id} ${last.step} ${last.samples}`;
  if (!ends.has(key)) {
    const one = async (descending) => (await ask("samples", { run: run.id, step: last.step, sort: "reward", descending, limit: 1 })).samples[0];
    ends.clear();
    ends.set(key, [await one(1), await one(0)]);
  }
  return ends.get(key);
}

// The best and the worst sample of the newest step.
function bestAndWorst(found, run, isOne) {
  const [best, worst] = found, isEven = best.reward === worst.reward;
  const card = (title, sample) => h("button", { type: "button", class: "card end", onclick: () => go({ view: "samples", run: run.id, sample: sample.id }) },
    h("header", {}, h("b", {}, title), chip(`reward ${number(sample.reward)}`), sample.label && [" label ", h("code", {}, sample.label)]),
    h("span", { class: "prompt-line" }, sample.question || "(no prompt)"), h("span", { class: "response-line" }, sample.response || "(empty response)"));
  const cards = isEven ? [card("All rewards are equal; one sample", best)] : [card("Best sample", best), card("Worst sample", worst)];
  return h("section", { class: "ends" }, h("h3", {}, `Samples of step ${best.step}${isOne ? "" : `, ${run.name}`}`), h("div", { class: "columns" }, cards));
}

// One line per run.
function lastNumbers(runs, known) {
  const last = (points) => (points.length ? number(points.at(-1)[1]) : "");
  const rows = runs.map((run) => {
    const mine = known.get(run.id), times = series(mine, "perf/step_time");
    const scores = mine.names.filter(isScore).map((name) => `${name.slice(5)} ${last(series(mine, name))}`).join(", ");
    return h("tr", {}, h("th", { scope: "row" }, h("i", { class: `mark b${colorOf(run)}` }), run.name, " ", stateChip(run)),
      [stepOf(run), run.supervised ? "" : last(firstOf(mine, "rollout/raw_reward", "rollout/rewards")), scores, times.length ? duration(median(times)) : "", duration(run.elapsed)].map((cell) => h("td", {}, cell)));
  });
  const head = ["run", "step", "last reward", "last evaluation", "time per step", "duration"].map((title) => h("th", { scope: "col" }, title));
  return h("div", { class: "card scroll" }, h("table", { class: "metrics" }, h("tr", {}, head), rows));
}

// Every metric of a run in numbers.
function inNumbers(names, known) {
  const rows = names.map((name) => {
    const points = series(known, name), ys = points.map(([, y]) => y);
    const [title, unit] = known.titles.get(name) ?? [name, ""];
    return points.length ? h("tr", {}, h("th", { scope: "row" }, title, h("code", {}, name)), h("td", {}, unit), h("td", {}, sparkline(points)), [ys[0], ys.at(-1), Math.min(...ys), Math.max(...ys)].map((y) => h("td", {}, number(y)))) : null;
  });
  return h("div", { class: "scroll" }, h("table", { class: "metrics" }, h("tr", {}, ["metric", "unit", "", "first", "last", "min", "max"].map((title) => h("th", { scope: "col" }, title))), rows));
}

const lineOf = (known, run, name, more) => ({ name: run.name, color: colorOf(run), points: series(known.get(run.id), name), bad: known.get(run.id).bad[name], ...more });

// The charts of a row of the catalog; none where no run has the metric. Several runs get a chart for each line.
function catalogued(spec, runs, known) {
  const shown = spec.rewarded ? runs.filter((run) => !run.supervised) : runs;
  const key = spec.keys.find((name) => shown.some((run) => series(known.get(run.id), name).length));
  if (!key) return [];
  const chart = { title: spec.title, note: spec.note, unit: spec.unit, key };
  const isThere = (line) => line.points.length;
  const vanishes = (lines) => spec.may_vanish && lines.every((line) => line.points.every(([, y]) => Math.abs(y) <= VANISHING));
  const main = shown.map((run) => lineOf(known, run, key)).filter(isThere);
  if (vanishes(main)) return [];
  if (runs.length > 1) {
    if (spec.band.length) chart.note = chart.note.split(";")[0]; // only a single run has its band
    const others = spec.beside.map(([name, text]) => ({ ...chart, title: `${spec.title}: ${text}`, key: name, lines: shown.map((run) => lineOf(known, run, name)).filter(isThere) }));
    return [{ ...chart, title: others.some(({ lines }) => lines.length) ? `${spec.title}: ${spec.line}` : spec.title, lines: main }, ...others.filter(({ lines }) => lines.length)];
  }
  const others = spec.beside.map(([name, text], i) => lineOf(known, runs[0], name, { name: text, color: ((i + 1) % 8) + 1 })).filter(isThere);
  const band = key === spec.keys[0] && spec.band.length ? spec.band.map((name) => series(known.get(runs[0].id), name)) : undefined;
  return [{ ...chart, band, lines: [{ ...main[0], name: (others.length && spec.line) || spec.title }, ...others] }];
}

// A chart of any metric.
function plain(name, runs, known, note = "") {
  const drawn = runs.map((run) => lineOf(known, run, name)).filter((line) => line.points.length);
  const [title, unit] = runs.map((run) => known.get(run.id).titles.get(name)).find(Boolean) ?? [name, ""];
  return drawn.length ? { title, note, unit, key: name, lines: drawn, exact: name.startsWith("eval/") } : null;
}

const section = (title, charts, weight) => charts.length
  ? h("section", {}, h("h3", {}, title), h("div", { class: "charts" }, charts.map((chart) => figure(chart, weight)))) : null;

export async function overview(root) {
  const search = h("input", { type: "search", placeholder: "e.g. kl, gradient, eval/", value: address().metric ?? "", "aria-label": "find a metric",
    oninput: (event) => { go({ metric: event.target.value }, { quiet: true }); draw(); } });
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: address().smooth, "aria-label": "smoothing",
    oninput: (event) => { go({ smooth: event.target.value }, { quiet: true }); draw(); } });
  const body = h("div", {}), open = new Set();
  root.replaceChildren(h("div", { class: "controls" }, labelled("Find a metric", search), labelled("Smoothing", slider)), body);
  let turn = 0;

  async function draw() {
    const mine = ++turn, runs = chosen(), words = (address().metric ?? "").toLowerCase(), weight = Number(address().smooth);
    const specs = state.catalog.flatMap((part) => part.charts);
    const listed = specs.flatMap((spec) => [...spec.keys, ...spec.beside.map(([name]) => name), ...spec.band]);
    const known = new Map();
    for (const run of runs) known.set(run.id, await metricsOf(run, [...new Set([...listed, ...TOLD])]));
    const all = [...new Set(runs.flatMap((run) => known.get(run.id).names))].sort();
    const scores = all.filter(isScore);
    const matches = (...texts) => !words || texts.join(" ").toLowerCase().includes(words);
    const titleOf = (name) => runs.map((run) => known.get(run.id).titles.get(name)).find(Boolean)?.[0] ?? "";
    const others = all.filter((name) => !specs.some((spec) => spec.keys.includes(name)) && !scores.includes(name));
    const groups = Map.groupBy?.(others, (name) => name.split("/")[0]) ?? new Map([["all", others]]);
    const found = words ? others.filter((name) => matches(name, titleOf(name))).slice(0, MAX_FOUND) : [];
    const wanted = [...scores, ...found, ...[...open].flatMap((group) => (group === IN_NUMBERS ? all : groups.get(group) ?? []))];
    for (const run of runs) known.set(run.id, await metricsOf(run, wanted));
    const phases = runs.length === 1 && !words ? await ask("phases", { run: runs[0].id }) : [];
    const pair = words ? null : await endsOf(current());
    if (mine !== turn) return;
    const parts = [alarmsOf(runs)];
    if (runs.length === 1) parts.push(headline(runs[0]), tiles(runs[0], known.get(runs[0].id)));
    else parts.push(lastNumbers(runs, known));
    if (pair?.every(Boolean)) parts.push(bestAndWorst(pair, current(), runs.length === 1));
    for (const { section: title, charts } of state.catalog) {
      const drawn = charts.flatMap((spec) => catalogued(spec, runs, known));
      if (title === "Learning") drawn.splice(1, 0, ...scores.map((name) => plain(name, runs, known, "mean over held-out samples")).filter(Boolean));
      if (title === "Speed" && runs.length > 1) drawn.unshift(...[plain("perf/step_time", runs, known)].filter(Boolean).map((chart) => ({ ...chart, title: "Time per step" })));
      if (title === "Speed" && phases.length) drawn.unshift({ title: "Time per step", note: "by phase, without evaluation", unit: "s", key: "perf/step_time", stacked: true, lines: phases });
      parts.push(section(title, drawn.filter((chart) => matches(chart.title, chart.key)), weight));
    }
    if (words) parts.push(section("Other metrics", found.map((name) => plain(name, runs, known)).filter(Boolean), weight));
    else parts.push(h("h3", {}, "All other metrics"), [...groups].map(([group, names]) => fold(group, names, runs, known, weight)), runs.length === 1 && all.length ? table(all, known.get(runs[0].id)) : null);
    if (!all.length) parts.push(none("No step has been logged yet."));
    body.replaceChildren(...parts.flat().filter(Boolean));
  }

  function folded(group, title, content) {
    const toggled = (event) => {
      const is = event.target.open;
      if (is === open.has(group)) return;
      if (is) open.add(group); else open.delete(group);
      draw();
    };
    return h("details", { class: "fold", open: open.has(group), ontoggle: toggled }, h("summary", {}, title), open.has(group) ? content() : null);
  }

  const fold = (group, names, runs, known, weight) => folded(group, [group, " ", chip(names.length)], () =>
    h("div", { class: "charts" }, names.map((name) => plain(name, runs, known)).filter(Boolean).map((chart) => figure(chart, weight))));
  const table = (names, known) => folded(IN_NUMBERS, ["All metrics in numbers ", chip(names.length)], () => inNumbers(names, known));

  await draw();
  return draw;
}
