// A response with what training saw of it: loss mask, log-probs, weight versions, and tool output.
import { h, number } from "/dom.js";

const LEVELS = 8, DEEPEST = -6, FOLDED = 160;

export const COLORINGS = { none: "plain", mask: "loss mask", log_prob: "log-prob", advantage: "reward vs. group mean", token_advantage: "advantage of each token", difference: "trainer − engine log-prob", version: "weight version" };
// Colorings by values from training: key of a piece, key of the recorded tokens, value of the full color.
const TRAINED = { token_advantage: ["advantage", "advantages", 1], difference: ["difference", "log_prob_diffs", 0.5] };

const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));

export function roles(prompt) {
  if (!Array.isArray(prompt)) return [String(prompt ?? "")];
  return prompt.flatMap((message) => {
    if (message === null || typeof message !== "object") return [String(message), "\n"];
    const { role, content, ...more } = message; // calls of tools, names, reasoning: beside the content or instead of it
    const said = Object.entries(more).filter(([, value]) => value !== null).flatMap(([name, value]) => ["\n", h("em", {}, name), " ", plain(value)]);
    return [h("span", { class: "role" }, role ?? "?"), " ", content === null ? "" : plain(content), ...said, "\n"];
  });
}

// 0 for a certain token, LEVELS - 1 for a very unlikely one.
const levelOf = (value) => Math.min(LEVELS - 1, Math.max(0, Math.round((Math.min(0, value) / DEEPEST) * (LEVELS - 1))));

function flat(runs, length) {
  const values = new Array(length).fill(1);
  let at = 0;
  for (const [value, count] of runs ?? []) {
    values.fill(value, at, at + count);
    at += count;
  }
  return values;
}

// The response in pieces {text, trained, version, log_prob}: tokens where they were recorded, else segments.
// A token may be part of a character, so plain text comes from the response itself.
function pieces(record, byToken) {
  const tokens = record.tokens;
  if (byToken && tokens && Array.isArray(tokens.text)) {
    const mask = flat(record.loss_mask, tokens.text.length), versions = [];
    for (const [start, end, version] of record.token_spans ?? []) {
      for (let i = Math.max(0, start); i < Math.min(end, tokens.text.length); i++) versions[i] = version;
    }
    return tokens.text.map((text, i) => ({ text, trained: Boolean(mask[i]), version: versions[i] ?? null, log_prob: tokens.log_probs?.[i] ?? null,
      advantage: tokens.advantages?.[i] ?? null, difference: tokens.log_prob_diffs?.[i] ?? null, token: i }));
  }
  if (record.segments?.length) return record.segments.map((piece) => ({ ...piece, log_prob: null }));
  const trained = record.trained_tokens !== 0 || !record.loss_mask;
  return record.response ? [{ text: record.response, trained, version: record.token_spans?.[0]?.[2] ?? null, log_prob: null }] : [];
}

function classOf(piece, coloring, above, versions) {
  if (coloring === "mask") return piece.trained ? "trained" : "untrained";
  if (coloring === "log_prob") return piece.log_prob === null ? "unknown" : `lp lp${levelOf(piece.log_prob)}`;
  if (coloring === "advantage") return !piece.trained || !above ? "untrained" : above > 0 ? "up" : "down";
  if (TRAINED[coloring]) return toneOf(piece[TRAINED[coloring][0]] ?? null, piece.trained, TRAINED[coloring][2]);
  if (coloring === "version") return `version v${versions.indexOf(piece.version) % 4}`;
  return "";
}

// Up or down, in four strengths.
function toneOf(value, trained, full) {
  if (value === null || !trained) return value === null ? "unknown" : "untrained";
  const step = Math.min(4, Math.ceil((4 * Math.abs(value)) / full - 1e-3));
  return step > 0 ? `${value > 0 ? "up" : "down"} tone${step}` : "";
}

function titleOf(piece) {
  const parts = [piece.trained ? "trained" : "not trained (loss mask 0)"];
  if (piece.token !== undefined) parts.unshift(`token ${piece.token}`);
  if (piece.log_prob !== null) parts.push(`log-prob ${number(piece.log_prob)}`);
  if (typeof piece.advantage === "number") parts.push(`advantage ${number(piece.advantage)}`);
  if (typeof piece.difference === "number") parts.push(`trainer − engine ${number(piece.difference)}`);
  if (piece.version !== null && piece.version !== undefined) parts.push(`weight version ${piece.version}`);
  return parts.join(", ");
}

