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
  ["Completion length, tokens", ["completion_tokens", "tokens/chosen", "tokens/rejected"]],
  ["Preferred", ["rewards/accuracy", "val/rewards/accuracy"]],
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

function ticks(low, high, most) {
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  // Counted: where a step is less than the last bit of the values, adding it would never arrive.
  const first = Math.ceil(low / step - 1e-9), count = Math.min(Math.floor(high / step + 1e-9) - first, 4 * most);
  const found = [];
  for (let index = 0; index <= count; index++) found.push((first + index) * step + 0);
  return found.filter(Number.isFinite);
}

const LEFT = 52, RIGHT = 10, TOP = 6, BOTTOM = 22;  // of a drawing, beside what is drawn
// A box with a heading, a legend and a drawing. `draw(width)` fills it, each time that all are drawn.
function figure(heading, height, wide, draw) {
  const legend = element("div", { class: "legend", "aria-live": "off" });
  const svg = drawn("svg", { role: "img", "aria-label": heading, height });
  const box = element("div", { class: wide ? "chart wide" : "chart" }, element("h3", {}, heading), legend, svg);
  redraws.push(() => {
    const width = Math.max(240, box.clientWidth - 20);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    draw(width);
  });
  return { box, legend, svg };
}
// Labels the axis below, from x0 to x1. Returns where a value is on it.
function horizontal(svg, width, height, x0, x1) {
  const x = (value) => LEFT + (value - x0) / (x1 - x0) * (width - LEFT - RIGHT);
  for (const tick of ticks(x0, x1, width < 420 ? 3 : 6))
    svg.append(drawn("text", { x: x(tick), y: height - 6, "text-anchor": x(tick) > width - 40 ? "end" : "middle" }, onAxis(tick)));
  return x;
}
// A part of a legend, and the element of its value.
function legendItem(fill, label, text = "") {
  const value = element("b", {}, text);
  return { item: element("span", {}, element("i", { style: `background: ${fill}` }), `${label} `, value), value };
}

