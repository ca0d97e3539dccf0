// Samples: groups by question, one sample with its tokens, and two responses side by side.
import { chip, duration, h, labelled, none, number, select } from "/dom.js";
import { address, ask, current, go, state } from "/store.js";
import { COLORINGS, compared, hasTokens, legend, response, roles } from "/tokens.js";

const PAGE = 50, PAUSE = 180, MAX_IN_GROUP = 200, MAX_BARS = 32;
const SORTS = { step: "step", spread: "reward spread in the group", reward: "reward", advantage: "reward vs. group mean", length: "response length", log_prob: "log-prob", cached: "cached prompt tokens", tools: "time in tools" };
const STATUSES = ["completed", "truncated", "aborted", "failed"];
const stepName = (kind, step) => (kind === "rollout" ? `step ${step}` : `evaluation at step ${step}`);
const signed = (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + number(value));
const toneOf = (value) => (value > 0 ? "good" : value < 0 ? "bad" : "");

function queryOf(at) {
  return { run: current().id, kind: at.kind, step: at.at, group: at.group, dataset: at.dataset, status: at.status, search: at.search, sort: at.sort, descending: at.descending };
}

export async function samples(root) {
  const place = h("div", {});
  root.replaceChildren(place);
  let shown = "", redraw = null;
  async function draw() {
    const at = address(), key = JSON.stringify([at.sample, at.prompt, at.beside, current().id]);
    if (key === shown) return redraw?.();
    shown = key;
    redraw = null;
    const part = h("div", {});
    place.replaceChildren(part);
    try {
      if (at.sample) return await one(part, at.sample);
      if (at.prompt || at.beside) return await beside(part, at);
      const next = await list(part);
      if (shown === key) redraw = next;
    } catch (error) {
      if (shown === key) shown = ""; // the next look tries again
      throw error;
    }
  }
  await draw();
  return draw;
}

// -- the list of groups ---------------------------------------------------------------------------------------------

async function list(root) {
  const controls = h("div", { class: "controls" }), body = h("div", { "aria-live": "off" }), note = h("p", { class: "hint", role: "status" });
  root.replaceChildren(controls, note, body);
  let turn = 0, known = "", seen = "";
  const change = (changes) => { go(changes, { quiet: true }); return fill(true); };
  let pause = 0;
  const search = h("input", { type: "search", placeholder: "words in prompt, response, label", value: address().search ?? "", "aria-label": "search samples",
    oninput: (event) => { clearTimeout(pause); const text = event.target.value; pause = setTimeout(() => change({ search: text }), PAUSE); } });

  function drawControls(steps) {
    const at = address(), key = JSON.stringify([steps.length, at]);
    if (key === known) return;
    known = key;
    const options = [["rollout:", "all steps"], ["eval:", "all evaluations"], ...steps.toReversed().map((s) => [`${s.kind}:${s.step}`, `${stepName(s.kind, s.step)} (reward ${number(s.reward)})`])];
    const step = select(options, `${at.kind ?? "rollout"}:${at.at ?? ""}`, (value) => { const [kind, at] = value.split(":"); change({ kind: kind === "rollout" ? "" : kind, at, group: "", dataset: "" }); });
    const typing = document.activeElement === search;
    controls.replaceChildren(
      labelled("Search", search), labelled("Step", step),
      labelled("Sort by", select(state.sorts.map((name) => [name, SORTS[name] ?? name]), at.sort, (value) => change({ sort: value }))),
      h("button", { type: "button", "aria-label": "reverse the order", onclick: () => change({ descending: address().descending === "1" ? "0" : "1" }) }, at.descending === "1" ? "↓ highest first" : "↑ lowest first"),
      labelled("Status", select([["", "any"], ...STATUSES.map((name) => [name, name])], at.status ?? "", (value) => change({ status: value }))),
      at.group ? h("button", { type: "button", onclick: () => change({ group: "", dataset: "", at: "" }) }, `${at.dataset ? `${at.dataset}, ` : ""}group ${at.group} ✕`) : "");
    if (typing) search.focus();
  }

  async function fill(always) {
    if (!always && (body.querySelector("details[open]") || body.querySelectorAll(".group").length > PAGE)) return; // someone is reading
    const mine = ++turn, at = address(), told = await ask("steps", { run: current().id });
    const key = JSON.stringify([told.samples, at]);
    if (mine !== turn || (!always && key === seen)) return;
    seen = key;
    drawControls(told.steps);
    if (!told.samples) {
      note.textContent = "";
      return body.replaceChildren(none("No samples have been recorded yet."));
    }
    const query = queryOf(at), answer = await ask("groups", { ...query, limit: PAGE });
    if (mine !== turn) return;
    const indexing = told.texts < told.samples ? `; ${told.texts.toLocaleString("en")} indexed for search so far` : "";
    note.textContent = told.note || `${told.samples.toLocaleString("en")} samples in this run, by group${indexing}.`;
    const items = answer.groups.map((group) => groupItem(group, query)), groups = h("div", { class: "card groups" }, items);
    if (at.group && items[0]?.matches("details")) items[0].open = true;
    const more = h("button", { type: "button", class: "more", hidden: !answer.more, onclick: async () => {
      const next = await ask("groups", { ...query, limit: PAGE, offset: groups.children.length });
      groups.append(...next.groups.map((group) => groupItem(group, query)));
      more.hidden = !next.more;
    } }, "more groups");
    body.replaceChildren(items.length ? groups : none("No sample matches."), more);
  }
  await fill(true);
  return () => fill(false);
}

