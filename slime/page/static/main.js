// Puts the page together: the list of runs, the views, and a refresh every few seconds.
import { chip, duration, h, labelled, none, select, stateChip } from "/dom.js";
import { engines } from "/engines.js";
import { isFrozen } from "/frozen.js";
import { overview } from "/overview.js";
import { samples } from "/samples.js";
import { settings } from "/settings.js";
import { address, chosen, colorOf, current, go, loadRuns, state } from "/store.js";
import { timeline } from "/timeline.js";

const VIEWS = { overview: ["Overview", overview], timeline: ["Timeline", timeline], engines: ["Engines", engines], samples: ["Samples", samples], settings: ["Settings", settings] };
const OF_ONE_RUN = ["timeline", "engines", "samples"], EVERY = 3000, EVERY_AT_REST = 15000, EVERY_FILE = 10000;
const root = document.getElementById("view"), pulse = document.getElementById("pulse");
let update = null, shown = "", drawnRuns = "";

function drawViews() {
  const view = address().view;
  document.getElementById("views").replaceChildren(...Object.entries(VIEWS).map(([name, [title]]) => {
    const parts = new URLSearchParams(Object.entries({ ...address(), view: name, sample: "", prompt: "", beside: "" }).filter(([, value]) => value));
    return h("a", { href: `#${parts}`, "aria-current": name === view ? "page" : null }, title);
  }));
}

function drawRuns() {
  const picked = chosen(), one = current();
  const key = JSON.stringify([state.runs.map(({ index, elapsed, ...run }) => [run.id, run.state, run.step, run.alarms.length]), picked.map((r) => r.id), one?.id]);
  if (key === drawnRuns) return;
  drawnRuns = key;
  const pick = (run, on) => {
    const ids = on ? [...picked, run] : picked.filter((other) => other !== run);
    go({ runs: (ids.length ? ids : [run]).map((r) => r.id).join(","), run: on ? run.id : "", sample: "", prompt: "", beside: "", step: "", at: "", group: "", dataset: "" });
  };
  const only = (run) => go({ runs: run.id, run: "", sample: "", prompt: "", beside: "", step: "", at: "", group: "", dataset: "" });
  const items = state.runs.map((run) => {
    const on = picked.includes(run);
    return h("li", { class: run === one ? "current" : "" },
      h("input", { type: "checkbox", checked: on, "aria-label": `show ${run.name} with the others`, onchange: (event) => pick(run, event.target.checked) }),
      h("i", { class: `mark ${on ? `b${colorOf(run)}` : ""}` }),
      h("button", { type: "button", title: run.path, onclick: () => only(run) }, run.name),
      h("small", {}, stateChip(run), ` step ${run.step ?? 0}`, run.elapsed ? ` · ${duration(run.elapsed)}` : "", alarmChip(run)));
  });
  // how the chosen runs stand, also where the list is folded, as on a phone
  const brief = picked.map((run) => h("span", { class: "brief" }, h("i", { class: `mark b${colorOf(run)}` }), run.name, " ", stateChip(run), ` step ${run.step ?? 0}`, alarmChip(run)));
  const list = document.getElementById("runs"), open = list.querySelector("details")?.open ?? window.innerWidth > 900;
  list.replaceChildren(h("details", { open }, h("summary", {}, "Runs ", chip(state.runs.length), brief), h("ul", {}, items)));
}

const alarmChip = (run) => run.alarms.length ? [" ", chip(`${run.alarms.length} alarm${run.alarms.length > 1 ? "s" : ""}`, "warn")] : null;

async function show() {
  const at = address(), view = VIEWS[at.view] ? at.view : "overview";
  const key = JSON.stringify([view, at.runs, at.run]);
  drawViews();
  drawRuns();
  if (!state.runs.length) return root.replaceChildren(none("No run has started yet."));
  document.title = `${current().name} · ${document.querySelector(".bar strong").textContent}`;
  if (key !== shown) {
    shown = key;
    root.dataset.view = view;
    update = null;
    const place = h("div", {});
    const several = chosen().length > 1 && OF_ONE_RUN.includes(view);
    const run = several && labelled("Run", select(chosen().map(({ id, name }) => [id, name]), current().id, (id) => go({ run: id, step: "", at: "", group: "", dataset: "", sample: "", prompt: "", beside: "" })));
    root.replaceChildren(...[run && h("div", { class: "controls" }, run), place].filter(Boolean));
    try {
      const next = await VIEWS[view][1](place);
      if (shown === key) update = next;
    } catch (error) {
      if (shown === key) shown = ""; // the next look tries again
      throw error;
    }
  } else await update?.();
}

async function guarded(action) {
  try {
    await action();
    pulse.textContent = state.written ? `as of ${state.written}` : state.runs.some((run) => run.state === "running") ? "live" : "";
    pulse.className = "";
    document.getElementById("origin").textContent = [`slime ${state.version}`, state.origin].filter(Boolean).join(" · ");
  } catch (error) {
    const lost = error instanceof TypeError && /fetch/i.test(error.message);
    if (!lost) console.error(error);
    pulse.textContent = lost ? "the server does not respond" : error.message;
    pulse.className = "lost";
  }
}

const isBusy = () => document.hidden || !document.getElementById("tip").hidden || getSelection().toString();

async function look() {
  if (!isBusy()) await guarded(async () => { await loadRuns(); await show(); });
  const alive = state.runs.some((run) => run.state === "running" || run.index.texts < run.index.samples);
  setTimeout(look, alive ? EVERY : EVERY_AT_REST);
}

addEventListener("hashchange", () => guarded(show));
addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "/" && !typing) {
    const field = root.querySelector("input[type=search]");
    if (field) { event.preventDefault(); field.focus(); }
  }
  const view = Object.keys(VIEWS)[Number(event.key) - 1];
  if (view && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) go({ view, sample: "", prompt: "", beside: "" });
});

// The file of a running run is rewritten: it reloads, and keeps open folds and the scroll position.
async function showFile() {
  const words = [...root.childNodes];
  await guarded(async () => { await loadRuns(); await show(); });
  if (!state.runs.length) return root.replaceChildren(none("This browser cannot read the data in this file; one released in 2023 or later can. Summary:"), ...words);
  const { open = [], top = 0 } = history.state ?? {};
  [...document.querySelectorAll("details")].forEach((fold, i) => { fold.open = open[i] ?? fold.open; });
  scrollTo(0, top);
  if (document.documentElement.dataset.live === undefined) return;
  setInterval(() => {
    if (isBusy() || document.activeElement?.matches("input, select")) return;
    history.replaceState({ open: [...document.querySelectorAll("details")].map((fold) => fold.open), top: scrollY }, "");
    location.reload();
  }, EVERY_FILE);
}

if (isFrozen) showFile();
else look();
