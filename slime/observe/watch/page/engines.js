// Load of each engine, what they found in their caches, and how long they had nothing to do.
import { h, none, number } from "/dom.js";
import { figure } from "/charts.js";
import { ask, current, metricsOf, series } from "/store.js";
import { requestsFigure } from "/timeline.js";

const TITLES = {
  "rollout/prefix_cache_hit_rate": ["Prefix cache", "share of prompt tokens found in the engines' caches"],
  "rollout/avg_cached_tokens_per_sample": ["Cached tokens", "prompt tokens per sample that were not computed again"],
  "perf/engines_idle_ratio": ["Engine idle time", "share of the time without any request"],
  "rollout/engine_load/idle_ratio": ["Idle alone", "share of the time that an engine had no request while others had"],
};

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
      const [title, note] = TITLES[name] ?? [name, ""];
      return { title, note, unit: "", key: TITLES[name] ? name : "", lines: [{ name: title, color: 5, points: series(known, name) }] };
    });
    if (each.length) charts.unshift({ title: "Load", note: "requests in flight, mean over the rollout", unit: "", key: "rollout/engine_load/…", lines: each, exact: true });
    const { timeline } = await ask("timeline", { run: run.id }), requests = timeline && requestsFigure(timeline);
    root.replaceChildren(...[
      bars.length ? [h("h3", {}, "Mean load of each engine"), h("ul", { class: "bars" }, bars)] : [],
      charts.length || requests ? [h("h3", {}, "Through the steps"), h("div", { class: "charts" }, charts.map((chart) => figure(chart)), requests)] : [],
      bars.length || charts.length || requests ? [] : [none("Nothing has been logged about engines.")],
    ].flat());
  }
  await draw();
  return draw;
}
