"use strict";
// Draws the report from the values of run_data.py. Everything that comes from a run is put into the page as text.
const { runs, title } = JSON.parse(document.getElementById("data").textContent);
const one = runs.length === 1;
const SVG = "http://www.w3.org/2000/svg";
const AXES = { step: "step", tokens: "tokens", seconds: "time in training" };
const EVENT_MARKS = { start: "▸", checkpoint: "◆", "bad step": "✕", rollback: "↶", stall: "■" };
// Metrics that have a chart of their own, in this order; the others follow under their names.
const CHARTS = [
  ["Loss", ["loss", "val/loss"]], ["Bits per byte", ["val/bits_per_byte"]], ["Reward", ["reward", "val/reward"]],
  ["Learning rate", ["lr"]], ["Gradient norm", ["grad_norm"]], ["Tokens per second", ["tokens_per_second"]],
  ["MFU", ["mfu"]], ["Memory, GiB", ["memory_gib"]], ["KL to the reference", ["kl"]], ["Entropy", ["entropy"]],
  ["Log-probability, trainer − sampling", ["sampling_logp_difference/mean", "sampling_logp_difference/max"]],
  ["Completion length, tokens", ["completion_tokens", "tokens/chosen", "tokens/rejected"]],
  ["Preferred", ["rewards/accuracy", "val/rewards/accuracy"]],
];
// Metrics that share a chart, with a curve for what follows in the name.
const GROUPS = [
  ["loss/", "Loss of each source", ""], ["experts/fullest/", "Fullest expert, fraction of tokens", "layer "],
  ["experts/emptiest/", "Emptiest expert, fraction of tokens", "layer "], ["experts/entropy/", "Entropy of the choice of experts", "layer "],
];
const IN_STRIP = ["data_seconds", "save_stall_seconds", "step_seconds"];
let axis = "step", zoom = null, logarithmic = false;
const redraws = [];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function drawn(tag, attributes = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e4 || Number.isInteger(value)) return short(value);
  return size !== 0 && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
function short(value) {
  for (const [unit, name] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= unit) return `${Number((value / (name === "k" ? 1e3 : unit)).toPrecision(4))}${name}`;
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
}
function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
}
const onAxis = (value) => axis === "seconds" ? duration(value) : short(value);
const last = (run, name) => run.last[name];
const color = (index) => `var(--c${index % 8})`;

// The first index whose value is not less than `value`, of `length` ascending values; `length` if there is none.
function lowerBound(length, valueAt, value) {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (valueAt(middle) < value) low = middle + 1; else high = middle;
  }
  return low;
}
// Where a step is on the chosen axis: between the two log steps around it.
function along(run, step) {
  if (axis === "step") return step;
  const steps = run.axis.step, values = run.axis[axis];
  const high = Math.min(lowerBound(steps.length, (index) => steps[index], step), steps.length - 1);
  if (high <= 0 || steps[high] === step) return values[Math.max(high, 0)] ?? step;
  const part = (step - steps[high - 1]) / (steps[high] - steps[high - 1]);
  return values[high - 1] + part * (values[high] - values[high - 1]);
}
// The point [x, y] nearest to x, of points in ascending order.
function nearest(points, x) {
  const high = Math.min(lowerBound(points.length, (index) => points[index][0], x), points.length - 1);
  return high > 0 && x - points[high - 1][0] <= points[high][0] - x ? points[high - 1] : points[high];
}

// @CHARTS@

function table(head, rows) {
  const made = element("table");
  made.append(element("thead", {}, element("tr", {}, ...head.map((word) => element("th", { scope: "col" }, word)))));
  made.append(element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell) => {
    if (cell instanceof Node) return element("td", {}, cell);
    return typeof cell === "number" ? element("td", { class: "number" }, number(cell)) : element("td", {}, cell ?? "–");
  })))));
  return element("div", { class: "scroll" }, made);
}
const shown = (value) => value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);

const main = document.querySelector("main"), nav = document.querySelector("nav");
document.querySelector("h1").textContent = title ?? runs.map((run) => run.name).join(" · ");
function section(id, heading, ...children) {
  const kept = children.filter(Boolean);
  if (!kept.length) return;
  main.append(element("section", { id }, element("h2", {}, heading), ...kept));
  nav.append(element("a", { href: `#${id}` }, heading));
}
function perRun(make) {
  return runs.map((run) => {
    const made = make(run);
    if (!made) return null;
    return one ? made : element("details", { open: "" }, element("summary", {}, element("strong", {}, run.name)), made);
  }).filter(Boolean);
}
function group(...children) {
  const kept = children.filter(Boolean);
  return kept.length ? element("div", {}, ...kept) : null;
}

