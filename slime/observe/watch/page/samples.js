// What was generated: groups by their rewards, samples found and sorted, one with its tokens, a prompt through the steps.
import { chip, duration, h, labelled, none, number, select } from "/dom.js";
import { address, ask, current, go, state } from "/store.js";
import { COLORINGS, compared, hasTokens, legend, response, roles } from "/tokens.js";

const PAGE = 50, PAUSE = 180;
const SORTS = { step: "step", reward: "reward", advantage: "reward against its group", length: "length", log_prob: "log-prob", cached: "cached tokens", tools: "time in tools" };
const STATUSES = ["completed", "truncated", "aborted", "failed"];
const stepName = (kind, rollout) => (kind === "rollout" ? `rollout ${rollout}` : rollout < 0 ? "evaluation before training" : `evaluation after ${rollout}`);
const signed = (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + number(value));
const toneOf = (value) => (value > 0 ? "good" : value < 0 ? "bad" : "");

function queryOf(at) {
  return { run: current().id, kind: at.kind, rollout: at.at, group: at.group, dataset: at.dataset, status: at.status, search: at.search, sort: at.sort, descending: at.descending };
}

export async function samples(root) {
  const place = h("div", {});
  root.replaceChildren(place);
  let shown = "", redraw = null;
  async function draw() {
    const at = address(), key = JSON.stringify([at.sample, at.prompt, at.beside, at.list, current().id]);
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

// -- the list -------------------------------------------------------------------------------------------------------

async function list(root) {
  const controls = h("div", { class: "controls" }), body = h("div", { "aria-live": "off" }), note = h("p", { class: "hint", role: "status" });
  root.replaceChildren(controls, note, body);
  let turn = 0, known = "", seen = "";
  const change = (changes) => { go(changes, { quiet: true }); return fill(true); };
  let pause = 0;
  const search = h("input", { type: "search", placeholder: "words in prompt, response, label", value: address().search ?? "", "aria-label": "search samples",
    oninput: (event) => { clearTimeout(pause); const text = event.target.value; pause = setTimeout(() => change({ search: text }), PAUSE); } });

  function drawControls(rollouts) {
    const at = address(), key = JSON.stringify([rollouts.length, at]);
    if (key === known) return;
    known = key;
    const options = [["rollout:", "all rollouts"], ["eval:", "all evaluations"], ...rollouts.toReversed().map((r) => [`${r.kind}:${r.rollout}`, `${stepName(r.kind, r.rollout)} (${number(r.reward)})`])];
    const step = select(options, `${at.kind ?? "rollout"}:${at.at ?? ""}`, (value) => { const [kind, rollout] = value.split(":"); change({ kind: kind === "rollout" ? "" : kind, at: rollout, group: "", dataset: "" }); });
    const typing = document.activeElement === search;
    controls.replaceChildren(
      labelled("Search", search), labelled("Of", step),
      labelled("Show", select([["", "samples"], ["groups", "groups"]], at.list ?? "", (value) => go({ list: value }))),
      at.list === "groups" ? "" : labelled("Sorted by", select(state.sorts.map((name) => [name, SORTS[name] ?? name]), at.sort, (value) => change({ sort: value }))),
      at.list === "groups" ? "" : h("button", { type: "button", "aria-label": "turn the order around", onclick: () => change({ descending: address().descending === "1" ? "0" : "1" }) }, at.descending === "1" ? "↓ most first" : "↑ least first"),
      labelled("Status", select([["", "any"], ...STATUSES.map((name) => [name, name])], at.status ?? "", (value) => change({ status: value }))),
      at.group ? h("button", { type: "button", onclick: () => change({ group: "", dataset: "" }) }, `${at.dataset ? `${at.dataset}, ` : ""}group ${at.group} ✕`) : "",
      at.group ? h("button", { type: "button", onclick: () => go({ beside: "1" }) }, "best beside worst") : "");
    if (typing) search.focus();
  }

  async function fill(always) {
    if (!always && body.querySelectorAll("tbody tr").length > PAGE) return; // someone reads on further down
    const mine = ++turn, at = address(), told = await ask("rollouts", { run: current().id });
    const key = JSON.stringify([told.samples, at]);
    if (mine !== turn || (!always && key === seen)) return;
    seen = key;
    drawControls(told.rollouts);
    if (!told.samples) {
      note.textContent = "";
      return body.replaceChildren(none("No samples have been recorded yet."));
    }
    if (at.list === "groups") {
      const groups = await ask("groups", queryOf(at));
      if (mine !== turn) return;
      note.textContent = `Groups whose rewards differ most come first: only these teach. ${told.note ?? ""}`;
      return body.replaceChildren(groupTable(groups));
    }
    const answer = await ask("samples", { ...queryOf(at), limit: PAGE });
    if (mine !== turn) return;
    const indexing = told.texts < told.samples ? `, texts of ${told.texts.toLocaleString("en")} indexed so far` : "";
    note.textContent = told.note || `${told.samples.toLocaleString("en")} samples in the run${indexing}.`;
    const rows = h("tbody", {}, answer.samples.map(sampleRow));
    const more = h("button", { type: "button", class: "more", hidden: !answer.more, onclick: async () => {
      const next = await ask("samples", { ...queryOf(address()), limit: PAGE, offset: rows.children.length });
      rows.append(...next.samples.map(sampleRow));
      more.hidden = !next.more;
    } }, "more");
    const head = h("thead", {}, h("tr", {}, ["reward", "vs. group", "tokens", "step", "prompt and response"].map((t) => h("th", { scope: "col" }, t))));
    body.replaceChildren(answer.samples.length ? h("div", { class: "card scroll" }, h("table", { class: "samples" }, head, rows)) : none("Nothing is like that."), more);
  }
  await fill(true);
  return () => fill(false);
}

function sampleRow(row) {
  const open = () => go({ sample: row.id });
  return h("tr", {},
    h("td", { class: "num" }, h("b", {}, number(row.reward))),
    h("td", { class: `num ${toneOf(row.above)}` }, signed(row.above)),
    h("td", { class: "num" }, number(row.response_length), row.status && row.status !== "completed" ? [" ", chip(row.status, "warn")] : null),
    h("td", {}, row.kind === "rollout" ? `${row.rollout}` : stepName(row.kind, row.rollout), h("small", {}, row.dataset ?? ` group ${row.grp ?? "?"}`)),
    h("td", { class: "texts" }, h("button", { type: "button", class: "open", onclick: open }, h("span", { class: "prompt-line" }, row.prompt || "(no prompt)"), h("span", { class: "response-line" }, row.response || "(empty response)"))));
}

function groupTable(groups) {
  if (!groups.length) return none("Nothing is like that.");
  const rows = groups.map((group) => {
    const rewards = (group.rewards ?? "").split(" ").filter(Boolean).map(Number).sort((a, b) => b - a);
    const low = Math.min(0, group.least ?? 0), span = Math.max(1e-9, Math.max(1, group.greatest ?? 1) - low);
    const bars = rewards.slice(0, 32).map((reward) => {
      const bar = h("i", { title: number(reward) });
      bar.style.height = `${4 + (18 * (reward - low)) / span}px`;
      return bar;
    });
    return h("tr", {}, h("td", { class: "num" }, group.rollout), h("td", {}, h("span", { class: "rewards", role: "img", "aria-label": `rewards ${rewards.map(number).join(", ")}` }, bars)),
      h("td", { class: "num" }, number(group.mean)), h("td", { class: "num" }, group.samples),
      h("td", { class: "texts" }, h("button", { type: "button", class: "open", onclick: () => go({ list: "", at: group.rollout, group: group.group, dataset: group.dataset, sort: "reward", descending: "1" }) },
        h("span", { class: "prompt-line" }, group.text || `group ${group.group}`), h("span", { class: "response-line" }, group.dataset ?? `group ${group.group}`))));
  });
  const head = h("thead", {}, h("tr", {}, ["step", "rewards", "mean", "samples", "prompt"].map((t) => h("th", { scope: "col" }, t))));
  return h("div", { class: "card scroll" }, h("table", { class: "samples" }, head, h("tbody", {}, rows)));
}

// -- one sample -----------------------------------------------------------------------------------------------------

function chips(sample) {
  const record = sample.record, versions = record.weight_versions ?? [];
  return h("p", { class: "chips" }, h("b", { class: "reward" }, `reward ${number(sample.reward)}`), " ",
    [chip(`${signed(sample.above)} vs. its group`, toneOf(sample.above)),
      sample.status && chip(sample.status, sample.status === "completed" ? "" : "warn"),
      chip(`${number(sample.prompt_length)} + ${number(sample.response_length)} tokens`),
      sample.trained_tokens !== sample.response_length && chip(`${number(sample.trained_tokens)} trained on`),
      sample.log_prob !== null && chip(`log-prob ${number(sample.log_prob)}`),
      versions.length ? chip(`weights ${versions.join(", ")}`) : null,
      sample.cached_tokens ? chip(`${number(sample.cached_tokens)} cached`) : null,
      sample.tool_seconds ? chip(`${duration(sample.tool_seconds)} in tools`) : null,
      sample.removed ? chip("removed from the loss", "warn") : null].filter(Boolean).flatMap((c) => [c, " "]));
}

async function one(root, id) {
  const sample = await ask("sample", { run: current().id, id }), record = sample.record;
  const text = h("div", {}), extra = record.metadata && Object.keys(record.metadata).length;
  const fallback = hasTokens(record) ? "log_prob" : record.segments?.length ? "mask" : "none";
  const paint = (coloring) => text.replaceChildren(legend(coloring, record) ?? "", response(sample, coloring));
  const coloring = COLORINGS[address().color] ? address().color : fallback;
  paint(coloring);
  const rest = Object.entries(record).filter(([name]) => !["prompt", "response", "tokens", "segments", "metadata", "label"].includes(name));
  root.replaceChildren(
    h("div", { class: "controls" },
      h("button", { type: "button", onclick: () => go({ sample: "" }) }, "← samples"),
      labelled("Colour by", select(Object.entries(COLORINGS), coloring, (value) => { go({ color: value }, { quiet: true }); paint(value); })),
      sample.grp !== null && h("button", { type: "button", onclick: () => go({ sample: "", kind: sample.kind === "rollout" ? "" : sample.kind, at: sample.rollout, group: sample.grp, dataset: sample.dataset, sort: "reward", descending: "1" }) }, "its group"),
      h("button", { type: "button", onclick: () => go({ sample: "", prompt: sample.prompt }) }, "this prompt through the steps")),
    h("article", { class: "card sample" },
      h("h2", {}, `${stepName(sample.kind, sample.rollout)}, ${sample.dataset ?? `group ${sample.grp ?? "?"}`}, sample ${sample.sample ?? "?"}`), chips(sample),
      h("h3", {}, "Prompt"), h("pre", { class: "prompt", tabindex: 0, "aria-label": "prompt" }, roles(record.prompt)),
      record.label !== null && record.label !== undefined && record.label !== "" ? h("p", { class: "label" }, h("em", {}, "label"), typeof record.label === "string" ? record.label : JSON.stringify(record.label)) : null,
      h("h3", {}, "Response"), text,
      h("details", { class: "fold" }, h("summary", {}, "Everything that was recorded"), h("table", { class: "config" },
        [...rest, ...(extra ? Object.entries(record.metadata).map(([name, value]) => [`metadata.${name}`, value]) : [])].map(([name, value]) =>
          h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, typeof value === "string" ? value : JSON.stringify(value))))))));
}

