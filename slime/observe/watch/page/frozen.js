// A page that was frozen into a file: the run lies in it, and what a server would be asked is answered from there.

const element = document.getElementById("data");
export const isFrozen = element !== null;

// Reads the file's data. Throws where the browser cannot.
export async function unpacked() {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const SNIPPET = 240, MOST_GROUPS = 100;
// Nearest to Python's casefold, by which a server searches.
const fold = (text) => text.toUpperCase().toLowerCase().replaceAll("ς", "σ");
const asText = (value) => (value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value));
const searched = ({ prompt, response, label }) => fold([prompt, response, label].filter((part) => part !== null && part !== undefined).map(asText).join("\n"));
const number = (text) => (text === undefined || text === "" ? null : Number(text));

// The beginnings of a sample's texts, for a list.
function short({ record, ...row }) {
  const last = Array.isArray(record.prompt) ? record.prompt.at(-1) ?? "" : record.prompt;
  const prompt = Array.isArray(record.prompt) && last !== null && typeof last === "object" ? last.content : last;
  return { ...row, prompt: asText(prompt).slice(0, SNIPPET), response: asText(record.response).slice(0, SNIPPET), label: asText(record.label).slice(0, SNIPPET) };
}

function meant(rows, asked) {
  const words = fold(asked.search ?? "").split(/\s+/).filter(Boolean), kind = asked.kind || "rollout";
  const same = (value, wanted) => wanted === undefined || wanted === "" || String(value) === String(wanted);
  return rows.filter((row) => row.kind === kind && same(row.rollout, asked.rollout) && same(row.grp, asked.group) && same(row.dataset, asked.dataset)
    && same(row.status, asked.status) && same(row.prompt, asked.prompt) && (!words.length || words.every((word) => searched(row.record).includes(word))));
}

// What is missing comes last, whichever way it goes.
function sorted(rows, columns, descending) {
  const way = descending ? -1 : 1, before = (a, b) => (a < b ? -1 : a > b ? 1 : 0), lacks = (value) => value === null || value === undefined;
  return rows.toSorted((a, b) => {
    for (const column of columns) {
      const x = a[column], y = b[column];
      if (lacks(x) || lacks(y)) {
        if (lacks(x) !== lacks(y)) return lacks(x) ? 1 : -1;
      } else if (x !== y) return way * before(x, y);
    }
    return 0;
  });
}

function groupsOf(rows) {
  const groups = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.rollout, row.dataset, row.grp]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  const told = [...groups.values()].map((all) => {
    const rewards = all.map((row) => row.reward).filter((reward) => reward !== null);
    const least = rewards.length ? Math.min(...rewards) : null, greatest = rewards.length ? Math.max(...rewards) : null;
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const { rollout, dataset, grp } = all[0];
    return { rollout, dataset, group: grp, samples: all.length, least, mean, greatest, rewards: rewards.join(" "), text: short(all[0]).prompt };
  });
  const spread = (group) => (group.least === null ? -1 : group.greatest - group.least);
  return told.sort((a, b) => spread(b) - spread(a) || b.rollout - a.rollout || (a.group ?? -1) - (b.group ?? -1)).slice(0, MOST_GROUPS);
}

// Steps and values of the metrics that are asked for: of each the file has its own steps.
function metrics(series, { names, since }) {
  const wanted = (names ?? "").split(",").map(decodeURIComponent).filter((name) => Object.hasOwn(series, name) && !Number(since ?? 0));
  const steps = [...new Set(wanted.flatMap((name) => series[name][0]))].sort((a, b) => a - b), place = new Map(steps.map((step, i) => [step, i]));
  const columns = Object.fromEntries(wanted.map((name) => {
    const column = new Array(steps.length).fill(null);
    series[name][0].forEach((step, i) => { column[place.get(step)] = series[name][1][i]; });
    return [name, column];
  }));
  const bad = Object.fromEntries(wanted.map((name) => [name, series[name][0].filter((step, i) => series[name][1][i] === null)]));
  return { generation: 0, since: 1, steps, columns, bad, names: Object.keys(series) };
}

// The answers to what the page asks, of what `unpacked` gives.
export function answering(data) {
  const of = (asked) => data.stages[asked.run];
  const answers = {
    runs: () => data.runs,
    metrics: (asked) => metrics(of(asked).series, asked),
    phases: (asked) => of(asked).phases,
    engines: (asked) => of(asked).engines,
    settings: (asked) => of(asked).settings,
    rollouts: (asked) => of(asked).rollouts,
    timeline: (asked) => {
      const { rollouts, timelines, note } = of(asked).timeline, rollout = number(asked.rollout) ?? rollouts.at(-1) ?? 0;
      return { rollouts, rollout, timeline: timelines[rollout] ?? null, note };
    },
    groups: (asked) => groupsOf(meant(of(asked).samples, asked)),
    samples: (asked) => {
      const columns = [data.sorts[asked.sort ?? "step"] ?? "rollout", "rollout", "id"], start = number(asked.offset) ?? 0, end = start + (number(asked.limit) ?? 50);
      const rows = sorted(meant(of(asked).samples, asked), columns, String(asked.descending) === "1");
      return { samples: asked.whole ? rows.slice(start, end) : rows.slice(start, end).map(short), more: rows.length > end };
    },
    sample: (asked) => of(asked).samples.find((row) => String(row.id) === String(asked.id)),
    differences: (asked) => {
      const places = (asked.runs ?? "").split(",").map((run) => data.differences.runs.indexOf(run)).filter((place) => place >= 0);
      const flags = data.differences.flags.map(({ flag, values }) => ({ flag, values: places.map((place) => values[place]) }));
      return { flags: flags.filter(({ values }) => new Set(values).size > 1) };
    },
  };
  return (question, asked) => answers[question](asked);
}