// What was predicted of the run, beside what its first steps took.
function beside(run, name, unit) {
  const predicted = run.prediction[`predicted/${name}`], measured = run.prediction[`measured/${name}`];
  return predicted && measured ? `${number(measured)}${unit}, predicted ${number(predicted)}${unit}` : null;
}

function tiles(run) {
  const tokens = run.axis.tokens.at(-1), seconds = run.axis.seconds.at(-1);
  const facts = [
    ["state", run.state], ["steps", `${short(run.axis.step.at(-1) ?? 0)} of ${short(run.steps)}`],
    ["tokens", tokens ? short(tokens) : null], ["time in training", seconds ? duration(seconds) : null],
    ["loss", last(run, "loss") === null ? "not finite" : last(run, "loss")], ["validation loss", last(run, "val/loss")], ["bits per byte", last(run, "val/bits_per_byte")],
    ["reward", last(run, "reward")], ["validation reward", last(run, "val/reward")],
    ["preferred", last(run, "rewards/accuracy")],
    ["tokens per second", last(run, "tokens_per_second")], ["MFU", last(run, "mfu") ? `${(100 * last(run, "mfu")).toFixed(0)} %` : null],
    ["peak memory", last(run, "memory_gib") ? `${number(last(run, "memory_gib"))} GiB` : null],
    ["memory after the first steps", beside(run, "memory_gib", " GiB")], ["tokens per second in the first steps", beside(run, "tokens_per_second", "")],
    ["checkpoints", run.checkpoints.length ? `${run.checkpoints.length}, ${short(run.checkpoints.at(-1).bytes / 1e6)} MB each` : null],
  ];
  const box = element("div", { class: "tiles" });
  for (const [name, value] of facts) if (value !== null && value !== undefined)
    box.append(element("div", { class: "tile" }, element("small", {}, name), element("b", name === "state" ? { class: `state ${run.state}` } : {}, number(value))));
  return box;
}
section("summary", "Summary", ...perRun((run) => group(element("p", { class: "verdict" }, run.subject), element("p", { class: "verdict" }, run.verdict), tiles(run))));

if (!one) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.options)))];
  // An option that another stage lacks is shown where somebody gave it a value.
  const told = (name) => runs.every((run) => name in run.options) || runs.some((run) => run.changed.includes(name));
  const differing = names.filter((name) => !["run.name", "run.folder"].includes(name) && told(name) && new Set(runs.map((run) => JSON.stringify(run.options[name]))).size > 1);
  section("differences", "What differs", differing.length
    ? table(["option", ...runs.map((run) => run.name)], differing.map((name) => [element("code", {}, name), ...runs.map((run) => shown(run.options[name]))]))
    : element("p", {}, "All options are the same."));
}

