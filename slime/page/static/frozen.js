// Answers from a report file, which contains the run's data, in place of the server's.

const element = document.getElementById("data");
export const isFrozen = element !== null;

// Reads the file's data. Throws where the browser cannot decompress it.
export async function unpacked() {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Close to Python's casefold, which the server uses.
const fold = (text) => text.toUpperCase().toLowerCase().replaceAll("ς", "σ");
const asText = (value) => (value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value));
const searched = ({ prompt, response, label }) => fold([prompt, response, label].filter((part) => part !== null && part !== undefined).map(asText).join("\n"));
const number = (text) => (text === undefined || text === "" ? null : Number(text));

// A row for a list, with the beginnings of its texts.
const listed = ({ record, short, ...row }) => ({ ...row, ...short });

function matching(rows, asked) {
  const words = fold(asked.search ?? "").split(/\s+/).filter(Boolean), kind = asked.kind || "rollout";
  const same = (value, wanted) => wanted === undefined || wanted === "" || String(value) === String(wanted);
  return rows.filter((row) => row.kind === kind && same(row.step, asked.step) && same(row.grp, asked.group) && same(row.dataset, asked.dataset)
    && same(row.status, asked.status) && same(row.prompt, asked.prompt) && (!words.length || words.every((word) => searched(row.record).includes(word))));
}

// Missing values come last in either direction.
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

const groupKey = (row) => JSON.stringify([row.kind, row.step, row.dataset, row.grp, row.grp === null ? row.id : null]);

// The groups of rows in the order of their first rows, with the rewards of all their samples.
function groupsOf(rows, samples) {
  const first = new Map(), rewardsOf = new Map();
  for (const row of rows) if (!first.has(groupKey(row))) first.set(groupKey(row), row);
  for (const row of samples) {
    const key = groupKey(row);
    if (first.has(key)) rewardsOf.set(key, [...(rewardsOf.get(key) ?? []), row.reward]);
  }
  return [...first].map(([key, { id, step, dataset, grp, short }]) => {
    const all = rewardsOf.get(key), rewards = all.filter((reward) => reward !== null), has = rewards.length > 0;
    const mean = has ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const ends = { least: has ? Math.min(...rewards) : null, mean, greatest: has ? Math.max(...rewards) : null };
    return { id, step, dataset, group: grp, samples: all.length, ...ends, rewards: has ? rewards.join(" ") : null, ...short };
  });
}

// Values of the requested metrics, aligned to common steps.
function metrics(series, titles, { names, since }) {
  const wanted = (names ?? "").split(",").map(decodeURIComponent).filter((name) => Object.hasOwn(series, name) && !Number(since ?? 0));
  const steps = [...new Set(wanted.flatMap((name) => series[name][0]))].sort((a, b) => a - b), place = new Map(steps.map((step, i) => [step, i]));
  const columns = Object.fromEntries(wanted.map((name) => {
    const column = new Array(steps.length).fill(null);
    series[name][0].forEach((step, i) => { column[place.get(step)] = series[name][1][i]; });
    return [name, column];
  }));
  const bad = Object.fromEntries(wanted.map((name) => [name, series[name][0].filter((step, i) => series[name][1][i] === null)]));
  return { generation: 0, since: 1, steps, columns, bad, names: titles };
}

// Answers the page's questions from the data that `unpacked` returns.
export function answering(data) {
  const of = (asked) => data.stages[asked.run];
  const page = (asked) => [number(asked.offset) ?? 0, (number(asked.offset) ?? 0) + (number(asked.limit) ?? 50)];
  const found = (asked) => {
    const columns = [data.sorts[asked.sort ?? "step"] ?? "step", "step", "id"];
    return sorted(matching(of(asked).samples, asked), columns, String(asked.descending) === "1");
  };
  const answers = {
    runs: () => data.runs,
    metrics: (asked) => metrics(of(asked).series, of(asked).names, asked),
    phases: (asked) => of(asked).phases,
    engines: (asked) => of(asked).engines,
    settings: (asked) => of(asked).settings,
    steps: (asked) => of(asked).steps,
    timeline: (asked) => {
      const { steps, timelines, note } = of(asked).timeline, step = number(asked.step) ?? steps.at(-1) ?? 0;
      return { steps, step, timeline: timelines[step] ?? null, note };
    },
    groups: (asked) => {
      const groups = groupsOf(found(asked), of(asked).samples), [start, end] = page(asked);
      return { groups: groups.slice(start, end), more: groups.length > end };
    },
    samples: (asked) => {
      const rows = found(asked), [start, end] = page(asked);
      return { samples: asked.whole ? rows.slice(start, end) : rows.slice(start, end).map(listed), more: rows.length > end };
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
