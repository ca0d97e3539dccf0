// Elements from values. Text is only ever inserted as text: nothing that a model wrote is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return size >= 1e-3 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// A control with its label before it.
export const labelled = (text, control) => h("label", { class: "control" }, h("span", {}, text), control);

export function select(options, chosen, onchange) {
  const items = options.map(([value, text]) => h("option", { value, selected: String(value) === String(chosen) }, text));
  return h("select", { onchange: (event) => onchange(event.target.value) }, items);
}

export const chip = (text, kind = "") => h("span", { class: `chip ${kind}` }, text);
export const none = (text) => h("p", { class: "none" }, text);
const STATES = { interrupted: "killed", "": "unknown" };
export const stateChip = (run) => h("span", { class: `state ${run.state}` }, STATES[run.state] ?? run.state);

const tip = () => document.getElementById("tip");

// Shows lines of [color class, name, value] at a place of the window, above an open dialog too.
export function showTip(title, lines, x, y) {
  const box = tip();
  (document.querySelector("dialog[open]") ?? document.body).append(box);
  box.replaceChildren(h("header", {}, title), ...lines.map(([color, name, value]) =>
    h("div", {}, color ? h("i", { class: color }) : null, h("span", {}, name), h("b", {}, value))));
  box.hidden = false;
  const right = x + 16 + box.offsetWidth > document.documentElement.clientWidth;
  box.style.left = `${Math.max(4, right ? x - 16 - box.offsetWidth : x + 16)}px`;
  box.style.top = `${y + 12}px`;
}

export const hideTip = () => {
  tip().hidden = true;
  document.body.append(tip());
};