function rewardBars(group) {
  const rewards = (group.rewards ?? "").split(" ").filter(Boolean).map(Number).sort((a, b) => b - a);
  const low = Math.min(0, group.least ?? 0), span = Math.max(1e-9, Math.max(1, group.greatest ?? 1) - low);
  return h("span", { class: "rewards", role: "img", "aria-label": `rewards ${rewards.map(number).join(", ")}` }, rewards.slice(0, MAX_BARS).map((reward) => {
    const bar = h("i", { title: number(reward) });
    bar.style.height = `${4 + (18 * (reward - low)) / span}px`;
    return bar;
  }));
}

// A group, folded: its question, label and rewards. A sample by itself opens at once.
function groupItem(group, query) {
  const isOne = group.samples === 1, kind = query.kind || "rollout";
  const head = [
    h("span", { class: "where" }, kind === "rollout" ? `step ${group.step}` : `eval, step ${group.step}`, group.dataset && h("small", {}, group.dataset)),
    h("span", { class: "question" }, h("span", { class: "prompt-line" }, group.question || "(no prompt)"),
      group.label ? h("span", { class: "label-line" }, h("em", {}, "label"), group.label) : null,
      query.search || isOne ? h("span", { class: "response-line" }, group.response || "(empty response)") : null),
    isOne ? h("span", {}) : rewardBars(group),
    h("span", { class: "num" }, h("b", {}, number(group.mean)), h("small", {}, isOne ? "reward" : `mean of ${group.samples}`)),
  ];
  if (isOne) return h("button", { type: "button", class: "group", onclick: () => go({ sample: group.id }) }, head);
  const inside = h("div", { class: "scroll" });
  const load = async (event) => {
    if (!event.target.open || inside.childElementCount) return;
    const order = ["step", "spread"].includes(query.sort) ? { sort: "reward", descending: "1" } : {};
    const answer = await ask("samples", { ...query, ...order, step: group.step, group: group.group, dataset: group.dataset, limit: MAX_IN_GROUP });
    const titles = ["reward", "vs. group", "tokens", "response"].map((title) => h("th", { scope: "col" }, title));
    inside.replaceChildren(
      h("table", { class: "samples" }, h("thead", {}, h("tr", {}, titles)), h("tbody", {}, answer.samples.map(sampleRow))),
      h("button", { type: "button", onclick: () => go({ beside: group.id }) }, "compare best and worst"));
  };
  return h("details", { class: "group", ontoggle: load }, h("summary", {}, head), inside);
}