// -- two responses beside each other: of a prompt through the steps, or best and worst of a group --------------------

async function beside(root, at) {
  const which = at.prompt ? { prompt: at.prompt } : { rollout: at.at, group: at.group, dataset: at.dataset };
  const answer = await ask("samples", { run: current().id, kind: at.kind, ...which, whole: 1, limit: 200, sort: "step" });
  const all = answer.samples.filter((sample) => sample.record.response !== undefined);
  const back = h("button", { type: "button", onclick: () => go({ prompt: "", beside: "" }) }, "← samples");
  if (!all.length) return root.replaceChildren(h("div", { class: "controls" }, back), none("The samples are no longer there."));
  const best = (rollout) => all.filter((sample) => sample.rollout === rollout).reduce((a, b) => ((b.reward ?? -Infinity) > (a.reward ?? -Infinity) ? b : a));
  const rollouts = [...new Set(all.map((sample) => sample.rollout))];
  const worst = all.reduceRight((a, b) => ((b.reward ?? Infinity) < (a.reward ?? Infinity) ? b : a));
  let left = best(rollouts[0]), right = rollouts.length > 1 ? best(rollouts.at(-1)) : worst;
  const body = h("div", { class: "columns" }), options = all.map((sample) => [sample.id, `${stepName(sample.kind, sample.rollout)}, sample ${sample.sample ?? "?"}: ${number(sample.reward)}`]);
  const byId = (id) => all.find((sample) => String(sample.id) === String(id));
  const marked = (part, kind) => part.map(([word, same]) => (same || !word.trim() ? word : h(kind, {}, word)));

  function draw() {
    const texts = compared(left.record.response ?? "", right.record.response ?? "");
    const column = (sample, i) => h("div", { class: "response" }, h("header", {}, h("b", {}, stepName(sample.kind, sample.rollout)), " "), chips(sample),
      h("pre", { class: "response-text" }, texts ? marked(texts[i], i ? "ins" : "del") : sample.record.response));
    body.replaceChildren(column(left, 0), column(right, 1));
  }
  draw();
  const rows = rollouts.map((rollout) => {
    const here = all.filter((sample) => sample.rollout === rollout), rewards = here.map((sample) => sample.reward).filter((r) => r !== null);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    return h("tr", {}, h("td", {}, stepName(here[0].kind, rollout)), h("td", { class: "num" }, number(mean)), h("td", { class: "num" }, here.length),
      h("td", {}, h("button", { type: "button", onclick: () => { left = best(rollout); pickLeft.value = left.id; draw(); } }, "left"), " ",
        h("button", { type: "button", onclick: () => { right = best(rollout); pickRight.value = right.id; draw(); } }, "right")));
  });
  const pickLeft = select(options, left.id, (id) => { left = byId(id); draw(); });
  const pickRight = select(options, right.id, (id) => { right = byId(id); draw(); });
  root.replaceChildren(h("div", { class: "controls" }, back, labelled("Left", pickLeft), labelled("Right", pickRight)),
    h("pre", { class: "prompt" }, roles(all[0].record.prompt)), body,
    h("h3", {}, `Drawn in ${rollouts.length} step${rollouts.length > 1 ? "s" : ""}`),
    h("div", { class: "card scroll" }, h("table", { class: "samples" }, h("thead", {}, h("tr", {}, ["step", "mean reward", "samples", "its best one on the"].map((t) => h("th", { scope: "col" }, t)))), h("tbody", {}, rows))));
}