// Untrained text within a response came from a tool or the environment; long text is folded.
export function response(sample, coloring) {
  const record = sample.record, all = pieces(record, coloring !== "none"), versions = [...new Set(all.map((piece) => piece.version))];
  if (!all.length) return h("pre", { class: "response-text" }, h("span", { class: "empty" }, "(empty response)"));
  const out = [];
  const mixed = all.some((piece) => piece.trained);
  for (let i = 0; i < all.length;) {
    let end = i;
    while (end < all.length && all[end].trained === all[i].trained) end++;
    const run = all.slice(i, end);
    const spans = run.map((piece) => h("span", { class: classOf(piece, coloring, sample.above, versions), title: titleOf(piece) }, piece.text));
    const text = run.map((piece) => piece.text).join("");
    const folds = mixed && !all[i].trained && text.length > FOLDED;
    out.push(folds ? h("details", { class: "tool" }, h("summary", {}, `tool output, ${text.length.toLocaleString("en")} characters: `, h("q", {}, text.trim().slice(0, 60), "…")), spans) : spans);
    i = end;
  }
  return h("pre", { class: "response-text", tabindex: 0, "aria-label": "response" }, out);
}

const DOCS = "https://github.com/slime-rl/slime/blob/main/docs"; // slime/documentation.py has the same
const whatIsRecorded = () => h("a", { href: `${DOCS}/run-folder.md#samples` }, "What is recorded.");

export const hasTokens = (record) => Array.isArray(record.tokens?.text);

export function legend(coloring, record) {
  if (coloring === "log_prob" && !hasTokens(record)) return h("p", { class: "hint" }, "The tokens of this sample were not recorded: each step records its first 65,536 tokens.");
  if (TRAINED[coloring] && !Array.isArray(record.tokens?.[TRAINED[coloring][1]])) return h("p", { class: "hint" }, "Not available for this sample: this needs recorded tokens that were trained, and for the difference log-probs from the engine.");
  const tones = (up, down) => [["up tone4", up], ["up tone2", " "], ["down tone2", " "], ["down tone4", down], ["untrained", "not trained"]];
  const entries = {
    token_advantage: tones(`${TRAINED.token_advantage[2]} or more: made more likely`, `−${TRAINED.token_advantage[2]} or less: made less likely`),
    difference: tones(`more likely in the trainer, by ${TRAINED.difference[2]} or more`, "more likely in the engine"),
    mask: [["trained", "trained"], ["untrained", "not trained"]],
    log_prob: [...Array(LEVELS).keys()].map((i) => [`lp lp${i}`, i === 0 ? "certain" : i === LEVELS - 1 ? `${DEEPEST} or less` : " "]),
    advantage: [["up", "above the group mean: made more likely"], ["down", "below: made less likely"], ["untrained", "neither"]],
  }[coloring];
  return entries ? h("ul", { class: "legend" }, entries.map(([kind, text]) => h("li", {}, h("span", { class: `swatch ${kind}` }, "a"), text))) : null;
}

// -- two texts side by side ------------------------------------------------------------------------------------

const MAX_WORDS = 1500;
const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

// The words of both texts as [text, is in both], by their longest common subsequence; null for very long texts.
export function compared(left, right) {
  const a = words(left), b = words(right);
  let head = 0, tail = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const x = a.slice(head, a.length - tail), y = b.slice(head, b.length - tail), wide = y.length + 1;
  if (x.length > MAX_WORDS || y.length > MAX_WORDS) return null;
  const best = new Uint16Array((x.length + 1) * wide);
  for (let i = x.length - 1; i >= 0; i--) {
    for (let j = y.length - 1; j >= 0; j--) {
      best[i * wide + j] = x[i] === y[j] ? best[(i + 1) * wide + j + 1] + 1 : Math.max(best[(i + 1) * wide + j], best[i * wide + j + 1]);
    }
  }
  const same = (part) => part.map((word) => [word, true]), one = same(a.slice(0, head)), two = same(b.slice(0, head));
  let i = 0, j = 0;
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && x[i] === y[j]) { one.push([x[i++], true]); two.push([y[j++], true]); }
    else if (j >= y.length || (i < x.length && best[(i + 1) * wide + j] >= best[i * wide + j + 1])) one.push([x[i++], false]);
    else two.push([y[j++], false]);
  }
  return [[...one, ...same(a.slice(a.length - tail))], [...two, ...same(b.slice(b.length - tail))]];
}
