// State of the page: the address says what is shown; data comes from the server, or from the file that the page is.
import { answering, isFrozen, unpacked } from "/frozen.js";

export const state = { runs: [], catalog: [], sorts: [], version: "", shown: "", written: "" };
const metrics = new Map(); // run → {generation, since, steps, columns, bad, names, titles, asked}
const DEFAULTS = { view: "overview", smooth: "0.6", sort: "step", descending: "1" };

const LARGEST = 1e300; // the difference of two such values is finite

export class Gone extends Error {}

let inFile = null; // answers from the file, once unpacked

export async function ask(question, parameters = {}) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  if (isFrozen) {
    inFile ??= unpacked().then(answering);
    const told = (await inFile)(question, Object.fromEntries(kept));
    if (told === undefined) throw new Gone("this file does not contain it");
    return told;
  }
  const answer = await fetch(`/api/${question}?${new URLSearchParams(kept)}`);
  if (answer.status === 404) throw new Gone(await answer.text());
  if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).trim()}`);
  return answer.json();
}

export function address() {
  return { ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
}

// Changes the address. "Back" undoes a change of what is shown; a quiet change only replaces the address.
export function go(changes, { quiet = false } = {}) {
  const next = Object.entries({ ...address(), ...changes });
  const kept = next.filter(([name, value]) => value !== undefined && value !== null && value !== "" && DEFAULTS[name] !== value);
  const hash = `#${new URLSearchParams(kept)}`;
  if (hash === (location.hash || "#")) return;
  if (quiet) history.replaceState(null, "", hash);
  else location.hash = hash;
}

export async function loadRuns() {
  Object.assign(state, await ask("runs"));
}

export function chosen() {
  const ids = (address().runs ?? state.shown).split(",");
  const found = state.runs.filter((run) => ids.includes(run.id));
  return found.length ? found : state.runs.slice(0, 1);
}

// The run that views of a single run show.
export const current = () => chosen().find((run) => run.id === address().run) ?? chosen()[0];

export const colorOf = (run) => (chosen().indexOf(run) % 8) + 1;

// Metrics may have any name: commas separate names, and lookups ignore inherited properties.
const listed = (names) => names.map(encodeURIComponent).join(",");
const nothing = () => ({ steps: [], columns: Object.create(null), bad: Object.create(null) });
const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

// The metrics of a run, brought up to date: only steps since the last call are transferred.
export async function metricsOf(run, names) {
  let known = metrics.get(run.id) ?? { generation: -1, since: 0, ...nothing(), names: [], titles: new Map(), asked: new Set() };
  const missing = names.filter((name) => !known.asked.has(name));
  if (missing.length && known.since) {
    const answer = await ask("metrics", { run: run.id, names: listed(missing) });
    merge(known, answer, missing);
    if (answer.generation !== known.generation) known = { ...known, generation: -1, since: 0, ...nothing() };
  }
  missing.forEach((name) => known.asked.add(name));
  const asked = listed([...known.asked]);
  const news = await ask("metrics", { run: run.id, names: asked, generation: known.generation, since: known.since });
  if (news.generation !== known.generation) Object.assign(known, nothing());
  merge(known, news, [...known.asked]);
  const titles = new Map(news.names.map(([name, ...title]) => [name, title]));
  Object.assign(known, { generation: news.generation, since: news.since, names: [...titles.keys()], titles });
  metrics.set(run.id, known);
  return known;
}

function merge(known, answer, names) {
  const place = new Map(known.steps.map((step, i) => [step, i]));
  for (const step of answer.steps) {
    if (!place.has(step)) {
      place.set(step, known.steps.length);
      known.steps.push(step);
    }
  }
  for (const name of names) {
    const values = own(answer.columns, name), bad = own(answer.bad, name);
    if (!values) continue;
    const column = (known.columns[name] ??= []);
    answer.steps.forEach((step, i) => { column[place.get(step)] = values[i]; });
    if (bad) known.bad[name] = [...new Set([...(known.bad[name] ?? []), ...bad])];
  }
}

// [step, value] in order, without steps that did not log the metric.
export function series(known, name) {
  const column = known.columns[name];
  if (!column) return [];
  const within = (value) => (Math.abs(value) > LARGEST ? Math.sign(value) * LARGEST : value);
  const points = known.steps.map((step, i) => [step, typeof column[i] === "number" ? within(column[i]) : null]);
  return points.filter(([, value]) => value !== undefined && value !== null).sort((a, b) => a[0] - b[0]);
}