(() => {
  const bar = element("div", { class: "bar" }), box = element("div", { class: "charts" });
  const choose = element("select", { id: "axis" }, ...Object.entries(AXES).map(([value, text]) => element("option", { value }, text)));
  choose.addEventListener("change", () => { axis = choose.value; setZoom(null); });
  const log = element("button", { type: "button", "aria-pressed": "false", id: "log" }, "logarithmic");
  log.addEventListener("click", () => { logarithmic = !logarithmic; log.setAttribute("aria-pressed", logarithmic); setZoom(zoom); });
  const whole = element("button", { type: "button", id: "whole", hidden: "" }, "whole run");
  whole.addEventListener("click", () => setZoom(null));
  bar.append(element("label", {}, "over ", choose), log, whole, element("span", { class: "soft" }, "drag to zoom, or tap twice; ◆ checkpoint  ▸ restart  ✕ bad step  ↶ rollback  ■ stall"));
  const used = new Set(IN_STRIP);
  const curvesOf = (names) => runs.flatMap((run, index) => names.filter((name) => run.series[name]).map((name, which) => ({
    run, name, points: run.series[name], color: color(one ? names.indexOf(name) : index), dashed: !one && which > 0,
    label: one ? (name.startsWith("val/") ? "validation" : names.length > 1 ? name === "loss" || name === "reward" ? "training" : name : name) : `${run.name}${which ? ", validation" : ""}`,
  })));
  for (const [heading, names] of CHARTS) {
    names.forEach((name) => used.add(name));
    const curves = curvesOf(names);
    if (!curves.length) continue;
    if (one && names.includes("val/loss") && runs[0].predicted_loss.length) for (const [which, label] of [[1, "predicted validation"], [2, "least"], [3, "most"]])
      curves.push({ run: runs[0], points: runs[0].predicted_loss.map((point) => [point[0], point[which]]), color: color(which === 1 ? 2 : 7), dashed: true, label });
    const wide = heading === "Loss" || heading === "Reward";
    box.append(chart(heading, curves, { wide }));
  }
  const times = one ? strip(runs[0]) : null, above = box.querySelector(".wide");
  if (times && above) above.after(times); else if (times) box.prepend(times);
  const rest = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].filter((name) => !used.has(name));
  const inGroups = [];
  for (const [prefix, heading, label] of one ? GROUPS : []) {
    const names = rest.filter((name) => name.startsWith(prefix));
    inGroups.push(...names);
    if (names.length) box.append(chart(heading, names.map((name, index) => ({ run: runs[0], points: runs[0].series[name], color: color(index), label: label + name.slice(prefix.length) }))));
  }
  // A chart for each metric of validation tasks, with a curve for each task.
  const tasks = [...new Set(runs.flatMap((run) => run.tasks))], ofTasks = new Map();
  for (const name of rest) {
    const [split, task, metric] = name.split("/");
    if (split === "val" && metric && tasks.includes(task)) ofTasks.set(metric, [...(ofTasks.get(metric) ?? []), name]);
  }
  for (const [metric, names] of ofTasks) box.append(chart(`Validation tasks: ${metric}`, curvesOf(names).map((curve, index) => ({ ...curve, color: color(index), dashed: false, label: `${one ? "" : `${curve.run.name}, `}${curve.name.split("/")[1]}` }))));
  const inTasks = [...ofTasks.values()].flat();
  const others = rest.filter((name) => !inGroups.includes(name) && !inTasks.includes(name)).sort();
  const more = element("div", { class: "charts" });
  for (const name of others) more.append(chart(name, curvesOf([name])));
  section("curves", "Curves", bar, box, others.length ? element("details", { id: "more" }, element("summary", {}, `${others.length} more metrics`), more) : null);
  document.getElementById("more")?.addEventListener("toggle", () => redraws.forEach((draw) => draw()));
})();

section("experts", "Experts", ...perRun((run) => {
  if (!run.experts) return null;
  const { layers, edges, loads } = run.experts, lastStep = loads.length - 1;
  const choose = element("select", { "aria-label": "layer" }, ...layers.map((layer, index) => element("option", { value: index }, `layer ${layer}`)));
  const range = element("input", { type: "range", min: 0, max: lastStep, value: lastStep, "aria-label": "step of the experts" }), label = element("strong");
  const experts = loads[0][0].map((_, index) => index);
  const overTime = heatMap("Experts over time", experts.map((expert) => `expert ${expert}`), (column, row) => loads[column][choose.value][row], {
    edges: () => edges.map((step) => along(run, step)), inTime: true, name: (column) => `layer ${layers[choose.value]}, step ${edges[column + 1].toLocaleString("en")}` });
  const ofLayers = heatMap("Layers and experts", layers.map((layer) => `layer ${layer}`), (column, row) => loads[range.value][row][column], {
    edges: () => [...experts, experts.length], name: (column) => `expert ${column}` });
  const show = () => { label.textContent = `up to step ${edges[Number(range.value) + 1].toLocaleString("en")}`; redraws.forEach((draw) => draw()); };
  for (const each of [choose, range]) each.addEventListener("input", show);
  label.textContent = `up to step ${edges.at(-1).toLocaleString("en")}`;
  return group(element("p", { class: "soft" }, "Tokens of each expert, in parts of an even share."), element("div", { class: "charts" },
    element("div", {}, element("div", { class: "bar" }, choose), overTime), element("div", {}, element("div", { class: "bar" }, lastStep ? range : "", label), ofLayers)));
}));

section("events", "What happened", ...perRun((run) => {
  const kept = run.events.filter((event) => event.kind !== "checkpoint");
  if (!kept.length) return null;
  const say = (event) => ({
    start: () => `attempt ${run.events.filter((each) => each.kind === "start").indexOf(event) + 1}, ${event.ranks} ${event.ranks === 1 ? "rank" : "ranks"} on ${event.hosts} ${event.hosts === 1 ? "host" : "hosts"} (${event.device})`,
    end: () => `${event.state}${event.error ? `: ${event.error}` : ""}`,
    rollback: () => `${event.reason}; back to step ${event.to}`,
  }[event.kind] ?? (() => event.reason ?? ""))();
  return table(["time", "what", "step", ""], kept.map((event) => [event.time.slice(0, 19).replace("T", " "), event.kind, event.step, say(event)]));
}));