function sampleRow(row) {
  return h("tr", {},
    h("td", { class: "num" }, h("b", {}, number(row.reward))),
    h("td", { class: `num ${toneOf(row.above)}` }, signed(row.above)),
    h("td", { class: "num" }, number(row.response_length), row.status && row.status !== "completed" ? [" ", chip(row.status, "warn")] : null),
    h("td", { class: "texts" }, h("button", { type: "button", class: "open", onclick: () => go({ sample: row.id }) }, h("span", { class: "response-line" }, row.response || "(empty response)"))));
}

// -- one sample -----------------------------------------------------------------------------------------------------

function chips(sample) {
  const record = sample.record, versions = record.weight_versions ?? [];
  return h("p", { class: "chips" }, h("b", { class: "reward" }, `reward ${number(sample.reward)}`), " ",
    [chip(`${signed(sample.above)} vs. its group`, toneOf(sample.above)),
      sample.status && chip(sample.status, sample.status === "completed" ? "" : "warn"),
      chip(`${number(sample.prompt_length)} + ${number(sample.response_length)} tokens`),
      sample.trained_tokens !== sample.response_length && chip(`${number(sample.trained_tokens)} trained`),
      sample.log_prob !== null && chip(`log-prob ${number(sample.log_prob)}`),
      versions.length ? chip(`weight version ${versions.join(", ")}`) : null,
      sample.cached_tokens ? chip(`${number(sample.cached_tokens)} prompt tokens cached`) : null,
      sample.tool_seconds ? chip(`${duration(sample.tool_seconds)} in tools`) : null,
      sample.removed ? chip("excluded from training", "warn") : null].filter(Boolean).flatMap((c) => [c, " "]));
}

async function one(root, id) {
  const sample = await ask("sample", { run: current().id, id }), record = sample.record;
  const text = h("div", {}), extra = record.metadata && Object.keys(record.metadata).length;
  const fallback = hasTokens(record) ? "log_prob" : record.segments?.length ? "mask" : "none";
  const paint = (coloring) => text.replaceChildren(legend(coloring, record) ?? "", response(sample, coloring));
  const coloring = COLORINGS[address().color] ? address().color : fallback;
  paint(coloring);
  const rest = Object.entries(record).filter(([name]) => !["prompt", "response", "tokens", "segments", "metadata", "label", "pictures"].includes(name));
  root.replaceChildren(
    h("div", { class: "controls" },
      h("button", { type: "button", onclick: () => go({ sample: "" }) }, "← samples"),
      labelled("Color by", select(Object.entries(COLORINGS), coloring, (value) => { go({ color: value }, { quiet: true }); paint(value); })),
      sample.grp !== null && h("button", { type: "button", onclick: () => go({ sample: "", kind: sample.kind === "rollout" ? "" : sample.kind, at: sample.step, group: sample.grp, dataset: sample.dataset }) }, "its group"),
      h("button", { type: "button", onclick: () => go({ sample: "", prompt: sample.prompt }) }, "this prompt by step")),
    h("article", { class: "card sample" },
      h("h2", {}, `${stepName(sample.kind, sample.step)}, ${sample.dataset ?? `group ${sample.grp ?? "?"}`}, sample ${sample.sample ?? "?"}`), chips(sample),
      h("h3", {}, "Prompt"), h("pre", { class: "prompt", tabindex: 0, "aria-label": "prompt" }, roles(record.prompt)),
      record.pictures?.length ? h("p", { class: "pictures" }, record.pictures.map((src, at) => h("img", { src, alt: `image ${at + 1}` }))) : null,
      record.label !== null && record.label !== undefined && record.label !== "" ? h("p", { class: "label" }, h("em", {}, "label"), typeof record.label === "string" ? record.label : JSON.stringify(record.label)) : null,
      h("h3", {}, "Response"), text,
      h("details", { class: "fold" }, h("summary", {}, "All recorded fields"), h("table", { class: "config" },
        [...rest, ...(extra ? Object.entries(record.metadata).map(([name, value]) => [`metadata.${name}`, value]) : [])].map(([name, value]) =>
          h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, typeof value === "string" ? value : JSON.stringify(value))))))));
}

