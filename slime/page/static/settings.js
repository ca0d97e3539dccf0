// The settings of a run, and those that differ between the chosen runs.
import { chip, h, labelled, none } from "/dom.js";
import { address, ask, chosen, colorOf, current, go } from "/store.js";

const kindOf = (origin) => (/^derived/.test(origin) ? "Derived" : /^(default|$)/.test(origin) ? "Defaults" : "Set by the user");

export async function settings(root) {
  const runs = chosen(), run = current();
  const [flags, differing] = await Promise.all([ask("settings", { run: run.id }), runs.length > 1 ? ask("differences", { runs: runs.map((r) => r.id).join(",") }) : null]);
  const body = h("div", {}), open = new Set(["Set by the user"]);
  const search = h("input", { type: "search", placeholder: "flag or value", value: address().flag ?? "", "aria-label": "find a setting",
    oninput: (event) => { go({ flag: event.target.value }, { quiet: true }); draw(); } });
  root.replaceChildren(h("div", { class: "controls" }, labelled("Find a setting", search)), body);

  function draw() {
    const words = (address().flag ?? "").toLowerCase(), matches = (...texts) => texts.join(" ").toLowerCase().includes(words);
    const parts = [];
    if (differing) {
      const rows = differing.flags.filter(({ flag, values }) => matches(flag, ...values))
        .map(({ flag, values }) => h("tr", {}, h("th", { scope: "row" }, flag), values.map((value) => h("td", {}, value))));
      const head = h("tr", {}, h("th", { scope: "col" }, "setting"), runs.map((r) => h("th", { scope: "col" }, h("i", { class: `mark b${colorOf(r)}` }), r.name)));
      parts.push(h("h3", {}, "Settings that differ"), rows.length ? h("div", { class: "card scroll" }, h("table", { class: "config diff" }, head, rows)) : none("These runs have the same settings."));
    }
    parts.push(h("h3", {}, runs.length > 1 ? `Settings of ${run.name}` : "Settings"));
    for (const kind of ["Set by the user", "Derived", "Defaults"]) {
      const rows = flags.filter(({ flag, value, origin }) => kindOf(origin) === kind && matches(flag, value))
        .map(({ flag, value, origin }) => h("tr", {}, h("th", { scope: "row" }, flag), h("td", {}, value), h("td", {}, origin)));
      if (!rows.length) continue;
      const toggled = (event) => { if (event.target.open) open.add(kind); else open.delete(kind); };
      parts.push(h("details", { class: "fold", open: open.has(kind) || Boolean(words), ontoggle: toggled }, h("summary", {}, kind, " ", chip(rows.length)), h("table", { class: "config" }, rows)));
    }
    if (!flags.length) parts.push(none("This run folder has no config.json."));
    body.replaceChildren(...parts);
  }
  draw();
  return null; // settings of a run do not change
}