section("ranks", "Ranks", ...perRun((run) => {
  const { counts, worst, total } = run.ranks;
  if (!total || (total === 1 && run.state === "done")) return null;
  const phases = Object.entries(counts).map(([phase, count]) => `${phase} ${count.toLocaleString("en")}`).join(", ");
  const rows = worst.map((rank) => [rank.rank, rank.host, rank.phase, rank.seconds === null ? "" : duration(rank.seconds), rank.step, rank.note]);
  return group(element("p", { class: "soft" }, `${total.toLocaleString("en")} ${total === 1 ? "rank" : "ranks"}, by phase: ${phases}.${total > worst.length ? ` The ${worst.length} in the worst state:` : ""}`),
    table(["rank", "host", "phase", "for", "step", ""], rows));
}));

section("samples", "Samples", ...perRun((run) => {
  if (!run.samples.length) return null;
  const steps = [...new Set(run.samples.map((sample) => sample.step))];
  const range = element("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "step" });
  const label = element("strong"), texts = element("div");
  const show = () => {
    const step = steps[range.value];
    label.textContent = `after step ${step.toLocaleString("en")}`;
    texts.replaceChildren(...run.samples.filter((sample) => sample.step === step).map((sample) =>
      element("pre", { class: "text" }, element("mark", {}, sample.prompt), sample.text)));
  };
  range.addEventListener("input", show);
  show();
  return group(element("div", { class: "bar" }, steps.length > 1 ? range : "", label), texts);
}));

section("completions", "Completions", ...perRun((run) => {
  if (!run.tables.length) return null;
  const choose = element("select", { "aria-label": "table" }, ...run.tables.map((each, index) => element("option", { value: index }, each.name)));
  const place = element("div"), show = () => {
    const rows = run.tables[choose.value].rows;
    place.replaceChildren(table(["reward", "prompt", "completion", "tokens"], rows.map((row) => [
      row.reward, element("pre", {}, row.prompt), element("pre", {}, row.completion), row.ended ? row.tokens : `${row.tokens} (cut)`])));
  };
  choose.addEventListener("change", show);
  choose.value = run.tables.length - 1;
  show();
  return group(element("div", { class: "bar" }, choose), place);
}));

section("data", "Data", ...perRun((run) => {
  if (!run.sources.length) return null;
  const columns = ["source", "weight", "documents", "tokens", "bytes per token"].slice(0, run.sources.some((each) => each.tokens) ? 5 : 1);
  const made = table(columns, run.sources.map((each) => [each.name, each.weight, each.documents, each.tokens, each.bytes ? each.bytes / each.tokens : null].slice(0, columns.length)));
  const pictures = run.sources.filter((each) => each.lengths).map((each) => {
    const first = each.lengths.findIndex((count) => count), counts = each.lengths.slice(first), most = Math.max(...counts);
    const bars = element("div", { class: "histogram", role: "img", "aria-label": `document lengths of ${each.name}` }, ...counts.map((count, index) =>
      element("span", { style: `height: ${100 * count / most}%`, title: `${count.toLocaleString("en")} documents of ${2 ** (first + index)} to ${2 ** (first + index + 1) - 1} tokens` })));
    const ends = element("div", { class: "bar soft" }, element("span", {}, `${short(2 ** first)} tokens`), element("span", { style: "margin-left: auto" }, short(2 ** each.lengths.length)));
    return element("div", { class: "chart" }, element("h3", {}, `Document lengths of ${each.name}`), bars, ends);
  });
  return group(made, pictures.length ? element("div", { class: "charts", style: "margin-top: 12px" }, ...pictures) : null);
}));

section("checkpoints", "Checkpoints", ...perRun((run) => run.checkpoints.length
  ? table(["step", "MB", "measured"], run.checkpoints.map((each) => [each.step, Number((each.bytes / 1e6).toFixed(1)),
    Object.entries(each.metrics).filter(([name]) => name === "loss" || name.startsWith("val/")).map(([name, value]) => `${name} ${number(value)}`).join(", ")]))
  : null));

section("configuration", "Configuration", ...perRun((run) => {
  const rows = (names) => table(["option", "value"], names.map((name) => [element("code", {}, name), shown(run.options[name])]));
  return group(element("p", { class: "soft" }, "Options that differ from the defaults:"), rows(run.changed),
    element("details", {}, element("summary", {}, `all ${Object.keys(run.options).length} options`), rows(Object.keys(run.options))));
}));

section("environment", "Environment", ...perRun((run) => Object.keys(run.environment).length
  ? table(["", ""], Object.entries(run.environment).map(([name, value]) => [element("span", { class: "name" }, name.replaceAll("_", " ")), value])) : null));

redraws.forEach((draw) => draw());
let resizing;
addEventListener("resize", () => { cancelAnimationFrame(resizing); resizing = requestAnimationFrame(() => redraws.forEach((draw) => draw())); });