// A chart of curves [{label, color, dashed, points: [[step, value]], run}]; drag to zoom all charts, double click to go back.
function chart(heading, curves, { wide = false } = {}) {
  const height = wide ? 280 : 210;
  let view = null, from = null;  // what is drawn: its bounds and curves; and where a drag began
  const { box, legend, svg } = figure(heading, height, wide, (width) => {
    view = null;
    const placed = curves.map((curve) => ({ ...curve, at: curve.points.map(([step, value]) => [along(curve.run, step), value]) }));
    const logScale = logarithmic && placed.every(({ at }) => at.every(([, y]) => y > 0));
    const scaled = logScale ? Math.log10 : (y) => y;
    const xs = placed.flatMap(({ at }) => at.map(([x]) => x));
    let [x0, x1] = zoom ?? [Math.min(...xs), Math.max(...xs)];
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    const visible = placed.flatMap(({ at }) => at.filter(([x]) => x >= x0 && x <= x1).map(([, y]) => scaled(y)));
    if (!visible.length) { legend.textContent = "nothing measured here"; return; }
    const [y0, y1] = bounds(visible);
    const y = (value) => height - BOTTOM - (value - y0) / (y1 - y0) * (height - TOP - BOTTOM);
    for (const tick of ticks(y0, y1, 5)) {
      svg.append(drawn("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
      svg.append(drawn("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, number(logScale ? 10 ** tick : tick)));
    }
    const x = horizontal(svg, width, height, x0, x1);
    const clip = drawn("clipPath", { id: `clip-${chart.count = (chart.count ?? 0) + 1}` });
    clip.append(drawn("rect", { x: LEFT, y: 0, width: width - LEFT - RIGHT, height: height - BOTTOM + 1 }));
    const inside = drawn("g", { "clip-path": `url(#${clip.id})` }), pointer = drawn("g");
    svg.append(clip, inside, pointer);
    for (const curve of placed) {
      const path = curve.at.map(([px, py], index) => `${index ? "L" : "M"}${x(px).toFixed(1)} ${y(scaled(py)).toFixed(1)}`).join("");
      inside.append(drawn("path", { class: "curve", d: path, style: `stroke: ${curve.color}`, ...(curve.dashed ? { "stroke-dasharray": "5 3" } : {}) }));
      if (curve.at.length < 40) for (const [px, py] of curve.at)
        inside.append(drawn("circle", { cx: x(px), cy: y(scaled(py)), r: 2.4, style: `fill: ${curve.color}` }));
    }
    if (wide && one) for (const event of runs[0].events) {
      const mark = EVENT_MARKS[event.kind];
      if (!mark || event.step === null || (event.kind === "start" && !event.step)) continue;
      const sign = drawn("text", { x: x(along(runs[0], event.step)), y: height - BOTTOM - 3, "text-anchor": "middle", ...(event.kind === "checkpoint" ? {} : { class: "alarm", style: "fill: var(--alarm)" }) }, mark);
      sign.append(drawn("title", {}, `${event.kind === "start" ? "restart" : event.kind} at step ${event.step.toLocaleString("en")}${event.reason ? `: ${event.reason}` : ""}`));
      inside.append(sign);
    }
    const shown = placed.map(({ color, label, at }) => ({ ...legendItem(color, label), at }));
    const where = element("span"), value = (px) => x0 + (px - LEFT) / (width - LEFT - RIGHT) * (x1 - x0);
    legend.replaceChildren(...shown.map(({ item }) => item), where);
    view = { width, shown, where, pointer, value };
    show(null);
  });
  // The values at a place of the drawing, or the last ones; only the legend and two marks change.
  function show(px) {
    const x = px === null ? null : view.value(px);
    for (const { value, at } of view.shown) {
      const point = x === null ? at.at(-1) : nearest(at, x);
      value.textContent = point ? number(point[1]) : "–";
    }
    view.where.textContent = x === null ? "" : `${AXES[axis]} ${onAxis(nearest(view.shown[0].at, x)[0])}`;
    view.pointer.replaceChildren();
    if (x !== null) view.pointer.append(drawn("line", { class: "cursor", x1: px, x2: px, y1: TOP, y2: height - BOTTOM }));
    if (x !== null && from !== null) view.pointer.append(drawn("rect", { class: "selection", x: Math.min(from, px), y: TOP, width: Math.abs(px - from), height: height - TOP - BOTTOM }));
  }
  const place = (event) => {
    const area = svg.getBoundingClientRect(), px = (event.clientX - area.left) / area.width * view.width;
    return Math.min(Math.max(px, LEFT), view.width - RIGHT);
  };
  svg.addEventListener("pointermove", (event) => { if (view) show(place(event)); });
  svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && view) { from = place(event); svg.setPointerCapture(event.pointerId); } });
  svg.addEventListener("pointerup", (event) => {
    if (from === null || !view) return;
    const ends = [from, place(event)].sort((a, b) => a - b);
    from = null;
    if (ends[1] - ends[0] > 8) setZoom(ends.map(view.value));
  });
  svg.addEventListener("pointerleave", () => { if (view) show(null); });
  svg.addEventListener("dblclick", () => setZoom(null));
  return box;
}
// The lowest and the highest value to draw.
function bounds(values) {
  // A few first values far above the rest would press the curve flat.
  const ordered = [...values].sort((a, b) => a - b), cap = ordered[Math.floor((ordered.length - 1) * 0.99)];
  let low = ordered[0], high = ordered.at(-1);
  if (values.length > 30 && high - low > 4 * (cap - low) && cap > low) high = cap + (cap - low) * 0.3;
  const size = Math.max(Math.abs(low), Math.abs(high));
  const room = high - low <= 1e-12 * size ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.05;
  return [low - room, high + room];
}
function setZoom(range) {
  zoom = range;
  document.getElementById("whole").hidden = range === null;
  redraws.forEach((draw) => draw());
}

// Where a step's time goes: waiting for data, waiting for a save, the rest; stacked, from the first log step to the last.
function strip(run) {
  if (run.step_times.length < 2) return null;
  const height = 66, high = 40, names = [["computing", color(0)], ["waiting for data", color(4)], ["waiting for a save", color(3)]];
  const parts = run.step_times.map(([step, seconds, waiting, saving]) => {
    const data = Math.min(1, waiting / seconds), save = Math.min(1 - data, saving / seconds);
    return [step, [1 - data - save, data, save]];
  });
  const { box, legend, svg } = figure("Where the time of a step goes", height, true, (width) => {
    const places = parts.map(([step]) => along(run, step));
    const [x0, x1] = zoom ?? [places[0], places.at(-1)];
    const scale = horizontal(svg, width, height, x0, x1), x = (value) => scale(Math.min(x1, Math.max(x0, value)));
    parts.forEach(([, shares], index) => {
      const a = x(index ? places[index - 1] : x0), b = x(places[index]);
      let y = 4;
      shares.forEach((share, which) => {
        if (b > a) svg.append(drawn("rect", { x: a, y, width: b - a + 0.4, height: share * high, style: `fill: ${names[which][1]}` }));
        y += share * high;
      });
    });
  });
  legend.append(...names.map(([name, fill], index) => {
    const mean = parts.reduce((sum, [, shares]) => sum + shares[index], 0) / parts.length;
    return legendItem(fill, name, `${(100 * mean).toFixed(1)} %`).item;
  }));
  return box;
}

function table(head, rows) {
  const made = element("table");
  made.append(element("thead", {}, element("tr", {}, ...head.map((word) => element("th", { scope: "col" }, word)))));
  made.append(element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell) => {
    if (cell instanceof Node) return element("td", {}, cell);
    return typeof cell === "number" ? element("td", { class: "number" }, number(cell)) : element("td", {}, cell ?? "–");
  })))));
  return element("div", { class: "scroll" }, made);
}
const shown = (value) => value === null || value === undefined ? "–" : Array.isArray(value) || typeof value === "object" ? JSON.stringify(value) : String(value);

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
    ["checkpoints", run.checkpoints.length ? `${run.checkpoints.length}, ${short(run.checkpoints.at(-1).bytes / 1e6)} MB each` : null],
  ];
  const box = element("div", { class: "tiles" });
  for (const [name, value] of facts) if (value !== null && value !== undefined)
    box.append(element("div", { class: "tile" }, element("small", {}, name), element("b", name === "state" ? { class: `state ${run.state}` } : {}, number(value))));
  return box;
}
section("summary", "Summary", ...perRun((run) => group(element("p", { class: "verdict" }, run.verdict), tiles(run))));