// -- two responses side by side: of a prompt at two steps, or best and worst of a group ------------------------------

async function beside(root, at) {
  const run = current().id, of = at.prompt ? null : await ask("sample", { run, id: at.beside });
  const which = of ? { kind: of.kind, step: of.step, group: of.grp, dataset: of.dataset } : { kind: at.kind, prompt: at.prompt };
  const answer = await ask("samples", { run, ...which, whole: 1, limit: 200, sort: "step" });
  const all = answer.samples.filter((sample) => sample.record.response !== undefined);
  const back = h("button", { type: "button", onclick: () => go({ prompt: "", beside: "" }) }, "← samples");
  if (!all.length) return root.replaceChildren(h("div", { class: "controls" }, back), none("These samples no longer exist."));
  const best = (step) => all.filter((sample) => sample.step === step).reduce((a, b) => ((b.reward ?? -Infinity) > (a.reward ?? -Infinity) ? b : a));
  const steps = [...new Set(all.map((sample) => sample.step))];
  const worst = all.reduceRight((a, b) => ((b.reward ?? Infinity) < (a.reward ?? Infinity) ? b : a));
  let left = best(steps[0]), right = steps.length > 1 ? best(steps.at(-1)) : worst;
  const body = h("div", { class: "columns" }), options = all.map((sample) => [sample.id, `${stepName(sample.kind, sample.step)}, sample ${sample.sample ?? "?"}: reward ${number(sample.reward)}`]);
  const byId = (id) => all.find((sample) => String(sample.id) === String(id));
  const marked = (part, kind) => part.map(([word, same]) => (same || !word.trim() ? word : h(kind, {}, word)));

  function draw() {
    const texts = compared(left.record.response ?? "", right.record.response ?? "");
    const column = (sample, i) => h("div", { class: "response" }, h("header", {}, h("b", {}, stepName(sample.kind, sample.step)), " "), chips(sample),
      h("pre", { class: "response-text" }, texts ? marked(texts[i], i ? "ins" : "del") : sample.record.response));
    body.replaceChildren(column(left, 0), column(right, 1));
  }
  draw();
  const rows = steps.map((step) => {
    const here = all.filter((sample) => sample.step === step), rewards = here.map((sample) => sample.reward).filter((r) => r !== null);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    return h("tr", {}, h("td", {}, stepName(here[0].kind, step)), h("td", { class: "num" }, number(mean)), h("td", { class: "num" }, here.length),
      h("td", {}, h("button", { type: "button", onclick: () => { left = best(step); pickLeft.value = left.id; draw(); } }, "left"), " ",
        h("button", { type: "button", onclick: () => { right = best(step); pickRight.value = right.id; draw(); } }, "right")));
  });
  const pickLeft = select(options, left.id, (id) => { left = byId(id); draw(); });
  const pickRight = select(options, right.id, (id) => { right = byId(id); draw(); });
  root.replaceChildren(h("div", { class: "controls" }, back, labelled("Left", pickLeft), labelled("Right", pickRight)),
    h("pre", { class: "prompt" }, roles(all[0].record.prompt)), body,
    h("h3", {}, `Sampled in ${steps.length} step${steps.length > 1 ? "s" : ""}`),
    h("div", { class: "card scroll" }, h("table", { class: "samples" }, h("thead", {}, h("tr", {}, ["step", "mean reward", "samples", "show the best on the"].map((t) => h("th", { scope: "col" }, t)))), h("tbody", {}, rows))));
}
