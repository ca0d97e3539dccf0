// Curves of the chosen runs over each other, what is wrong with them, and every metric there is.
import { chip, duration, h, labelled, none, number } from "/dom.js";
import { figure } from "/charts.js";
import { address, ask, chosen, colorOf, go, metricsOf, series, state } from "/store.js";

const VANISHING = 1e-6, MOST_FOUND = 60;

export function alarmsOf(runs) {
  const items = runs.flatMap((run) => {
    const name = runs.length > 1 ? [h("code", {}, run.name), " "] : [];
    const crash = run.crash && h("li", { class: "crashed" }, name, h("b", {}, `${run.crash.error ?? "The run failed"}: `),
      h("span", { class: "pre" }, [run.crash.message, ...(run.crash.notes ?? [])].join("\n")), " More in ", h("code", {}, run.crash.folder));
    const alarms = run.alarms.map((alarm) => h("li", {}, name, h("b", {}, alarm.title, ". "), alarm.detail,
      alarm.fix ? [". ", h("i", {}, "Try:"), " ", alarm.fix] : null));
    return [crash, ...alarms].filter(Boolean);
  });
  return items.length ? h("ul", { class: "alarms", "aria-label": "alarms" }, items) : null;
}

function tiles(run, known) {
  const ends = (...names) => {
    for (const name of names) {
      const points = series(known, name);
      if (points.length) return [points[0][1], points.at(-1)[1]];
    }
    return null;
  };
  const tile = (label, value, detail) => h("div", { class: "tile" }, h("span", {}, label), h("b", {}, value), h("small", {}, detail ?? ""));
  const change = (label, values) => values && tile(label, number(values[1]), `from ${number(values[0])}`);
  const scores = known.names.filter((name) => /^eval\/[^/]+$/.test(name) && !/-(pass@\d+|truncated_ratio)$/.test(name));
  const speed = ends("perf/step_time");
  return h("div", { class: "tiles" },
    scores.slice(0, 2).map((name) => change(`Evaluation: ${name.slice(5)}`, ends(name))),
    run.supervised ? change("Loss", ends("train/loss")) : change("Reward", ends("rollout/raw_reward", "rollout/rewards")),
    change("Train–rollout difference", ends("train/train_rollout_logprob_abs_diff")),
    speed && tile("Time of the last step", duration(speed[1])),
    run.elapsed !== null && tile("Duration", duration(run.elapsed), `step ${run.step ?? 0}`));
}

// One chart of the catalogue over the runs; null where no run has it.
function catalogued(spec, runs, known) {
  const key = spec.keys.find((name) => runs.some((run) => series(known.get(run.id), name).length));
  if (!key) return null;
  const lines = runs.map((run) => ({ name: run.name, color: colorOf(run), points: series(known.get(run.id), key) }));
  if (runs.length === 1) {
    lines[0].name = spec.line || spec.title;
    spec.beside.forEach(([name, text], i) => lines.push({ name: text, color: ((i + 1) % 8) + 1, points: series(known.get(runs[0].id), name) }));
  }
  const drawn = lines.filter((line) => line.points.length);
  if (spec.may_vanish && drawn.every((line) => line.points.every(([, y]) => Math.abs(y) <= VANISHING))) return null;
  return { title: spec.title, note: spec.note, unit: spec.unit, key, lines: drawn };
}

function plain(name, runs, known) {
  const lines = runs.map((run) => ({ name: run.name, color: colorOf(run), points: series(known.get(run.id), name) }));
  const drawn = lines.filter((line) => line.points.length);
  return drawn.length ? { title: name, note: "", unit: "", key: "", lines: drawn, exact: name.startsWith("eval/") } : null;
}

const section = (title, charts, weight) => charts.length
  ? h("section", {}, h("h3", {}, title), h("div", { class: "charts" }, charts.map((chart) => figure(chart, weight)))) : null;

export async function overview(root) {
  const search = h("input", { type: "search", placeholder: "e.g. kl, grad_norm, eval/", value: address().metric ?? "", "aria-label": "find a metric",
    oninput: (event) => { go({ metric: event.target.value }, { quiet: true }); draw(); } });
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: address().smooth, "aria-label": "smoothing",
    oninput: (event) => { go({ smooth: event.target.value }, { quiet: true }); draw(); } });
  const body = h("div", {}), open = new Set();
  root.replaceChildren(h("div", { class: "controls" }, labelled("Find a metric", search), labelled("Smoothing", slider)), body);
  let turn = 0;

  async function draw() {
    const mine = ++turn, runs = chosen(), words = (address().metric ?? "").toLowerCase(), weight = Number(address().smooth);
    const specs = state.catalog.flatMap((part) => part.charts);
    const listed = specs.flatMap((spec) => [...spec.keys, ...spec.beside.map(([name]) => name)]);
    const known = new Map();
    for (const run of runs) known.set(run.id, await metricsOf(run, [...new Set(listed)]));
    const all = [...new Set(runs.flatMap((run) => known.get(run.id).names))].sort();
    const scores = all.filter((name) => /^eval\/[^/]+$/.test(name) && !/-(pass@\d+|truncated_ratio)$/.test(name));
    const matches = (chart) => !words || `${chart.title} ${chart.key}`.toLowerCase().includes(words);
    const others = all.filter((name) => !specs.some((spec) => spec.keys.includes(name)) && !scores.includes(name));
    const groups = Map.groupBy?.(others, (name) => name.split("/")[0]) ?? new Map([["all", others]]);
    const found = words ? others.filter((name) => name.toLowerCase().includes(words)).slice(0, MOST_FOUND) : [];
    const wanted = [...scores, ...found, ...[...open].flatMap((group) => groups.get(group) ?? [])];
    for (const run of runs) known.set(run.id, await metricsOf(run, wanted));
    const phases = runs.length === 1 && !words ? await ask("phases", { run: runs[0].id }) : [];
    if (mine !== turn) return;
    const parts = [alarmsOf(runs)];
    if (runs.length === 1) parts.push(tiles(runs[0], known.get(runs[0].id)));
    for (const { section: title, charts } of state.catalog) {
      const drawn = charts.map((spec) => catalogued(spec, runs, known)).filter(Boolean);
      if (title === "Learning") drawn.splice(1, 0, ...scores.map((name) => plain(name, runs, known)).filter(Boolean));
      if (title === "Speed" && phases.length) drawn.unshift({ title: "Time per step", note: "seconds per phase", unit: "s", key: "perf/step_time", stacked: true, lines: phases });
      parts.push(section(title, drawn.filter(matches), weight));
    }
    if (words) parts.push(section("Other metrics", found.map((name) => plain(name, runs, known)).filter(Boolean), weight));
    else parts.push(h("h3", {}, "All other metrics"), [...groups].map(([group, names]) => fold(group, names, runs, known, weight)));
    if (!all.length) parts.push(none("No step has been logged yet."));
    body.replaceChildren(...parts.flat().filter(Boolean));
  }

  function fold(group, names, runs, known, weight) {
    const charts = open.has(group) ? names.map((name) => plain(name, runs, known)).filter(Boolean) : [];
    const toggled = (event) => {
      const is = event.target.open;
      if (is === open.has(group)) return;
      if (is) open.add(group); else open.delete(group);
      draw();
    };
    return h("details", { class: "fold", open: open.has(group), ontoggle: toggled }, h("summary", {}, group, " ", chip(names.length)),
      h("div", { class: "charts" }, charts.map((chart) => figure(chart, weight))));
  }

  await draw();
  return draw;
}