if (!one) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.options)))];
  const differing = names.filter((name) => !["run.name", "run.folder"].includes(name) && new Set(runs.map((run) => JSON.stringify(run.options[name]))).size > 1);
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
  bar.append(element("label", {}, "over ", choose), log, whole, element("span", { class: "soft" }, "drag to zoom; ◆ checkpoint  ▸ restart  ✕ bad step  ↶ rollback  ■ stall"));
  const used = new Set(IN_STRIP);
  const curvesOf = (names) => runs.flatMap((run, index) => names.filter((name) => run.series[name]).map((name, which) => ({
    run, points: run.series[name], color: color(one ? names.indexOf(name) : index), dashed: !one && which > 0,
    label: one ? (name.startsWith("val/") ? "validation" : names.length > 1 ? name === "loss" || name === "reward" ? "training" : name : name) : `${run.name}${which ? ", validation" : ""}`,
  })));
  for (const [heading, names] of CHARTS) {
    names.forEach((name) => used.add(name));
    const curves = curvesOf(names);
    if (curves.length) box.append(chart(heading, curves, { wide: heading === "Loss" || (heading === "Reward") }));
    if (heading === "Loss" && one) { const made = strip(runs[0]); if (made) box.append(made); }
  }
  const rest = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].filter((name) => !used.has(name));
  const sources = rest.filter((name) => name.startsWith("loss/"));
  if (sources.length && one) {
    box.append(chart("Loss of each source", sources.map((name, index) => ({ run: runs[0], points: runs[0].series[name], color: color(index), label: name.slice(5) }))));
  }
  const others = rest.filter((name) => !(one && sources.includes(name))).sort();
  const more = element("div", { class: "charts" });
  for (const name of others) more.append(chart(name, curvesOf([name])));
  section("curves", "Curves", bar, box, others.length ? element("details", { id: "more" }, element("summary", {}, `${others.length} more metrics`), more) : null);
  document.getElementById("more")?.addEventListener("toggle", () => redraws.forEach((draw) => draw()));
})();

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
  show();
  return group(element("div", { class: "bar" }, choose), place);
}));

section("data", "Data", ...perRun((run) => {
  if (!run.sources.length) return null;
  const columns = ["source", "weight", "documents", "tokens", "bytes a token"].slice(0, run.sources.some((each) => each.tokens) ? 5 : 1);
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
  return group(element("p", { class: "soft" }, "What differs from the defaults:"), rows(run.changed),
    element("details", {}, element("summary", {}, `all ${Object.keys(run.options).length} options`), rows(Object.keys(run.options))));
}));

section("environment", "Environment", ...perRun((run) => Object.keys(run.environment).length
  ? table(["", ""], Object.entries(run.environment).map(([name, value]) => [name.replaceAll("_", " "), value])) : null));

redraws.forEach((draw) => draw());
let resizing;
addEventListener("resize", () => { cancelAnimationFrame(resizing); resizing = requestAnimationFrame(() => redraws.forEach((draw) => draw())); });
