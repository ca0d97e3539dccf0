// Load of each engine, prefix caches, and idle time.
import { h, none, number } from "/dom.js";
import { figure } from "/charts.js";
import { ask, current, metricsOf, series } from "/store.js";
import { requestsFigure } from "/timeline.js";

export async function engines(root) {
  async function draw() {
    const run = current(), told = await ask("engines", { run: run.id });
    const known = await metricsOf(run, told.names), loads = Object.entries(told.loads);
    const each = loads.map(([name], i) => ({ name: `engine ${name}`, color: (i % 8) + 1, points: series(known, `rollout/engine_load/${name}`) }));
    const most = Math.max(1e-9, ...loads.map(([, load]) => load));
    const bars = loads.map(([name, load]) => {
      const bar = h("i", {});
      bar.style.width = `${(100 * load) / most}%`;
      return h("li", {}, h("span", {}, `engine ${name}`), bar, h("b", {}, number(load)));
    });
    const charts = told.names.filter((name) => !/engine_load\/\d+$/.test(name) && series(known, name).length).map((name) => {
      const [title, unit] = known.titles.get(name) ?? [name, ""];
      return { title, note: "", unit, key: name, lines: [{ name: title, color: 5, points: series(known, name) }] };
    });
    if (each.length) charts.unshift({ title: "Load", note: "mean of each step", unit: "requests in flight", key: "rollout/engine_load/…", lines: each, exact: true });
    const { timeline, step } = await ask("timeline", { run: run.id }), requests = timeline && requestsFigure(timeline, step);
    root.replaceChildren(...[
      bars.length ? [h("h3", {}, "Requests in flight, mean of the run"), h("ul", { class: "bars" }, bars)] : [],
      charts.length || requests ? [h("h3", {}, "By step"), h("div", { class: "charts" }, charts.map((chart) => figure(chart)), requests)] : [],
      bars.length || charts.length || requests ? [] : [none("This run has no engine metrics yet.")],
    ].flat());
  }
  await draw();
  return draw;
}
